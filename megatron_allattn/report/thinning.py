"""Curves of any length as a few thousand points that look the same.

Points are cut into bins of equal numbers; of each bin stay the smallest and the largest value and, where a value is
missing, one such place, so that extremes and gaps are drawn as they are.
"""

import numpy as np

from megatron_allattn.report.metrics import Curve

BINS = 1000
"""About the pixels of a picture: more could not be seen."""


def thin(curve: Curve, bins: int = BINS) -> Curve:
    """At most 3 · bins + 2 points of a curve, in their order; the first and the last are among them."""
    count = len(curve)
    if count <= 3 * bins:
        return curve
    size = -(-count // bins)
    rows = -(-count // size)
    padding = rows * size - count
    values = np.pad(curve.values, (0, padding), constant_values=np.nan).reshape(rows, size)
    missing = np.isnan(values)
    if padding:
        missing[-1, size - padding :] = False
    begins = np.arange(rows) * size
    kept = [
        np.array([0, count - 1]),
        begins + np.where(np.isnan(values), np.inf, values).argmin(axis=1),
        begins + np.where(np.isnan(values), -np.inf, values).argmax(axis=1),
        (begins + missing.argmax(axis=1))[missing.any(axis=1)],
    ]
    index = np.unique(np.concatenate(kept))
    return Curve(curve.steps[index], curve.values[index])


def smooth(curve: Curve, window: int, without: np.ndarray | None = None) -> Curve:
    """The mean over `window` points around each, of the values that are there; a missing value stays missing.

    without: steps whose values count in no mean of several, as one that jumps would lift all of a window.
    """
    present = there = np.isfinite(curve.values)
    if window == 1:
        return curve
    if without is not None:
        there = there & ~np.isin(curve.steps, without)
    sums = np.concatenate(([0.0], np.cumsum(np.where(there, curve.values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(there)))
    at = np.arange(len(curve))
    first = np.maximum(at - (window - 1) // 2, 0)
    after = np.minimum(at + window // 2 + 1, len(curve))
    number = counts[after] - counts[first]
    means = (sums[after] - sums[first]) / np.maximum(number, 1)
    return Curve(curve.steps, np.where(present & (number > 0), means, np.nan))


def window_of(count: int) -> int:
    """Points that a smoothed curve is averaged over: a hundredth of all."""
    return max(1, count // 100)
