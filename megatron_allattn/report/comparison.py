"""Pictures of several runs: one colour a run in all of them, cells side by side on one scale.

Runs whose units differ (bits per character, perplexity) are drawn in nats per token, which compare only where tokens
do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_allattn.report import facts
from megatron_allattn.report.figures import UNITS
from megatron_allattn.report.heads import QUANTITIES, SPANS, Quantity, draw_heads, plain_bar
from megatron_allattn.report.metrics import Curve
from megatron_allattn.report.run import Run, from_nats
from megatron_allattn.report.style import (
    DASHES,
    INK,
    SERIES,
    Picture,
    blank_figure,
    from_zero,
    in_lines,
    in_short,
    label,
    legend,
    new_figure,
    shortened,
    step_axis,
    value_axis,
)
from megatron_allattn.report.thinning import smooth, thin, window_of

_TITLE = 16  # letters of a line over the cells of a run
_BESIDE = 3  # runs side by side in a row


def comparison_pictures(runs: Sequence[Run]) -> list[Picture]:
    """All that there is something to show in. Curves have the gid run-0, run-1, … in the order of the runs."""
    unit = unit_of(runs)
    curves: list[tuple[str, str, str, Callable[[Run], Curve], bool]] = [
        ("valid", "Validation", UNITS[unit], lambda run: _converted(run.metrics.valid, unit), unit == "ppl"),
        ("train", "Training", UNITS[unit], lambda run: _converted(_mean_loss(run), unit), unit == "ppl"),
        ("spans_time", "Mean span", "tokens", _mean_span, False),
        ("speed", "Throughput", "tokens per second", _mean_speed, False),
    ]
    found = [_overlay(runs, *what) for what in curves]
    cells = [_side_by_side(runs, quantity) for quantity in (SPANS, *QUANTITIES)]
    return [picture for picture in (*found, *cells) if picture is not None]


def unit_of(runs: Sequence[Run]) -> str:
    """The unit that all runs share, else nats."""
    units = {run.metrics.unit for run in runs if len(run.metrics.loss) or len(run.metrics.valid)}
    return units.pop() if len(units) == 1 else "nats"


def _converted(curve: Curve, unit: str) -> Curve:
    return Curve(curve.steps, from_nats(curve.values, unit))


def _mean_loss(run: Run) -> Curve:
    loss = run.metrics.loss
    return smooth(loss, window_of(len(loss)), run.metrics.marks["spike"])


def _mean_speed(run: Run) -> Curve:
    rates = run.metrics.train["tokens_per_second"]
    return smooth(rates, window_of(len(rates)))


def _mean_span(run: Run) -> Curve:
    heads = run.observations.heads
    if not heads:
        return run.metrics.train["span_mean"]
    return Curve(np.array([one.step for one in heads]), np.array([np.nanmean(one.spans) for one in heads]))


def _overlay(
    runs: Sequence[Run], name: str, title: str, unit: str, curve_of: Callable[[Run], Curve], log: bool
) -> Picture | None:
    """One line a run, by step."""
    figure, (axes,) = new_figure()
    named, ends = [], []
    for number, run in enumerate(runs):
        curve = thin(curve_of(run))
        last = curve.last
        if last is None:
            continue
        color, dashes = SERIES[number % len(SERIES)], DASHES[number // len(SERIES) % len(DASHES)]
        style: dict[str, Any] = {"marker": "o", "markersize": 3} if len(curve) < 40 else {}
        (line,) = axes.plot(
            curve.steps, curve.values, color=color, linestyle=dashes, linewidth=1.5, gid=f"run-{number}", **style
        )
        named.append((line, run.name))
        ends.append(f"{shortened(run.name)} {in_short(last[1])}")
    if not named:
        return None
    if name in ("spans_time", "speed"):
        from_zero(axes)
    value_axis(axes, log=log)
    step_axis(axes)
    label(axes, y=unit)
    legend(axes, named, columns=2)
    told = ", ".join(ends)
    mean = " Each line is the mean over a hundredth of the steps." if name in ("train", "speed") else ""
    alt = f"{title} of {len(named)} runs by step, {unit}. At the end: {told}."
    return Picture(name=name, title=title, alt=alt, caption=f"At the end: {told}.{mean}", figure=figure)


def _side_by_side(runs: Sequence[Run], quantity: Quantity) -> Picture | None:
    """Layers × heads of every run that has them, on one scale. Images are in the order of those runs."""
    measured = [(run, getattr(run.observations.heads[-1], quantity.field)) for run in runs if run.observations.heads]
    shown = [(run, values) for run, values in measured if values is not None]
    if not shown:
        return None
    rows = -(-len(shown) // _BESIDE)
    figure, grid = _grid(rows, min(len(shown), _BESIDE), max(len(values) for _, values in shown))
    largest = max(run.config.model.persistent_memory_size for run, _ in shown)
    norm = quantity.scale_of(np.concatenate([values.ravel() for _, values in shown]), largest)
    told = []
    for axes, (run, values) in zip(grid, shown, strict=False):
        image = draw_heads(axes, values, norm, numbers=False)
        axes.set_title(in_lines(run.name, _TITLE), fontsize=9.5, color=INK, loc="left", parse_math=False)
        told.append(f"{shortened(run.name)} {in_short(float(np.nanmean(values)))}")
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    plain_bar(figure.colorbar(image, ax=grid, pad=0.02), quantity.unit)
    shown_of = f" in {len(shown)} runs, layers × heads side by side"
    return quantity.picture(figure, shown_of, f"On average: {', '.join(told)}.")


def _grid(rows: int, columns: int, layers: int) -> tuple[Any, list[Any]]:
    """A figure with axes in rows and columns."""
    figure = blank_figure(0.9 + rows * (2.1 + 0.06 * max(0, layers - 12)))
    found = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes in found:
        axes.tick_params(colors=INK, labelsize=8.5)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, found


def comparison_table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The header and one row a run."""
    header = ["run", "recipe", "parameters", "steps", "best validation", "test", "tokens/s", "peak memory"]
    header += ["restarts", "left out", "spikes", "outcome"]
    rows = [
        [
            run.name,
            run.config.recipe or "none",
            facts.parameters_in_short(run),
            facts.steps(run),
            _loss_of(run, run.metrics.valid.lowest),
            _loss_of(run, run.metrics.test.last),
            facts.speed(run).removesuffix(" tokens/s"),
            facts.peak_memory(run),
            f"{len(run.observations.restarts):,}" if run.observations.starts else "not recorded",
            f"{facts.skipped(run):,}",
            f"{len(run.metrics.marks['spike']):,}",
            facts.state_of(run),
        ]
        for run in runs
    ]
    return header, rows


def _loss_of(run: Run, point: tuple[int, float] | None) -> str:
    return "none" if point is None else facts.number(run, point[1])
