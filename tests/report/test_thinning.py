"""Thinned curves keep extremes, ends and gaps; means are those of numpy."""

import numpy as np
import pytest

from megatron_allattn.report.metrics import Curve
from megatron_allattn.report.thinning import smooth, thin


def test_short_curves_stay_as_they_are() -> None:
    curve = Curve(np.arange(30), np.arange(30.0))
    assert thin(curve, 10) is curve


@pytest.mark.parametrize("count", [31, 1000, 99_991, 1_000_000])
def test_extremes_ends_and_gaps_of_every_stretch_stay(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    values[count // 3] = 50.0
    values[count // 2] = -50.0
    values[count // 4] = np.nan
    curve = Curve(np.arange(count) + 1, values)
    thinned = thin(curve, 10)
    assert len(thinned) <= 32
    assert np.all(np.diff(thinned.steps) > 0) and thinned.steps[0] == 1 and thinned.steps[-1] == count
    np.testing.assert_array_equal(thinned.values, values[thinned.steps - 1])
    assert {count // 3 + 1, count // 2 + 1, count // 4 + 1} <= set(thinned.steps.tolist())
    size = -(-count // 10)
    for begin in range(0, count, size):  # every stretch by itself
        own = thinned.values[(thinned.steps > begin) & (thinned.steps <= begin + size)]
        part = values[begin : begin + size]
        assert (np.nanmin(own), np.nanmax(own)) == (np.nanmin(part), np.nanmax(part))


def test_a_long_gap_stays_one() -> None:
    values = np.ones(1000)
    values[200:700] = np.nan
    thinned = thin(Curve(np.arange(1000), values), 10)
    inside = (thinned.steps >= 200) & (thinned.steps < 700)
    assert inside.any() and np.isnan(thinned.values[inside]).all()


def test_means_are_those_around_each_point_of_what_is_there() -> None:
    values = np.random.default_rng(1).normal(size=50)
    values[[7, 8]] = np.nan
    steps = np.arange(100, 150)
    means = smooth(Curve(steps, values), 5, without=np.array([120])).values
    counted = values.copy()
    counted[20] = np.nan
    for i in range(50):
        expected = np.nan if i in (7, 8) else np.nanmean(counted[max(0, i - 2) : i + 3])
        assert means[i] == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_a_window_of_one_is_the_curve() -> None:
    curve = Curve(np.arange(3), np.array([1.0, np.nan, 3.0]))
    assert smooth(curve, 1, without=np.array([0])) is curve
