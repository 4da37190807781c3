"""observations.jsonl: what a report of a run shows besides its metrics, by the first rank, a JSON object a line.

    {"kind":"start","step":0,"time":…,"world_size":4,"tensor":2,"pipeline":1,"data":2,"zero_stage":1,"device":"cpu",
     "precision":"fp32"}
    {"kind":"heads","step":100,"spans":[[…]],"persistent_share":[[…]],"effective_vectors":[[…]],"largest_vector":[[…]],
     "dead_vectors":[[…]]}
    {"kind":"memory","step":100,"peak_bytes":…,"device":"host"}

`start` as a run starts or goes on; the others with every evaluation on the validation split. `heads` has a row a layer
and a number a head: how many tokens it looks back, and how it uses its persistent vectors (`HeadUse`; null in variants
that attend to them apart, of which there is no share). `memory` has the largest rank's peak since its start.
"""

import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.checkpoint.files import append_json_line
from megatron_allattn.checkpoint.run_folder import OBSERVATIONS
from megatron_allattn.engine.interface import Engine, Spans
from megatron_allattn.kernels.eager import attention_weights
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.parallel.collectives import gather_objects

POSITIONS = 64  # the last ones of a block, whose attention is looked at
DEAD = 0.01  # of an equal part of a head's attention to its vectors: a vector that gets less is dead
Record = dict[str, Any]


class Observations:
    """Appends records to RUN/observations.jsonl on the first rank, does nothing on the others (`folder` None)."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / OBSERVATIONS if folder is not None else None

    def write(self, record: Record) -> None:
        """Raises StorageError when the run folder cannot be written."""
        if self._path is not None:
            append_json_line(self._path, record)


@dataclass(frozen=True)
class Use:
    """Of a head: the share of its attention that its persistent vectors get; of that, how many vectors it is spread
    over (e to the entropy), the part of the largest, and how many get less than DEAD of an equal part."""

    persistent_share: float
    effective_vectors: float
    largest_vector: float
    dead_vectors: int

    @classmethod
    def of(cls, weights: Tensor) -> "Use":
        """weights: [N], the mean attention to every vector."""
        share = weights.double().sum()
        parts = weights.double() / share
        return cls(
            persistent_share=_short(share.item()),
            effective_vectors=_short(torch.special.entr(parts).sum().exp().item()),
            largest_vector=_short(parts.max().item()),
            dead_vectors=int((parts < DEAD / len(parts)).sum()),
        )


class HeadUse:
    """How heads use their persistent vectors, by what the attention of a pass is given (`BlockContext.observe`): the
    mean weights of the last POSITIONS tokens of a block of its first stream, computed once more by the reference
    backend, as if they were a block of their own.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # by layer, [H, N]
        self._heads: dict[int, Tensor] = {}
        self._calls: dict[int, int] = {}

    def __call__(
        self, block: Tensor, cached: Tensor, weights: LayerWeights, settings: AttentionSettings, state: BlockState
    ) -> None:
        if weights.persistent_key is None:
            return
        before = max(0, block.shape[1] - POSITIONS)
        cache = torch.cat([cached[:1], block[:1, :before]], dim=1)
        alone = replace(state, cached=state.cached + before, spans=None)
        a_BHMA = attention_weights(block[:1, before:], cache, weights, settings, alone)
        mean = a_BHMA[0, :, :, state.window :].float().mean(dim=1)
        self._sums[state.layer] = self._sums.get(state.layer, torch.zeros_like(mean)) + mean
        self._calls[state.layer] = self._calls.get(state.layer, 0) + 1
        self._heads[state.layer] = state.heads

    def found(self) -> dict[tuple[int, int], Use]:
        """By layer and head, of this rank's."""
        return {
            (layer, head): Use.of(row)
            for layer, sums in self._sums.items()
            for head, row in zip(self._heads[layer].tolist(), (sums / self._calls[layer]).cpu(), strict=True)
        }


def observe_evaluation(engine: Engine, spans: Spans, use: HeadUse, step: int) -> list[Record]:
    """The records of an evaluation after `step`. Collective; equal on all ranks."""
    everyone = gather_objects((use.found(), peak_memory(engine.device)), engine.groups.world)
    uses = {place: one for found, _ in everyone for place, one in found.items()}
    layers, heads = spans.tokens.shape
    record: Record = {
        "kind": "heads",
        "step": step,
        "spans": [[_short(one) for one in row] for row in spans.tokens.tolist()],
    }
    for field in Use.__dataclass_fields__:
        rows = (
            [[getattr(uses[layer, head], field) for head in range(heads)] for layer in range(layers)] if uses else None
        )
        record[field] = rows
    device = "cuda" if engine.device.type == "cuda" else "host"
    return [record, {"kind": "memory", "step": step, "peak_bytes": max(peak for _, peak in everyone), "device": device}]


def observe_start(engine: Engine, step: int) -> Record:
    """The record of a start that goes on from `step`."""
    groups, training = engine.groups, engine.run.training
    return {
        "kind": "start",
        "step": step,
        "time": time.time(),
        "world_size": groups.world.size,
        "tensor": groups.tensor.size,
        "pipeline": groups.pipeline.size,
        "data": groups.data.size,
        "zero_stage": engine.zero_stage,
        "device": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type,
        "precision": "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32",
    }


def peak_memory(device: torch.device) -> int:
    """Bytes of the most that this process has held, of a GPU's memory where it has one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _short(number: float) -> float:
    """To six digits: pictures need no more."""
    return float(f"{number:.6g}")
