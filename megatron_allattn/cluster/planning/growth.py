"""How memory and time of a layout grow as spans grow, from where training starts to the maximum."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_allattn.cluster.planning.memory import RankMemory
from megatron_allattn.cluster.planning.plan import Candidate, Planner
from megatron_allattn.cluster.planning.step_time import StepTime
from megatron_allattn.model.partition import first_reach

POINTS = 12


@dataclass(frozen=True)
class Point:
    """share: how far spans are on their way from the start (0) through the profile's (1) to the maximum (2)."""

    share: float
    mean: float
    longest: int
    memory: RankMemory
    time: StepTime


def grow(planner: Planner, candidate: Candidate, points: int = POINTS) -> list[Point]:
    """The layout of a candidate at spans that grow in equal steps to the profile's, and from there to the maximum."""
    task, model = planner.task, planner.task.run.model
    start = first_reach(model)
    whole = [[model.max_attention_span] * len(layer) for layer in start]
    half = points // 2
    shares = [index / half for index in range(half)] + [1 + index / half for index in range(half + 1)]
    found = []
    for share in shares:
        low, high, part = (start, task.look_back, share) if share < 1 else (task.look_back, whole, share - 1)
        reach = _between(low, high, part)
        there = planner.at(reach)
        one = there.look(candidate.choice, candidate.run)
        timed = there.timed(one)
        assert one.memory is not None and timed.time is not None
        heads = [span for layer in reach for span in layer]
        found.append(Point(share, sum(heads) / len(heads), max(heads), one.memory, timed.time))
    return found


def _between(low: Sequence[Sequence[int]], high: Sequence[Sequence[int]], part: float) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(round(a + (b - a) * part) for a, b in zip(one, other, strict=True))
        for one, other in zip(low, high, strict=True)
    )


def plot(path: Path, points: Sequence[Point], limit: int, title: str) -> None:
    """Draw both against the mean span: memory by part, stacked, and time by part. PNG or SVG, by the file's name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    svg = path.suffix.lower() == ".svg"
    (FigureCanvasSVG if svg else FigureCanvasAgg)(figure)
    figure.suptitle(title, fontsize=10)
    means = [point.mean for point in points]
    memory = figure.add_subplot(1, 2, 1)
    names = list(points[0].memory.parts)
    memory.stackplot(means, [[point.memory.parts[name] / 1e9 for point in points] for name in names], labels=names)
    memory.axhline(limit / 1e9, color="black", linestyle="--", label="the device's")
    memory.set(xlabel="mean span, tokens", ylabel="memory of the fullest rank, GB")
    memory.legend(fontsize=8, loc="upper left")
    time = figure.add_subplot(1, 2, 2)
    parts = ("compute", "tensor", "neighbours", "waiting", "replicas", "update")
    time.stackplot(means, [[getattr(point.time, name) for point in points] for name in parts], labels=parts)
    time.set(xlabel="mean span, tokens", ylabel="a step, seconds")
    time.legend(fontsize=8, loc="upper left")
    figure.savefig(path, format="svg" if svg else "png", metadata={"Date": None} if svg else None)
