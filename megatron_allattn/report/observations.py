"""observations.jsonl: starts of a run with their layouts, what heads attend to, memory.

A run that goes on from an earlier step measures again what came after it: such records are left out here.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron_allattn.checkpoint.run_folder import OBSERVATIONS
from megatron_allattn.report.lines import Line, lines_of

LIVES = Path("jobs", "lives.jsonl")
PERSISTENT = ("persistent_share", "effective_vectors", "largest_vector", "dead_vectors")
"""What is measured of heads that have persistent vectors."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of the run after `step`. seconds: since 1970; None, and no layout, where only a job's history tells."""

    step: int
    layout: str
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What the heads of all layers attend to after `step`: float64 [layers, heads], None where there is no such thing.

    spans: tokens · persistent_share: of attention, on persistent vectors · effective_vectors: exp of the entropy of the
    attention over a head's N vectors · largest_vector: share of it that the most used one takes · dead_vectors: how
    many take less than a hundredth of an equal share.
    """

    step: int
    spans: np.ndarray
    persistent_share: np.ndarray | None
    effective_vectors: np.ndarray | None
    largest_vector: np.ndarray | None
    dead_vectors: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The peak memory of the rank that needs most, up to `step`; device: cuda, or host."""

    step: int
    peak_bytes: int
    device: str


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What observations.jsonl and the job's history have, by step. there: whether there is an observations.jsonl."""

    there: bool
    starts: tuple[Start, ...]
    heads: tuple[Heads, ...]
    memory: tuple[Memory, ...]

    @property
    def restarts(self) -> tuple[Start, ...]:
        return self.starts[1:]

    @property
    def layout_changes(self) -> tuple[tuple[int, str, str], ...]:
        """(step, layout before, layout after), in their order."""
        told = [start for start in self.starts if start.layout]
        return tuple((b.step, a.layout, b.layout) for a, b in pairwise(told) if a.layout != b.layout)


def read_observations(run_folder: Path) -> Observations:
    """Raises UsageError naming the line that is no record."""
    starts: list[Start] = []
    heads: list[Heads] = []
    memory: list[Memory] = []
    for line in lines_of(run_folder / OBSERVATIONS):
        kind, step = line.kind, line.step
        if kind == "start":
            starts.append(_start(line))
            heads = [one for one in heads if one.step <= step]
            memory = [one for one in memory if one.step <= step]
        elif kind == "heads":
            _append(line, heads, _heads(line, heads[0].spans.shape if heads else None))
        elif kind == "memory":
            found = Memory(step=step, peak_bytes=line.whole("peak_bytes"), device=line.text("device"))
            _append(line, memory, found)
    return Observations(
        there=(run_folder / OBSERVATIONS).exists(),
        starts=tuple(starts or _lives(run_folder)),
        heads=tuple(heads),
        memory=tuple(memory),
    )


Measured = TypeVar("Measured", Heads, Memory)


def _append(line: Line, before: list[Measured], one: Measured) -> None:
    """Add a record; what was measured twice after the same step holds as the later one has it."""
    if before and one.step < before[-1].step:
        raise line.error(f"is of step {one.step}, after one of step {before[-1].step}")
    if before and one.step == before[-1].step:
        before.pop()
    before.append(one)


def _start(line: Line) -> Start:
    sizes = {name: line.whole(name) for name in ("world_size", "tensor", "pipeline", "data", "zero_stage")}
    layout = (
        f"{sizes['world_size']} × {line.text('device')}: TP {sizes['tensor']} × PP {sizes['pipeline']} × "
        f"DP {sizes['data']}, ZeRO {sizes['zero_stage']}, {line.text('precision')}"
    )
    seconds = line.number_or_nan("time")
    return Start(step=line.step, layout=layout, seconds=None if math.isnan(seconds) else seconds)


def _heads(line: Line, shape: tuple[int, ...] | None) -> Heads:
    """shape: of the records before."""
    spans = line.matrix("spans")
    if spans is None:
        raise line.error("has no spans")
    others = {name: line.matrix(name) for name in PERSISTENT}
    for name, values in {"spans": spans, **others}.items():
        if values is not None and values.shape != (shape or spans.shape):
            sizes = [" layers of ".join(map(str, one)) for one in (values.shape, shape or spans.shape)]
            raise line.error(f"has {name} of {sizes[0]} heads, others are of {sizes[1]}")
    return Heads(step=line.step, spans=spans, **others)


def _lives(run_folder: Path) -> list[Start]:
    """The starts that the history of a SLURM job tells of; it says nothing of layouts."""
    begins = [line for line in lines_of(run_folder / LIVES) if line.kind == "begin"]
    return [Start(step=line.step, layout="", seconds=None) for line in begins]
