"""What a step sends: recorded on every rank = predicted without processes, every message and byte; and by hand."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest

from megatron_allattn.config import ModelConfig, Recompute, UsageError
from megatron_allattn.model.accounting import step_traffic
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger, Messages, groups_by_name
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trained import (
    ADAPTIVE,
    ADAPTIVE_TIED,
    MODEL,
    TIED,
    VARIANTS,
    VOCABULARY,
    Trained,
    deepspeed,
    recorded_step,
    zero_file,
)


@dataclass(frozen=True)
class Recorded:
    entries: dict[tuple[str, str], Messages]
    cache_lengths: list[int]
    tail_targets: int


def record(rank: int, world_size: int, case: Trained) -> Recorded:
    """The messages of one step, on this rank, and what they depend on beside the configuration."""
    found = recorded_step(rank, case, Ledger)
    tails = int((found.targets >= case.model.cutoffs[0]).sum()) if case.model.cutoffs else 0
    return Recorded(found.ledger.entries, found.cache_lengths, tails)


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


FAST = [
    Trained(deepspeed(tensor=2, sequence=True, shard_caches=True, optimizer="adam"), ADAPTIVE_TIED),
    Trained(deepspeed(data=2, zero=3)),
    Trained(deepspeed(pipeline=2, accumulation=4, zero=1, layers=(1, 4)), TIED),
    *rest(
        Trained(deepspeed(data=2, zero=2, accumulation=2, optimizer="adam")),
        Trained(deepspeed(tensor=2, accumulation=2)),
        Trained(deepspeed(data=2, zero=1, dtype="bfloat16")),
        Trained(deepspeed(tensor=2, zero=1, dtype="float16"), backend="eager"),
        Trained(deepspeed(tensor=2, pipeline=2, accumulation=2, optimizer="adam")),
    ),
]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_some_layouts(case: Trained, pools: WorkerPools) -> None:
    check(pools, case)


ALL = [
    *(
        Trained(deepspeed(data=data, zero=zero, accumulation=accumulation, optimizer=optimizer, dtype=dtype))
        for data, zero, (accumulation, optimizer, dtype) in product(
            (2, 4), range(4), ((1, "adagrad", "float32"), (2, "adam", "float32"), (2, "adagrad", "bfloat16"))
        )
    ),
    *(
        Trained(deepspeed(2, zero=1, sequence=sequence, shard_caches=shard, dtype=dtype), model, recompute)
        for sequence, shard, recompute, (model, dtype) in product(
            (False, True),
            (False, True),
            ("none", "selective", "full"),
            ((MODEL, "bfloat16"), (ADAPTIVE, "float32")),
        )
    ),
    Trained(deepspeed(4, zero=1, sequence=True, shard_caches=True, dtype="bfloat16"), ADAPTIVE_TIED),
    Trained(deepspeed(4, accumulation=2)),
    *(Trained(deepspeed(tensor=2, sequence=sequence), model) for sequence in (False, True) for model in VARIANTS),
    *(Trained(deepspeed(tensor=2, zero=zero), model) for zero in (0, 1) for model in (TIED, ADAPTIVE, ADAPTIVE_TIED)),
    Trained(deepspeed(tensor=2, sequence=True, shard_caches=True), backend="eager"),
    Trained(deepspeed(tensor=2, shard_caches=True), recompute="full", backend="eager"),
    Trained(deepspeed(tensor=2), replace(MODEL, adaptive_span=False)),
    Trained(deepspeed(tensor=2, data=2, zero=1), clip=False),
    *(
        Trained(deepspeed(tensor, data, zero, pipeline, accumulation=2, dtype=dtype, sequence=sequence), model)
        for (tensor, data, pipeline), (zero, dtype, model), sequence in product(
            ((1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2), (4, 1, 2), (2, 1, 4)),
            ((0, "float32", MODEL), (1, "float32", TIED), (1, "bfloat16", ADAPTIVE_TIED)),
            (False, True),
        )
        if tensor > 1 or not sequence
    ),
    Trained(deepspeed(2, 2, 1, 2, sequence=True, shard_caches=True, accumulation=2, layers=(4, 1)), TIED, "full"),
    *(Trained(deepspeed(2, 2, zero, sequence=True, shard_caches=True, accumulation=2)) for zero in (2, 3)),
    *(
        Trained(deepspeed(tensor, data, zero, pipeline, dtype="float16", optimizer="adam"), backend="eager")
        for tensor, data, zero, pipeline in ((2, 2, 1, 1), (1, 2, 2, 1), (2, 2, 3, 1), (2, 1, 1, 2), (2, 2, 1, 2))
    ),
    Trained(deepspeed(data=2, zero=1), file=Path("zero1-offload.json")),
    Trained(deepspeed(data=2, zero=2), file=Path("zero2-offload.json")),
    Trained(deepspeed(data=2, zero=3, accumulation=2), file=Path("zero3-offload.json")),
]


@pytest.mark.layouts
@pytest.mark.parametrize("case", ALL, ids=str)
def test_all_layouts(case: Trained, pools: WorkerPools) -> None:
    check(pools, case)


@pytest.mark.layouts
@pytest.mark.parametrize("model", [MODEL, TIED, *VARIANTS], ids=lambda model: model.variant)
@pytest.mark.parametrize("limit", [700, 2300])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_many_buckets(zero: int, limit: int, model: ModelConfig, pools: WorkerPools, tmp_path: Path) -> None:
    file = zero_file(tmp_path, zero, reduce_bucket_size=limit)
    check(pools, Trained(deepspeed(data=2, zero=zero, optimizer="adam"), model, file=file))


@pytest.mark.layouts
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [MODEL, ADAPTIVE_TIED, *VARIANTS], ids=lambda model: model.variant)
@pytest.mark.parametrize(
    ("small", "ahead", "again"), [(100, 10**6, 10**6), (100, 3000, 5000), (0, 1000, 2000), (0, 0, 0)]
)
def test_weights_that_come_and_go(
    small: int, ahead: int, again: int, model: ModelConfig, recompute: Recompute, pools: WorkerPools, tmp_path: Path
) -> None:
    limits = {"param_persistence_threshold": small, "prefetch_bucket_size": ahead, "max_reuse_distance": again}
    file = zero_file(tmp_path, 3, **{f"stage3_{name}": limit for name, limit in limits.items()})
    check(pools, Trained(deepspeed(data=2, zero=3, accumulation=2), model, recompute, file=file))


def test_by_hand() -> None:
    """One all-reduce for each layer and direction, and one more of positions, in each micro-batch (docs/traffic.md)."""
    case = Trained(deepspeed(tensor=2, accumulation=2, optimizer="adam"))
    hidden, rows = 4 * 16 * 32 * 4, 4 * 16 * 4  # B·M·D and B·M, in bytes
    forward, backward = (1 + 5) * hidden + rows + 2 * rows, (5 + 1) * hidden + 8 * 96 * 4
    assert step_traffic(case.run, VOCABULARY, 2).entries == {
        ("tensor", "all_reduce"): Messages(2 * (6 + 2 + 6 + 1) + 1, 2 * (forward + backward) + 8),  # 8 of the norm
        ("tensor", "all_gather"): Messages(1, 5 * 4 * 4),  # spans
    }


def test_replicas_by_hand() -> None:
    """A float32 replica without ZeRO: all gradients once, the loss, and with one clip for each tensor nothing more."""
    case = Trained(deepspeed(data=2))
    layer = 4 * 32 * 32 + 2 * 32 + 4 + 2 * 4 * 8 * 12
    elements = 2 * 101 * 32 + 101 + 8 * 96 + 5 * layer
    assert step_traffic(case.run, VOCABULARY, 2, 1).entries == {("data", "all_reduce"): Messages(2, 4 * elements + 8)}


def test_sixty_four_ranks_without_any() -> None:
    """Ranks of a group say the same of it, and as much is received as sent."""
    layout = Layout(tensor_size=4, data_size=4, pipeline_size=4)
    case = Trained(deepspeed(tensor=4, data=4, pipeline=4, zero=1, accumulation=2, dtype="bfloat16"))
    ledgers = [step_traffic(case.run, VOCABULARY, 64, rank, parts=case.parts).entries for rank in range(64)]
    for rank, entries in enumerate(ledgers):
        named = groups_by_name(layout, rank)
        for (group, operation), messages in entries.items():
            if operation not in ("send", "recv") and group in ("data", "replica", "world"):
                others = [ledgers[other].get((group, operation)) for other in named[group]]
                assert set(others) == {messages}, f"rank {rank}, {group} {operation}"
    totals = [
        sum((entries.get(("pipeline", operation), Messages()) for entries in ledgers), Messages())
        for operation in ("send", "recv")
    ]
    assert totals[0] == totals[1] and totals[0].count > 0


def test_caches_must_be_known() -> None:
    case = Trained(deepspeed(tensor=2, shard_caches=True))
    with pytest.raises(ValueError, match="5 layers need one each"):
        step_traffic(case.run, VOCABULARY, 2)


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    file = zero_file(tmp_path, 2, zero_quantized_gradients=True)
    case = Trained(deepspeed(data=2, zero=2), file=file)
    with pytest.raises(UsageError, match="zero_quantized_gradients: its traffic cannot be predicted"):
        step_traffic(case.run, VOCABULARY, 2)
