"""The predicted peak of a step with DeepSpeed against the bytes of all tensors that PyTorch's profiler has seen."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from megatron_allattn.benchmark.tensor_bytes import profiled_peak
from megatron_allattn.cluster.planning.devices import device_named
from megatron_allattn.cluster.planning.memory import memory_phases
from megatron_allattn.config import ModelConfig, RunConfig
from megatron_allattn.engine.interface import Engine
from megatron_allattn.model.traffic import Place
from megatron_allattn.parallel.layout import Layout
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trained import Trained, deepspeed
from tests.support.trajectories import build

TOLERANCE = 0.10
STEPS = 3  # the last is measured, TIMES times; the ones before fill the caches
TIMES = 3
VOCABULARY, STREAMS, BLOCK = 301, 8, 64
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    persistent_memory_size=64,
    max_attention_span=128,
    span_ramp=96,
)
LARGE = replace(MODEL, hidden_size=256, persistent_memory_size=256)


@dataclass(frozen=True)
class Peak:
    """Of a rank: bytes at most during a step, and before it; and what its prediction needs."""

    most: int
    before: int
    windows: tuple[int, ...]
    look_back: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Measured(Trained):
    """Larger, and with a bucket of so many elements."""

    model: ModelConfig = MODEL
    bucket: int = 20_000
    streams: int = STREAMS

    @property
    def run(self) -> RunConfig:
        run = super().run
        micro = self.streams // self.layout.data // self.layout.accumulation
        training = replace(run.training, seq_length=BLOCK, global_batch_size=self.streams, micro_batch_size=micro)
        return replace(run, training=training)


def measure(rank: int, world_size: int, case: Measured) -> Peak:
    """One step's peak."""
    engines: list[Engine] = []
    rng = np.random.default_rng(5)
    found = []

    def train(step: int) -> None:
        engine = engines[0]
        text = rng.integers(VOCABULARY, size=(case.streams, BLOCK + 1))
        own = text[engine.streams.start : engine.streams.stop]
        spans = engine.spans()
        found[:] = [spans]
        engine.train_step(own[:, :-1], own[:, 1:], step, 1e-3, spans)

    def start() -> None:
        engines.append(build(case.layout, VOCABULARY, case.run, recompute=case.recompute))
        for step in range(1, STEPS):
            train(step)

    with ExitStack() as stack:
        if case.layout.dtype == "bfloat16":  # as where products have instructions for it
            stack.enter_context(patch("megatron_allattn.parallel.products.multiplies_bfloat16", lambda: True))
        most = profiled_peak(start, lambda: train(STEPS), TIMES)
    spans = found[0]
    return Peak(most, 0, spans.windows, spans.look_back)


def check(pools: WorkerPools, case: Measured, tmp_path: Path) -> None:
    stage, limit = case.layout.zero, case.bucket
    zero = {"stage": stage, "reduce_bucket_size": limit}
    if stage == 3:
        zero |= {"memory_efficient_linear": False, "stage3_prefetch_bucket_size": limit}
        zero |= {"stage3_param_persistence_threshold": 1000}
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_allow_untested_optimizer": True, "zero_optimization": zero}))
    case = replace(case, file=file, backend=case.layout.backend)
    one = case.layout
    layout = Layout(tensor_size=one.tensor, data_size=one.data, pipeline_size=one.pipeline)
    worst = 0.0
    lines = []
    for rank, peak in enumerate(pools(layout.world_size).run(measure, case, timeout=300)):
        place = Place(case.run, VOCABULARY, layout, rank, case.parts[layout.pipeline_rank(rank)])
        look_back = [layer * one.tensor for layer in peak.look_back]
        phases = memory_phases(place, look_back, device_named("cpu"))
        highest = max(phases, key=lambda phase: phase.total)
        off = highest.total / peak.most - 1
        lines.append(f"rank {rank}: {off:+.1%}: predicted {highest}, measured {peak.most:,}")
        worst = max(worst, abs(off))
    print("", case, *lines, sep="\n")
    assert worst <= TOLERANCE, "\n".join(lines)


def measured(
    tensor: int = 1,
    data: int = 1,
    zero: int = 0,
    pipeline: int = 1,
    model: ModelConfig = MODEL,
    recompute: str = "none",
    **options,
) -> Measured:
    options = {"backend": "blocked", "optimizer": "adam"} | options
    return Measured(deepspeed(tensor, data, zero, pipeline, **options), model, recompute=recompute)


CASES = [
    measured(pipeline=2, accumulation=4, zero=1),
    measured(tensor=2, sequence=True, shard_caches=True, zero=1),
    *rest(
        *(
            measured(data=2, zero=zero, accumulation=accumulation, model=model)
            for zero in range(4)
            for accumulation in (1, 2)
            for model in (MODEL, LARGE)
        ),
        measured(tensor=2, zero=1),
        measured(tensor=2, sequence=True, zero=1),
        measured(tensor=2, sequence=True, zero=1, recompute="full"),
        measured(tensor=2, sequence=True, zero=1, recompute="selective"),
        measured(tensor=2, sequence=True, shard_caches=True, zero=1, recompute="full"),
        measured(tensor=2, shard_caches=True, zero=1, recompute="full"),
        measured(tensor=2, shard_caches=True, zero=1),
        measured(tensor=2, sequence=True, backend="eager"),
        measured(tensor=2, sequence=True, shard_caches=True, backend="eager", accumulation=4),
        measured(tensor=4, sequence=True, shard_caches=True),
        measured(pipeline=2, accumulation=1, zero=1),
        measured(pipeline=4, accumulation=8, zero=1),
        measured(pipeline=4, accumulation=4),
        measured(pipeline=2, accumulation=4, recompute="full"),
        measured(tensor=2, pipeline=2, accumulation=4, zero=1),
        measured(tensor=2, pipeline=2, accumulation=4, sequence=True, shard_caches=True),
        measured(tensor=2, pipeline=2, data=2, accumulation=4, zero=1, sequence=True),
        measured(data=2, zero=1, dtype="bfloat16"),
        measured(data=2, zero=2, dtype="bfloat16", accumulation=2),
        measured(data=2, zero=3, dtype="bfloat16"),
        measured(tensor=2, sequence=True, dtype="bfloat16"),
        measured(tensor=2, pipeline=2, accumulation=4, zero=1, dtype="bfloat16"),
        measured(data=2, zero=1, optimizer="adagrad"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_of_a_step(case: Measured, pools: WorkerPools, tmp_path: Path) -> None:
    check(pools, case, tmp_path)
