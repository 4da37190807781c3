"""One trajectory, any layout: the same losses and gradients as in a single process.

TP 1, 2, 4 × DP 1, 2 × ZeRO 0-3 × accumulation 1, 2 × both optimizers, and pipelines of up to 8 processes: TP 1, 2, 4 ×
PP 2, 4 × DP 1, 2, 4 × ZeRO 0, 1 × accumulation 1, 2, 4, on real text, with dropout and active clipping; the same with
sequence parallelism, caches shared or not.
The fast subset runs in `make test`, all of it in `make test-layouts`.
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.support.pool import WorkerPools
from tests.support.trajectories import Case, Trajectory, characters, differences, trajectory

STEPS = 30
Single = Callable[[Case], Trajectory]

ALL = [
    Case(tensor, data, zero, accumulation, optimizer, "float32", "deepspeed")
    for tensor, data, zero, accumulation, optimizer in product((1, 2, 4), (1, 2), range(4), (1, 2), ("adagrad", "adam"))
]
FAST = [
    Case(1, 1, 0, 1, "adagrad", "float32", "deepspeed"),
    Case(2, 1, 1, 1, "adagrad", "float32", "deepspeed"),
    Case(2, 2, 3, 2, "adagrad", "float32", "deepspeed"),
    Case(1, 2, 2, 1, "adam", "float32", "deepspeed"),
    Case(2, 2, 0, 2, "adam", "float32", "deepspeed"),
    Case(4, 1, 1, 2, "adam", "float32", "deepspeed"),
]
PIPELINES = [
    Case(tensor, data, zero, accumulation, optimizer, "float32", "deepspeed", pipeline, depth=5)
    for tensor, pipeline, data, zero, accumulation, optimizer in product(
        (1, 2, 4), (2, 4), (1, 2, 4), (0, 1), (1, 2, 4), ("adagrad", "adam")
    )
    if tensor * pipeline * data <= 8 and data * accumulation <= 8
]
FAST_PIPELINES = [
    Case(1, 1, 1, 4, "adagrad", "float32", "deepspeed", 2, (1, 4), 5),
    Case(2, 1, 1, 2, "adam", "float32", "deepspeed", 2, depth=5),
    Case(1, 2, 0, 2, "adagrad", "float32", "deepspeed", 2, depth=5),
    Case(1, 1, 0, 2, "adam", "float32", "deepspeed", 4, depth=5),
]
SEQUENCES = [
    Case(tensor, data, zero, accumulation, optimizer, "float32", "deepspeed", pipeline, (), 5, True, shard_caches)
    for tensor, pipeline, data, zero, accumulation, optimizer, shard_caches in product(
        (2, 4), (1, 2), (1, 2), (0, 1, 3), (1, 2), ("adagrad", "adam"), (False, True)
    )
    if tensor * pipeline * data <= 8 and not (pipeline > 1 and zero == 3)
]
FAST_SEQUENCES = [
    Case(2, 2, 1, 2, "adagrad", "float32", "deepspeed", 1, (), 5, True),
    Case(2, 1, 1, 2, "adagrad", "float32", "deepspeed", 2, (), 5, True, True),
]
PLAIN = [
    Case(tensor, data, 0, accumulation, optimizer, "float64", "plain")
    for tensor, data, accumulation, optimizer in product((1, 2, 4), (1, 2), (1, 2), ("adagrad", "adam"))
]
FAST_PLAIN = [Case(2, 2, 0, 2, "adagrad", "float64", "plain"), Case(4, 1, 0, 1, "adam", "float64", "plain")]


def run(pools: WorkerPools, shared: Path, case: Case) -> Trajectory:
    tokens, vocab_size = text(shared)
    result = pools(case.world_size).run(trajectory, case, tokens, vocab_size, STEPS, timeout=300)[0]
    assert result is not None
    return result


@cache
def text(shared: Path) -> tuple[np.ndarray, int]:
    return characters(shared / "data/tinyshakespeare.txt")


@pytest.fixture(scope="module")
def single(pools: WorkerPools, shared: Path) -> Single:
    """The single process's trajectory of a case, computed once per optimizer and precision."""
    return cache(lambda case: run(pools, shared, case.single()))


BOUNDS = {
    "float32": {"first loss": 1e-6, "gradients": 1e-5, "losses": 1e-5, "first norm": 1e-5},
    "float64": {"first loss": 1e-13, "gradients": 1e-10, "losses": 1e-10, "first norm": 1e-12},
}


def check(case: Case, pools: WorkerPools, shared: Path, single: Single, record: Callable[[str, float], None]) -> None:
    found = differences(run(pools, shared, case), single(case.single()))
    for what, bound in BOUNDS[case.dtype].items():
        record(f"{case.dtype} {what}", found[what])
        assert found[what] <= bound, f"{what} differs by {found[what]:.1e}, more than {bound:.0e}"


@pytest.mark.parametrize("case", FAST + FAST_PIPELINES + FAST_SEQUENCES + FAST_PLAIN, ids=str)
def test_some_layouts(case: Case, pools: WorkerPools, shared: Path, single: Single, record_property) -> None:
    check(case, pools, shared, single, record_property)


@pytest.mark.layouts
@pytest.mark.parametrize("case", ALL + PIPELINES + SEQUENCES + PLAIN, ids=str)
def test_all_layouts(case: Case, pools: WorkerPools, shared: Path, single: Single, record_property) -> None:
    check(case, pools, shared, single, record_property)
