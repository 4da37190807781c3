"""metrics.jsonl as arrays: what a training step has recorded, evaluations, and what has happened on the way.

A million steps are some eighty megabytes here: a column is an array of float64, and no record is kept as an object.
"""

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_allattn.checkpoint.run_folder import METRICS
from megatron_allattn.report.lines import Line, lines_of

MOST_EVENTS = 200
"""Of each kind, how many are told in words; all of them are counted and marked."""

_COLUMNS = ("lr", "grad_norm", "skipped", "tokens", "tokens_per_second", "span_mean", "span_max")
_EVENTS = ("skip", "spike", "override", "plateau")
_EVALUATIONS = ("valid", "test")


@dataclass(frozen=True)
class Curve:
    """Values by step. steps: int64 [n], increasing; values: float64 [n], NaN where there is none."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def known(self) -> "Curve":
        """Without the steps that have no value."""
        there = np.isfinite(self.values)
        return Curve(self.steps[there], self.values[there])

    @property
    def last(self) -> tuple[int, float] | None:
        """The last step that has a value, and that."""
        known = self.known
        return (int(known.steps[-1]), float(known.values[-1])) if len(known) else None

    @property
    def lowest(self) -> tuple[int, float] | None:
        """The smallest value and its step, the first one."""
        known = self.known
        if not len(known):
            return None
        at = int(known.values.argmin())
        return int(known.steps[at]), float(known.values[at])


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened after `step`, in words."""

    step: int
    kind: str
    told: str


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What metrics.jsonl has. Losses are in nats per token.

    train: by name, loss and what else a step records; unit: bpc, ppl or, where nothing says, nats; marks: steps of
    events by kind; events: the first ones of each kind in words; unknown: how many records of kinds that are not known.
    """

    train: dict[str, Curve]
    valid: Curve
    test: Curve
    unit: str
    marks: dict[str, np.ndarray]
    events: tuple[Event, ...]
    unknown: dict[str, int]

    @property
    def loss(self) -> Curve:
        return self.train["loss"]

    @property
    def last_step(self) -> int:
        """The last step of which there is a record, 0 without any."""
        return max((int(curve.steps[-1]) for curve in (self.loss, self.valid, self.test) if len(curve)), default=0)


def read_metrics(run_folder: Path) -> Metrics:
    """Raises UsageError naming the line that is no record."""
    collected = _Collected()
    for line in lines_of(run_folder / METRICS):
        collected.take(line)
    return collected.metrics()


@dataclass
class _Collected:
    """Records so far."""

    steps: dict[str, array] = field(default_factory=lambda: {kind: array("q") for kind in ("train", *_EVALUATIONS)})
    losses: dict[str, array] = field(default_factory=lambda: {kind: array("d") for kind in ("train", *_EVALUATIONS)})
    columns: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in _COLUMNS})
    marks: dict[str, array] = field(default_factory=lambda: {kind: array("q") for kind in _EVENTS})
    events: list[Event] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    unit: str = "nats"

    def take(self, line: Line) -> None:
        kind = line.kind
        if kind in self.steps:
            self._curve(line, kind)
        elif kind in _EVENTS:
            step = line.step
            self.marks[kind].append(step)
            if len(self.marks[kind]) <= MOST_EVENTS:
                self.events.append(Event(step=step, kind=kind, told=_told(line, kind)))
        else:
            self.unknown[kind[:40] if len(self.unknown) < 20 else "others"] += 1

    def _curve(self, line: Line, kind: str) -> None:
        step, steps = line.step, self.steps[kind]
        loss = line.number_or_nan("loss", needed=True)
        if self.unit == "nats":
            self.unit = next((unit for unit in ("bpc", "ppl") if unit in line.record), "nats")
        if steps and step <= steps[-1]:
            if kind != "train" and step == steps[-1]:  # evaluated again after a resume: the later one holds
                self.losses[kind][-1] = loss
                return
            raise line.error(f"is of step {step}, after one of step {steps[-1]}")
        steps.append(step)
        self.losses[kind].append(loss)
        if kind == "train":
            for name, column in self.columns.items():
                value = line.record.get(name)
                plain = type(value) is float and value - value == 0  # finite; nearly all are, of millions
                column.append(value if plain else line.number_or_nan(name))

    def metrics(self) -> Metrics:
        curves = {kind: Curve(_ints(self.steps[kind]), _floats(self.losses[kind])) for kind in self.steps}
        steps = curves["train"].steps
        train = {"loss": curves["train"]}
        train |= {name: Curve(steps, _floats(column)) for name, column in self.columns.items()}
        marks = {kind: _ints(found) for kind, found in self.marks.items()}
        marks["skip"] = np.union1d(marks["skip"], _left_out(train["skipped"])).astype(np.int64)
        return Metrics(
            train=train,
            valid=curves["valid"],
            test=curves["test"],
            unit=self.unit,
            marks=marks,
            events=tuple(self.events),
            unknown=dict(self.unknown),
        )


def _ints(values: array) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _floats(values: array) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def _left_out(skipped: Curve) -> np.ndarray:
    """Steps at which the count of updates left out has grown (overflows of float16 have no record of their own)."""
    if not len(skipped):
        return skipped.steps
    counts = np.nan_to_num(skipped.values)
    before = np.concatenate(([0.0 if skipped.steps[0] == 1 else counts[0]], counts[:-1]))
    return skipped.steps[counts > before]


def _told(line: Line, kind: str) -> str:
    if kind == "skip":
        return f"no update: {line.text('reason')}{_where(line)}"
    if kind == "spike":
        loss, median = line.number_or_nan("loss", needed=True), line.number_or_nan("median", needed=True)
        return f"the loss jumps to {_short(loss)}, the median before it was {_short(median)}{_where(line)}"
    if kind == "plateau":
        lr = line.number_or_nan("lr", needed=True)
        return f"{line.text('reason')}; learning rate {_short(lr)} from then on"
    changes = line.record.get("changes")
    if not isinstance(changes, dict):
        raise line.error(f"has changes {changes!r:.40}, expected an object")
    return "; ".join(f"{name}: {_change(line, value)}" for name, value in changes.items()) or "nothing changed"


def _change(line: Line, value: Any) -> str:
    if not (isinstance(value, list) and len(value) == 2):
        raise line.error(f"has a change {value!r:.40}, expected what was and what is")
    return f"{value[0]!s:.80} → {value[1]!s:.80}"


def _where(line: Line) -> str:
    position = line.record.get("position")
    return f" (tokens from {position:,} of each stream)" if type(position) is int else ""


def _short(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:.4g}"
