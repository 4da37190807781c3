"""What the comparisons of layouts have in common: the training, its text, how far a layout may be from one process.

30 steps of 16 streams of 16 tokens, 5 layers, dropout 0.2 on attention, adaptive spans with their loss, clipping that
is active. 16 streams, so that 4 replicas can accumulate over 4 micro-batches.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.pool import WorkerPools
from tests.support.trajectories import MODEL, Case, Trajectory, differences, trajectory

STEPS, STREAMS, BLOCK, VOCABULARY = 30, 16, 16, 101
FEW = 10  # steps, where `make test` takes a look
DEEP = replace(MODEL, num_layers=5)
SIZES = tuple((t, p, d) for t in (1, 2, 4) for p in (1, 2, 4) for d in (1, 2, 4) if t * p * d <= 8)
"""TP, PP, DP of every layout that fits 8 processes."""

Train = Callable[..., Trajectory]
"""(case, steps = STEPS)"""
Record = Callable[[str, object], None]

BOUNDS = {
    "float32": {"first loss": 1e-6, "gradients": 1e-5, "losses": 1e-5, "first norm": 1e-6},
    "float64": {"first loss": 1e-13, "gradients": 1e-10, "losses": 1e-10, "first norm": 1e-12},
}


def rest(*cases: Any) -> list[Any]:
    """Those of a test's cases that `make test-layouts` runs, and `make test` does not. A tuple: several arguments."""
    return [pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.layouts) for c in cases]


@cache
def text(shared: Path) -> np.ndarray:
    """Shakespeare as ids of a vocabulary of 101: his characters, and the most frequent pairs of them."""
    content = (shared / "data/tinyshakespeare.txt").read_text()
    characters = sorted(set(content))
    frequent = Counter(map("".join, pairwise(content))).most_common(VOCABULARY - len(characters))
    pairs = [pair for pair, _ in frequent]
    index = {symbol: number for number, symbol in enumerate(characters + pairs)}
    symbols = re.findall("|".join(map(re.escape, pairs)) + "|.", content, flags=re.DOTALL)
    return np.array([index[symbol] for symbol in symbols], dtype=np.uint8)


def train(pools: WorkerPools, shared: Path, case: Case, steps: int = STEPS, timeout: float = 300) -> Trajectory:
    """What happens in the training of a case."""
    arguments = (case, text(shared), VOCABULARY, steps, DEEP, STREAMS, BLOCK)
    result = pools(case.world_size).run(trajectory, *arguments, timeout=timeout)[0]
    assert result is not None
    return result


def check(case: Case, found: Trajectory, single: Trajectory, record: Record, kind: str) -> None:
    """Hold a layout's training against one process's, and note how far it was for the table of this kind."""
    far = differences(found, single)
    note(case, far, record, kind)
    for what, bound in BOUNDS[case.dtype].items():
        assert far[what] <= bound, f"{what} differs by {far[what]:.1e}, more than {bound:.0e}"


def note(case: Case, far: dict[str, float], record: Record, kind: str) -> None:
    """A row's part of the table that conftest.py writes."""
    where = {"sizes": (case.tensor, case.pipeline, case.data), "zero": case.zero, "accumulation": case.accumulation}
    record("layout", {"kind": kind, **where, **far})
