"""Profiles of a sweep have the mean and the maximum they are named by; lines and flatness by hand and by numpy."""

import numpy as np
import pytest

from megatron_allattn.benchmark.sweep import Sizes, fit_line, flatness, max_sweep, mean_sweep, sweep_results
from megatron_allattn.config import UsageError

SIZES = Sizes(num_layers=3, num_heads=8, ramp=32, points=5)


def test_mean_sweep_has_one_maximum() -> None:
    found = mean_sweep(2048, SIZES)
    assert list(found) == [284, 469, 654, 839, 1024]  # (2048 + 7 · 32) / 8 … 2048 / 2
    for mean, profile in found.items():
        assert profile.mean == pytest.approx(mean)
        assert [max(row) for row in profile.tokens] == [2048] * 3
        assert min(map(min, profile.tokens)) >= 32


def test_max_sweep_has_one_mean() -> None:
    found = max_sweep(300, 2048, SIZES)
    assert list(found) == [300, 737, 1174, 1611, 2048]
    for longest, profile in found.items():
        assert profile.longest == longest
        assert profile.mean == pytest.approx(300)
        assert [sum(row) for row in profile.tokens] == [pytest.approx(2400)] * 3


@pytest.mark.parametrize(
    ("mean", "message"),
    [
        (283, "--mean-span 283: with 8 heads, one of them at 2048, it is in 284 … 2043; give such a mean"),
        (2044, "--mean-span 2044: with 8 heads"),
    ],
)
def test_a_mean_that_no_profile_has(mean: int, message: str) -> None:
    with pytest.raises(UsageError) as error:
        max_sweep(mean, 2048, SIZES)
    assert str(error.value).startswith(message)
    assert max_sweep(284, 2048, SIZES) and max_sweep(2043, 2048, SIZES)


@pytest.mark.parametrize("mean", [None, 33])
def test_a_maximum_at_which_no_mean_leaves_room(mean: int | None) -> None:
    with pytest.raises(
        UsageError, match=r"^--longest-span 37: with 8 heads, a ramp of 32 and 5 points it is at least 38"
    ):
        max_sweep(mean, 37, SIZES)
    assert list(max_sweep(33, 38, SIZES)) == [33, 34, 36, 37, 38]  # (38 + 7 · 32) / 8 = 32.75


def test_a_maximum_that_the_default_mean_does_not_fit() -> None:
    assert list(max_sweep(None, 2048, SIZES)) == list(max_sweep(300, 2048, SIZES))
    message = (
        r"^--longest-span 200: with 8 heads, one of them at it, the mean is in 53 … 195, and it is 300 by default; "
    )
    with pytest.raises(UsageError, match=message + "give another span, or --mean-span too$"):
        max_sweep(None, 200, SIZES)


def test_a_maximum_that_leaves_no_room() -> None:
    with pytest.raises(UsageError, match=r"^--longest-span 70: with 8 heads the mean span goes from 37 to half of it"):
        mean_sweep(70, SIZES)


def test_a_line_by_hand() -> None:
    line = fit_line([0, 1, 2], [1.0, 2.0, 6.0])  # slope 5/2, mean 3; residuals ½, −1, ½; total 4 + 1 + 9
    assert (line.slope, line.intercept) == (2.5, 0.5)
    assert line.r_squared == pytest.approx(1 - 1.5 / 14)
    assert fit_line([1, 2, 3], [4.0, 4.0, 4.0]).r_squared == 1.0


def test_a_line_by_numpy() -> None:
    generator = np.random.default_rng(0)
    x, noise = generator.uniform(10, 1000, 12), generator.normal(0, 30, 12)
    y = 5 + 0.25 * x + noise
    line = fit_line(x.tolist(), y.tolist())
    slope, intercept = np.polyfit(x, y, 1)
    assert (line.slope, line.intercept) == (pytest.approx(slope), pytest.approx(intercept))
    assert line.r_squared == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)


def test_flatness_and_what_is_written() -> None:
    assert flatness([2.0, 2.5, 2.2]) == 0.25
    found = sweep_results({10: 1.0, 20: 2.0, 30: 3.0})
    assert found == {
        "x": [10, 20, 30],
        "seconds": [1.0, 2.0, 3.0],
        "intercept": pytest.approx(0),
        "slope": pytest.approx(0.1),
        "r_squared": pytest.approx(1),
        "flatness": 2.0,
    }
