"""Gradient accumulation (--micro-batch-size) gives the numbers of one pass over the whole batch, in float64.

Dropout, adaptive span with its loss, caches and active clipping are on, as in `tests.support.trajectories`.
"""

import numpy as np
import pytest

from tests.support.pool import WorkerPools
from tests.support.trajectories import OPTIMIZERS, Case, Trajectory, differences, trajectory

TOKENS = np.random.default_rng(11).integers(0, 37, 8 * 32 * 12).astype(np.uint8)
STEPS = 8


def train(pools: WorkerPools, optimizer: str, accumulation: int) -> Trajectory:
    case = Case(accumulation=accumulation, optimizer=optimizer, dtype="float64")
    result = pools(1).run(trajectory, case, TOKENS, 37, STEPS)[0]
    assert result is not None
    return result


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_accumulated_steps_are_whole_steps(pools: WorkerPools, optimizer: str) -> None:
    whole = train(pools, optimizer, 1)
    assert whole.norms[0] > OPTIMIZERS[optimizer].clip_grad  # what is clipped must be the sum, not a part of it
    for accumulation in (2, 8):
        parts = train(pools, optimizer, accumulation)
        assert max(differences(parts, whole).values()) < 1e-12
        np.testing.assert_allclose(parts.norms, whole.norms, rtol=1e-12)
        for name, weight in whole.weights.items():
            # Adagrad divides small gradients by themselves, and their rounding with them
            np.testing.assert_allclose(parts.weights[name], weight, rtol=0, atol=1e-9, err_msg=name)
