"""A curve of any length in bounded memory, drawn in a few rows of characters."""

import itertools
import math
from collections.abc import Sequence

_BUCKETS = 1024
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLAIN = " ..::||##"  # as many, for terminals that have no blocks


class Curve:
    """Numbers in their order, averaged in buckets of equal length, which doubles when there are too many of them."""

    def __init__(self) -> None:
        self._per_bucket = 1
        self._buckets: list[tuple[float, int]] = []  # sum and count of what is finite
        self._in_last = 1  # so that the first number opens a bucket
        self.first: float | None = None
        self.lowest: float | None = None

    def add(self, value: float | None) -> None:
        """The next number; None where it is none (a loss that is not finite)."""
        if self._in_last == self._per_bucket or not self._buckets:
            self._buckets.append((0.0, 0))
            self._in_last = 0
        self._in_last += 1
        if value is not None and math.isfinite(value):
            total, count = self._buckets[-1]
            self._buckets[-1] = (total + value, count + 1)
            self.first = value if self.first is None else self.first
            self.lowest = value if self.lowest is None else min(self.lowest, value)
        if len(self._buckets) == _BUCKETS and self._in_last == self._per_bucket:
            self._buckets = [_joined(self._buckets[i : i + 2]) for i in range(0, _BUCKETS, 2)]
            self._per_bucket = self._in_last = 2 * self._per_bucket

    def columns(self, width: int) -> list[float | None]:
        """Means of `width` equal parts of the curve, or of fewer, one a bucket; None where a part has no number."""
        count = min(width, len(self._buckets))
        edges = [round(i * len(self._buckets) / count) for i in range(count + 1)] if count else [0]
        parts = [_joined(self._buckets[a:b]) for a, b in itertools.pairwise(edges)]
        return [total / number if number else None for total, number in parts]


def _joined(buckets: Sequence[tuple[float, int]]) -> tuple[float, int]:
    return sum(total for total, _ in buckets), sum(count for _, count in buckets)


def drawn(columns: Sequence[float | None], rows: int, *, plain: bool = False) -> list[str]:
    """Columns as bars in so many lines, the first on top: the lowest is an eighth of a line, the highest all of them.

    plain: in ASCII.
    """
    shapes, full = _PLAIN if plain else _EIGHTHS, 8 * rows
    values = [value for value in columns if value is not None]
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (full - 1) / (high - low) if high > low else 0.0
    heights = [0 if value is None else 1 + round((value - low) * scale) for value in columns]
    return [
        "".join(shapes[min(8, max(0, height - 8 * (rows - 1 - row)))] for height in heights).rstrip()
        for row in range(rows)
    ]
