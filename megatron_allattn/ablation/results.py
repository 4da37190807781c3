"""What the runs of an ablation have come to: last losses, their spread over seeds, and what the paper says of it."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_allattn.ablation.cells import Cell
from megatron_allattn.checkpoint.files import read_json_lines
from megatron_allattn.checkpoint.run_folder import METRICS, read_outcome
from megatron_allattn.config import UsageError

KINDS = ("valid", "test")


@dataclass(frozen=True)
class Result:
    """Of a run that is done. values: the last loss of every split, in `unit`; parameters: how many it has."""

    cell: Cell
    unit: str
    values: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """A version over its seeds: mean and standard deviation (of a sample; none of one run) of a split."""

    name: str
    vectors: int | None
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def told(self) -> str:
        """1.234 ± 0.005."""
        return f"{self.mean:.4f}" + (f" ± {self.deviation:.4f}" if self.deviation is not None else "")


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper: `better` has a lower loss than `worse`."""

    text: str
    better: str
    worse: str


CLAIMS = (
    Claim("computing attention jointly helps: all-attn is better than attn-split", "all-attn", "attn-split"),
    Claim("vectors with more heads are better: attn-split is better than single-head", "attn-split", "single-head"),
    Claim("heads for context or for vectors alone do not work well: all-attn is better", "all-attn", "head-split"),
    Claim("a softmax in place of the ReLU is not sufficient: all-attn is better than FF-attn", "all-attn", "ff-attn"),
    Claim("persistent vectors are crucial: all-attn is better than N = 0", "all-attn", "n0"),
)
"""Section 5.3 of the paper."""


def is_done(folder: Path) -> bool:
    """Whether a run has reached its end. Raises UsageError: its outcome.json is none."""
    outcome = read_outcome(folder)
    return outcome is not None and outcome.how == "done"


def read_result(cell: Cell, folder: Path) -> Result | None:
    """The result of a run that is done; None of one that is not. Raises UsageError: its records are not its metrics."""
    if not is_done(folder):
        return None
    values: dict[str, float] = {}
    unit = ""
    for record in read_json_lines(folder / METRICS):
        if record.get("kind") in KINDS:
            unit = "ppl" if "ppl" in record else "bpc"
            value = record.get(unit)
            values[record["kind"]] = value if isinstance(value, float) else math.inf
    if not values:
        raise UsageError(f"{folder / METRICS}: has no evaluation; give more text, or a smaller batch")
    return Result(cell, unit, values)


def summarize(results: Sequence[Result], kind: str) -> list[Summary]:
    """A split's losses by version, in the order of the cells; versions without a result are left out."""
    by_version: dict[str, list[Result]] = {}
    for result in results:
        if kind in result.values:
            by_version.setdefault(result.cell.version.name, []).append(result)
    return [
        Summary(name, found[0].cell.version.vectors, tuple(one.values[kind] for one in found))
        for name, found in by_version.items()
    ]


def judge(claim: Claim, summaries: Sequence[Summary]) -> str | None:
    """What was seen of a claim: whether the difference of the means is more than two of its standard errors; None
    where a version is missing."""
    found = {one.name: one for one in summaries}
    if claim.better not in found or claim.worse not in found:
        return None
    better, worse = found[claim.better], found[claim.worse]
    apart = worse.mean - better.mean
    if better.deviation is None or worse.deviation is None:
        return f"{apart:+.4f}, of one seed"
    error = math.sqrt(better.deviation**2 / len(better.values) + worse.deviation**2 / len(worse.values))
    verdict = "seen" if apart > 2 * error else "the opposite was seen" if apart < -2 * error else "within the spread"
    return f"{apart:+.4f} ± {error:.4f}: {verdict}"


def table(results: Sequence[Result], parameters: Callable[[str], int], num_seeds: int) -> str:
    """All of it as Markdown. parameters: of a version, by name."""
    unit = results[0].unit if results else "bpc"
    by_kind = {kind: {one.name: one for one in summarize(results, kind)} for kind in KINDS}
    names = sorted(by_kind["valid"], key=lambda name: by_kind["valid"][name].mean)
    lines = [f"| version | parameters | seeds | valid, {unit} | test, {unit} |", "|---|---|---|---|---|"]
    for name in names:
        told = [by_kind[kind][name].told() if name in by_kind[kind] else "" for kind in KINDS]
        seeds = f"{len(by_kind['valid'][name].values)} of {num_seeds}"
        lines.append(f"| {name} | {parameters(name):,} | {seeds} | {told[0]} | {told[1]} |")
    lines += ["", "| the paper says | here, on the validation split |", "|---|---|"]
    for claim in CLAIMS:
        if (seen := judge(claim, list(by_kind["valid"].values()))) is not None:
            lines.append(f"| {claim.text} | {seen} |")
    spread = "± is the standard deviation over seeds, and in the second table the standard error of the difference"
    return "\n".join([*lines, "", f"{spread}.", ""])


def as_json(results: Sequence[Result]) -> str:
    """Every result, for other programs."""
    rows: list[dict[str, Any]] = [
        {
            "version": one.cell.version.name,
            "vectors": one.cell.version.vectors,
            "seed": one.cell.seed,
            "unit": one.unit,
            **one.values,
        }
        for one in results
    ]
    return json.dumps(rows, indent=1) + "\n"
