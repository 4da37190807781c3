"""64 ranks for real, on this machine: TP 4 × PP 4 × DP 4 beside one process (`make test-64`; 19 GB of memory)."""

from pathlib import Path

import pytest

from tests.layouts.test_layouts import BOUNDS, STEPS, text
from tests.support.pool import WorkerPools
from tests.support.trajectories import Case, differences, trajectory

CASE = Case(4, 4, 1, 2, "adagrad", "float32", "deepspeed", 4, depth=5)


@pytest.mark.sixty_four
def test_sixty_four_ranks(pools: WorkerPools, shared: Path, record_property) -> None:
    tokens, vocab_size = text(shared)
    expected = pools(1).run(trajectory, CASE.single(), tokens, vocab_size, STEPS)[0]
    found = pools(CASE.world_size).run(trajectory, CASE, tokens, vocab_size, STEPS, timeout=2400)[0]
    far = differences(found, expected)
    for what, bound in BOUNDS["float32"].items():
        record_property(f"float32 {what}", far[what])
        assert far[what] <= bound, f"{what} differs by {far[what]:.1e}, more than {bound:.0e}"
