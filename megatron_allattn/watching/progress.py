"""What is known of a run from its records: the last of each kind, a curve, speed, and what has happened to it."""

import math
import statistics
from collections import Counter, deque
from typing import Any

from megatron_allattn.watching.curve import Curve
from megatron_allattn.watching.tail import Record

_STEPS = 100  # whose time tells what the rest will take


class Progress:
    """Takes the records of metrics.jsonl and observations.jsonl in their order; its size does not grow with them.

    last: the last record of each kind; best: the validation record of the lowest loss; counts: records by kind.
    """

    def __init__(self) -> None:
        self.last: dict[str, Record] = {}
        self.best: Record | None = None
        self.counts: Counter[str] = Counter()
        self.losses = Curve()
        self._seconds: deque[float] = deque(maxlen=_STEPS)

    def add(self, record: Record) -> None:
        """The next record, of which any value may be missing or of another type."""
        kind = record["kind"]
        if kind == "train":
            self._add_step(record)
        elif kind == "valid" and (loss := number(record, "loss")) is not None:
            best = None if self.best is None else number(self.best, "loss")
            self.best = record if best is None or loss < best else self.best
        self.last[kind] = record
        self.counts[kind] += 1

    def _add_step(self, record: Record) -> None:
        self.losses.add(number(record, "loss"))
        rate, tokens = number(record, "tokens_per_second"), number(record, "tokens")
        before = number(self.last.get("train", {}), "tokens")
        if rate and tokens is not None and before is not None and tokens > before:
            self._seconds.append((tokens - before) / rate)

    @property
    def step(self) -> int:
        """The last step that is on record, 0 before the first one."""
        return max((record["step"] for kind, record in self.last.items() if kind != "start"), default=0)

    @property
    def step_seconds(self) -> float | None:
        """Of a step, by the median of the last ones; without evaluations and saves."""
        return statistics.median(self._seconds) if self._seconds else None


def number(record: Record, name: str) -> float | None:
    """A finite number of a record, or None."""
    value: Any = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value
