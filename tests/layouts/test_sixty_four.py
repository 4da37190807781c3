"""64 ranks for real, on this machine: TP 4 × PP 4 × DP 4 beside one process (`make test-64`; 19 GB of memory)."""

from pathlib import Path

import pytest

from tests.support.layouts import Record, check, train
from tests.support.pool import WorkerPools
from tests.support.trajectories import Case

CASE = Case(4, 4, 1, 2, "adagrad", "float32", "deepspeed", 4)


@pytest.mark.sixty_four
def test_sixty_four_ranks(pools: WorkerPools, shared: Path, record_property: Record) -> None:
    single = train(pools, shared, CASE.single())
    check(CASE, train(pools, shared, CASE, timeout=2400), single, record_property, "64 processes")
