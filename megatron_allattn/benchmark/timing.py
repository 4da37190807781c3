"""Alternated runs and what is said of them.

Machines drift: a neighbour wakes up, a core gets warm. So nothing is timed on its own. Every round runs every case
once, each round starts with another case, and what is compared comes from the same rounds. A ratio of two cases is
taken round by round, and its median over the rounds is reported.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """Of the values of several runs. spread: (highest − lowest) / median."""

    median: float
    lowest: float
    highest: float
    runs: int

    @property
    def spread(self) -> float:
        return (self.highest - self.lowest) / self.median

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "spread": self.spread}


def summarize(values: Sequence[float]) -> Summary:
    """Median, lowest and highest; there must be a value."""
    return Summary(statistics.median(values), min(values), max(values), len(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Of the quotients round by round."""
    return summarize([a / b for a, b in zip(numerators, denominators, strict=True)])


def alternate(cases: Mapping[str, Callable[[], T]], runs: int, warmup: int) -> dict[str, list[T]]:
    """What each case returned in each of `runs` rounds, after `warmup` rounds whose results are dropped.

    Round r starts with case r modulo their number and goes on in their order.
    """
    names = list(cases)
    results: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(warmup + runs):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            result = cases[name]()
            if turn >= warmup:
                results[name].append(result)
    return results


def synchronize(device: torch.device) -> None:
    """Wait for everything that the device has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """How long the action takes, what it starts on the device included."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start
