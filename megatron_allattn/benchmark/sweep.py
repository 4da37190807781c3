"""Cost against the mean span at a fixed maximum (a line, if work follows the span) and against the maximum at a fixed
mean (flat, if it does).

In every layer one head has the longest span and the others share the rest equally, so the two can be set apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_allattn.benchmark.profiles import SpanProfile
from megatron_allattn.config.errors import usage_error

MEAN_SPAN = 300  # of `max_sweep`, by default


@dataclass(frozen=True)
class Line:
    """Least squares y = intercept + slope · x, and R², the share of the variance of y that it explains."""

    intercept: float
    slope: float
    r_squared: float


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """The line through at least three points that are not all above one another."""
    count, mean_x, mean_y = len(x), math.fsum(x) / len(x), math.fsum(y) / len(y)
    assert count == len(y) >= 3
    variance = math.fsum((a - mean_x) ** 2 for a in x)
    slope = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / variance
    intercept = mean_y - slope * mean_x
    unexplained = math.fsum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    total = math.fsum((b - mean_y) ** 2 for b in y)
    return Line(intercept, slope, 1 - unexplained / total if total else 1.0)


def flatness(y: Sequence[float]) -> float:
    """How far the highest is above the lowest: 0.1 is 10 %."""
    return max(y) / min(y) - 1


@dataclass(frozen=True)
class Sizes:
    """Of every point of a sweep, and how many points; ramp: R of the model, in tokens."""

    num_layers: int
    num_heads: int
    ramp: int
    points: int

    def spread(self, first: int, last: int) -> list[int]:
        """`points` whole numbers from first to last, as evenly as possible."""
        return [round(first + (last - first) * i / (self.points - 1)) for i in range(self.points)]


def mean_sweep(longest: int, sizes: Sizes) -> dict[int, SpanProfile]:
    """Profiles with one maximum, by their mean: from the lowest that there is to half of the maximum."""
    lowest, highest = _least_mean(longest, sizes), longest // 2
    if highest - lowest < sizes.points:
        rule = f"with {sizes.num_heads} heads the mean span goes from {lowest} to half of it: too little for a sweep"
        raise usage_error("--longest-span", longest, rule, "give a longer span or a recipe with more heads")
    return {mean: one_long_head(mean, longest, sizes) for mean in sizes.spread(lowest, highest)}


def max_sweep(given: int | None, longest: int, sizes: Sizes) -> dict[int, SpanProfile]:
    """Profiles with one mean, by their maximum: from the mean itself to `longest`. given: the mean, or None."""
    mean, heads = MEAN_SPAN if given is None else given, f"with {sizes.num_heads} heads"
    lowest, highest = _least_mean(longest, sizes), longest - sizes.points
    if lowest > highest:
        # (longest + (H − 1) R) / H ≤ longest − points
        least = sizes.ramp + math.ceil(sizes.num_heads * sizes.points / (sizes.num_heads - 1))
        rule = f"{heads}, a ramp of {sizes.ramp} and {sizes.points} points it is at least {least}"
        raise usage_error("--longest-span", longest, rule, "give a longer span or fewer points")
    if not lowest <= mean <= highest and given is None:
        rule = f"{heads}, one of them at it, the mean is in {lowest} … {highest}, and it is {mean} by default"
        raise usage_error("--longest-span", longest, rule, "give another span, or --mean-span too")
    if not lowest <= mean <= highest:
        rule = f"{heads}, one of them at {longest}, it is in {lowest} … {highest}"
        raise usage_error("--mean-span", mean, rule, "give such a mean, or another --longest-span")
    return {one: one_long_head(mean, one, sizes) for one in sizes.spread(mean, longest)}


def _least_mean(longest: int, sizes: Sizes) -> int:
    """The mean where one head is at `longest` and the others have the ramp alone."""
    return math.ceil((longest + (sizes.num_heads - 1) * sizes.ramp) / sizes.num_heads)


def one_long_head(mean: float, longest: int, sizes: Sizes) -> SpanProfile:
    """Layers in which one head reaches `longest` tokens and all together `mean` on average (ramp included)."""
    rest = (sizes.num_heads * mean - longest) / (sizes.num_heads - 1)
    assert sizes.ramp <= rest <= longest, (mean, longest)
    row = (float(longest), *(rest for _ in range(sizes.num_heads - 1)))
    return SpanProfile(
        f"mean {mean:.0f}, longest {longest}", "a point of a sweep", sizes.ramp, (row,) * sizes.num_layers
    )


def sweep_results(by_x: dict[int, float]) -> dict[str, Any]:
    """What a sweep shows: seconds by mean or by maximum span, the line through them, and how flat they are."""
    x, y = list(by_x), list(by_x.values())
    line = fit_line(x, y)
    return {
        "x": x,
        "seconds": y,
        "intercept": line.intercept,
        "slope": line.slope,
        "r_squared": line.r_squared,
        "flatness": flatness(y),
    }
