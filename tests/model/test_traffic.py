"""What a step sends: recorded on every rank = predicted without processes, every message and byte; and by hand."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from megatron_allattn.config import ModelConfig, Recompute, RunConfig
from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.model.accounting import step_traffic
from megatron_allattn.model.network import Part
from megatron_allattn.model.partition import by_hand, cut
from megatron_allattn.parallel.ledger import Messages
from megatron_allattn.parallel.recorder import Recorder
from tests.support.pool import WorkerPools
from tests.support.trajectories import OPTIMIZERS, Case, build, run_config

VOCABULARY, STREAMS, BLOCK = 101, 8, 16
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
WARM_UP = 7  # steps: caches are full, and DeepSpeed has recorded what it records


@dataclass(frozen=True)
class Trained:
    """A layout and what else the messages depend on."""

    layout: Case
    model: ModelConfig = MODEL
    recompute: Recompute = "none"
    backend: str = "blocked"
    clip: bool = True

    @property
    def run(self) -> RunConfig:
        run = run_config(self.layout, self.model, STREAMS, BLOCK)
        training = replace(run.training, recompute_granularity=self.recompute, attention_backend=self.backend)
        optimizer = OPTIMIZERS[self.layout.optimizer]
        return replace(run, training=training, optimizer=optimizer if self.clip else replace(optimizer, clip_grad=0.0))

    @property
    def parts(self) -> list[Part]:
        case, count = self.layout, self.model.num_layers
        return by_hand(case.layers, count) if case.layers else cut([1.0] * count, 0.0, 0.0, case.pipeline)

    def __str__(self) -> str:
        variant = "" if self.model == MODEL else f"-{self.model.variant}"
        return f"{self.layout}{variant}-{self.recompute}-{self.backend}{'' if self.clip else '-unclipped'}"


@dataclass(frozen=True)
class Recorded:
    entries: dict[tuple[str, str], Messages]
    cache_lengths: list[int]
    tail_targets: int


def record(rank: int, world_size: int, case: Trained) -> Recorded:
    """The messages of one step, on this rank, and what they depend on beside the configuration."""
    attend = {"eager": eager.attend, "blocked": Blocked(None)}[case.backend]
    engine = build(case.layout, VOCABULARY, case.run, attend, case.recompute)
    rng = np.random.default_rng(5)
    recorder = Recorder(engine.groups.layout, rank)
    for step in range(1, WARM_UP + 2):
        text = rng.integers(VOCABULARY, size=(STREAMS, BLOCK + 1))
        own = text[engine.streams.start : engine.streams.stop]
        lengths = [0] * case.model.num_layers
        for layer in engine.network.part.layers:
            lengths[layer] = engine.slots[0]._current[layer - engine.network.part.layers.start].shape[1]

        def train(step: int = step, own: np.ndarray = own) -> None:
            engine.train_step(own[:, :-1], own[:, 1:], step, 1e-3, engine.spans())

        if step <= WARM_UP:
            train()
            continue
        with recorder:
            train()
    tails = int((own[:, 1:] >= case.model.cutoffs[0]).sum()) if case.model.cutoffs else 0
    return Recorded(recorder.ledger.entries, lengths, tails)


def check(pools: WorkerPools, case: Trained) -> None:
    size = case.layout.world_size
    for rank, found in enumerate(pools(size).run(record, case, timeout=120)):
        expected = step_traffic(
            case.run,
            VOCABULARY,
            size,
            rank,
            cache_lengths=found.cache_lengths,
            tail_targets=found.tail_targets,
            parts=case.parts,
        )
        assert found.entries == expected.entries, f"rank {rank}"


def deepspeed(tensor: int = 1, data: int = 1, zero: int = 0, pipeline: int = 1, **options) -> Case:
    return Case(tensor, data, zero, pipeline=pipeline, engine="deepspeed", **options)


FAST = [
    Trained(deepspeed(tensor=2)),
    Trained(deepspeed(data=2)),
    Trained(deepspeed(data=2, optimizer="adam")),
]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_some_layouts(case: Trained, pools: WorkerPools) -> None:
    check(pools, case)
