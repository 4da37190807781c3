"""Trainings of a tiny network by DeepSpeed, of which messages and memory are predicted and then counted."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from megatron_allattn.config import ModelConfig, Recompute, RunConfig
from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.model.network import Part
from megatron_allattn.model.partition import by_hand, cut
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger
from megatron_allattn.parallel.recorder import Recorder
from tests.support.half import allowed
from tests.support.trajectories import OPTIMIZERS, Case, build, run_config

VOCABULARY, STREAMS, BLOCK = 101, 8, 16
WARM_UP = 7  # steps: caches are full, and DeepSpeed has recorded what it records
L = TypeVar("L", bound=Ledger)
MODEL = ModelConfig(
    num_layers=5,
    hidden_size=32,
    num_attention_heads=4,
    persistent_memory_size=12,
    max_attention_span=96,
    adaptive_span=True,
    span_loss=1e-4,
    span_ramp=8,
    attention_dropout=0.2,
    embedding_dropout=0.1,
)


@dataclass(frozen=True)
class Trained:
    """A layout and what else the messages depend on."""

    layout: Case
    model: ModelConfig = MODEL
    recompute: Recompute = "none"
    backend: str = "blocked"
    clip: bool = True
    file: Path | None = None  # a DeepSpeed JSON

    @property
    def run(self) -> RunConfig:
        run = run_config(self.layout, self.model, STREAMS, BLOCK)
        parallel = replace(run.parallel, deepspeed_config=self.file)
        training = replace(run.training, recompute_granularity=self.recompute, attention_backend=self.backend)
        optimizer = OPTIMIZERS[self.layout.optimizer]
        if not self.clip:
            optimizer = replace(optimizer, clip_grad=0.0)
        return replace(run, parallel=parallel, training=training, optimizer=optimizer)

    @property
    def parts(self) -> list[Part]:
        case, count = self.layout, self.model.num_layers
        return by_hand(case.layers, count) if case.layers else cut([1.0] * count, 0.0, 0.0, case.pipeline)

    def __str__(self) -> str:
        variant = "" if self.model == MODEL else f"-{self.model.variant}"
        return f"{self.layout}{variant}-{self.recompute}-{self.backend}{'' if self.clip else '-unclipped'}"


def deepspeed(tensor: int = 1, data: int = 1, zero: int = 0, pipeline: int = 1, **options) -> Case:
    return Case(tensor, data, zero, pipeline=pipeline, engine="deepspeed", **options)


@dataclass(frozen=True)
class RecordedStep(Generic[L]):
    """A rank's messages in a step, and what they depend on beside the configuration: how many positions every layer's
    cache has that the step reads, and this replica's targets."""

    ledger: L
    cache_lengths: list[int]
    targets: np.ndarray


def recorded_step(rank: int, case: Trained, kind: type[L]) -> RecordedStep[L]:
    """The step after the warm-up, on this rank, in a ledger of this kind. Collective."""
    attend = {"eager": eager.attend, "blocked": Blocked(None)}[case.backend]
    with allowed():  # float16
        engine = build(case.layout, VOCABULARY, case.run, attend, case.recompute)
    rng = np.random.default_rng(5)
    layout: Layout = engine.groups.layout
    recorder = Recorder(layout, rank)
    recorder.ledger = ledger = kind(layout, rank)
    for step in range(1, WARM_UP + 2):
        text = rng.integers(VOCABULARY, size=(STREAMS, BLOCK + 1))
        own = text[engine.streams.start : engine.streams.stop]
        lengths = [0] * case.model.num_layers
        for layer in engine.network.part.layers:
            lengths[layer] = engine.slots[0].part(layer).shape[1]

        def train(step: int = step, own: np.ndarray = own) -> None:
            engine.train_step(own[:, :-1], own[:, 1:], step, 1e-3, engine.spans())

        if step <= WARM_UP:
            train()
            continue
        with recorder:
            train()
        assert not engine.overflow
    return RecordedStep(ledger, lengths, own[:, 1:])


def zero_file(folder: Path, stage: int, **options: int) -> Path:
    """A DeepSpeed JSON with limits so small that a tiny network meets them."""
    zero = {"stage": stage, "memory_efficient_linear": False} if stage == 3 else {"stage": stage}
    file = folder / "zero.json"
    file.write_text(json.dumps({"zero_allow_untested_optimizer": True, "zero_optimization": zero | options}))
    return file


TIED = replace(MODEL, untie_embeddings_and_output_weights=False)
ADAPTIVE = replace(MODEL, adaptive_cutoffs="20,50", adaptive_div_value=2)
ADAPTIVE_TIED = replace(ADAPTIVE, untie_embeddings_and_output_weights=False)
VARIANTS = [
    replace(MODEL, variant=variant, **({"persistent_memory_size": 0, "feed_forward_size": 16} if feeds else {}))
    for variant, feeds in (
        ("attn-split", False),
        ("head-split", False),
        ("single-head", False),
        ("ff-attn", True),
        ("transformer", True),
    )
]
