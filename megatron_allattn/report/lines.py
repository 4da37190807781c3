"""Records of a run's JSON-lines files, one at a time, and their numbers, checked: an error names the line.

A run under way may have written half of its last line; that line is left out. null stands for a number that is not
finite, and becomes NaN, which pictures leave out as a gap.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_allattn.checkpoint.files import WITHOUT_LINE, iterate_json_lines
from megatron_allattn.config.checks import LARGEST
from megatron_allattn.config.errors import UsageError, usage_error


@dataclass(frozen=True, slots=True)
class Line:
    """One record of a file. All methods raise UsageError."""

    path: Path
    number: int
    record: dict[str, Any]

    @property
    def kind(self) -> str:
        return self.text("kind")

    @property
    def step(self) -> int:
        return self.whole("step", at_most=LARGEST)

    def whole(self, name: str, *, at_most: int = 2**62) -> int:
        """A whole number from 0 on."""
        value = self.record.get(name)
        if type(value) is not int or not 0 <= value <= at_most:
            raise self.error(f"has {name} {value!r:.40}, expected a whole number from 0 to {at_most}")
        return value

    def number_or_nan(self, name: str, *, needed: bool = False) -> float:
        """A number; NaN where it is null, not finite or, unless it is needed, absent."""
        if needed and name not in self.record:
            raise self.error(f"has no {name}")
        return self._finite(name, self.record.get(name))

    def text(self, name: str) -> str:
        value = self.record.get(name)
        if not isinstance(value, str):
            raise self.error(f"has {name} {value!r:.40}, expected a text")
        return value

    def matrix(self, name: str) -> np.ndarray | None:
        """[[a number per head] per layer] as float64 [layers, heads]; None where it is null."""
        rows = self.record.get(name)
        if rows is None:
            return None
        if not (isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)):
            raise self.error(f"has {name} {rows!r:.40}, expected a list of numbers for every layer")
        if len({len(row) for row in rows}) > 1:
            raise self.error(f"has layers of unequal numbers of heads in {name}")
        return np.array([[self._finite(name, value) for value in row] for row in rows])

    def error(self, rule: str) -> UsageError:
        return usage_error("file", self.path, f"line {self.number} {rule}", WITHOUT_LINE)

    def _finite(self, name: str, value: Any) -> float:
        if value is None:
            return math.nan
        if type(value) not in (int, float) or (type(value) is int and abs(value) > 2**62):
            raise self.error(f"has {name} {value!r:.40}, expected a number")
        return float(value) if math.isfinite(value) else math.nan


def lines_of(path: Path) -> Iterator[Line]:
    """A file's records; none where there is no file. Raises UsageError."""
    for number, record in enumerate(iterate_json_lines(path), start=1):
        yield Line(path, number, record)
