"""bfloat16 at any layout, beside one process in bfloat16 and beside one in float32.

bfloat16 keeps 8 bits, so that one rounding is up to 2⁻⁹ = 2e-3 of a number. A layout rounds elsewhere: shards of a sum
are rounded before they are added (TP), gradients before they are averaged (DP, accumulation). A loss is a mean over 256
tokens, whose roundings mostly cancel; the update acts on float32 masters. Hence the bounds below, each three to six
times of what was found (loss 2.5e-5, gradients 3.7e-2, losses 1.7e-4, norm 4.5e-4; beside float32 loss 7.9e-5, losses
1.9e-4, their mean 3.3e-6): a wrong scale, a lost term or another mask would move losses by far more. Where nothing is
rounded elsewhere (equal TP, DP and micro-batches) losses are equal to the bit.
"""

from itertools import cycle

import numpy as np
import pytest

from tests.support.layouts import FEW, SIZES, STEPS, Record, Train, note
from tests.support.trajectories import Case, differences

BOUNDS = {"first loss": 1e-4, "gradients": 1.5e-1, "losses": 1e-3, "first norm": 2e-3}
TO_FLOAT32 = {"first loss": 5e-4, "losses": 1e-3, "mean loss": 1e-4}

TURNS = zip(cycle((1, 2, 4, 2)), cycle((1, 2, 3, 0)), cycle(("adam", "adagrad", "adagrad")), strict=False)
CASES = [
    Case(t, d, zero if p == 1 else zero % 2, accumulation, optimizer, "bfloat16", "deepspeed", p)
    for (t, p, d), (accumulation, zero, optimizer) in zip(SIZES, TURNS, strict=False)
]
FAST = Case(2, 1, 1, 2, "adagrad", "bfloat16", "deepspeed", 2)


@pytest.mark.parametrize(
    ("case", "steps"), [(FAST, FEW), *(pytest.param(case, STEPS, marks=pytest.mark.layouts) for case in CASES)], ids=str
)
def test_bfloat16_is_near_one_process(case: Case, steps: int, train: Train, record_property: Record) -> None:
    found, single = train(case, steps), train(case.single(), steps)
    far = differences(found, single)
    note(case, far, record_property, "bfloat16 beside one process in bfloat16")
    for what, bound in BOUNDS.items():
        assert far[what] <= bound, f"{what} differs by {far[what]:.1e}, more than {bound:.0e}"


@pytest.mark.layouts
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_is_near_float32(case: Case, train: Train, record_property: Record) -> None:
    full = Case(optimizer=case.optimizer)
    found, exact = train(case), train(full)
    far = differences(found, exact)
    note(case, far, record_property, "bfloat16 beside one process in float32")
    far["mean loss"] = abs(float(np.mean(found.losses) / np.mean(exact.losses)) - 1)
    for what, bound in TO_FLOAT32.items():
        assert far[what] <= bound, f"{what} differs by {far[what]:.1e}, more than {bound:.0e}"


@pytest.mark.layouts
@pytest.mark.parametrize("case", [case for case in CASES if case.pipeline > 1], ids=str)
def test_stages_alone_change_no_bit_of_the_first_loss(case: Case, train: Train) -> None:
    beside = Case(case.tensor, case.data, 1, case.accumulation, "adam", "bfloat16", "deepspeed")
    assert train(case).losses[0] == train(beside).losses[0]
