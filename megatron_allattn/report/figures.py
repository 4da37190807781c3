"""Curves of one run: loss, learning rate and gradient norm, throughput and memory. One function a picture.

What is drawn can be read back: every line has the gid that its function names, and the data of the run (`thin` may
leave out points of long curves).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_allattn.report.metrics import Curve
from megatron_allattn.report.run import Run
from megatron_allattn.report.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PINK,
    RED,
    SIZE,
    SKY,
    YELLOW,
    Mark,
    Picture,
    draw_marks,
    from_zero,
    in_short,
    label,
    legend,
    marks_named,
    new_figure,
    step_axis,
    value_axis,
)
from megatron_allattn.report.thinning import smooth, thin, window_of

UNITS = {"bpc": "bits per character or byte", "ppl": "perplexity", "nats": "loss, nats per token"}
_SPIKE_ROOM = 1.6  # times what else a picture of the loss shows: values above are left to the caption


def marks_of(run: Run) -> list[Mark]:
    """What happened to a run, as it is marked in all of its curves."""
    seen, marks = run.observations, run.metrics.marks
    changes = np.array([step for step, _, _ in seen.layout_changes], dtype=np.int64)
    restarts = np.setdiff1d(np.array([start.step for start in seen.restarts], dtype=np.int64), changes)
    return [
        Mark("restart", restarts, FAINT, "--"),
        Mark("other layout", changes, SKY),
        Mark("other settings", np.unique(marks["override"]), PINK, ":"),
        Mark("plateau", np.unique(marks["plateau"]), GREEN, "-."),
        Mark("update left out", np.unique(marks["skip"]), RED, points=True),
        Mark("loss spike", np.unique(marks["spike"]), YELLOW, points=True),
    ]


def loss_picture(run: Run) -> Picture:
    """The whole course. gids: raw, train, valid, test, paper-dev, paper-test."""
    return _loss(run, 0, "loss", "Loss")


def late_loss_picture(run: Run) -> Picture | None:
    """The second half of it; None where it has fewer than 20 steps."""
    begin = run.metrics.last_step // 2
    if np.count_nonzero(run.metrics.loss.steps > begin) < 20:
        return None
    return _loss(run, begin, "loss_late", "Loss, the second half")


def _loss(run: Run, begin: int, name: str, title: str) -> Picture:
    metrics, unit = run.metrics, run.metrics.unit
    figure, (axes,) = new_figure()
    window = window_of(len(metrics.loss))
    smoothed = smooth(metrics.loss, window, metrics.marks["spike"])
    shown = {gid: _since(curve, begin) for gid, curve in _curves(run, smoothed, window).items()}
    in_unit = {gid: Curve(curve.steps, run.in_unit(curve.values)) for gid, curve in shown.items()}
    named = _draw_loss(axes, in_unit)
    for number, (split, value) in enumerate(run.papers.items()):
        dashes = "--" if number else ":"
        line = axes.axhline(value, color=INK, linewidth=1, linestyle=dashes, gid=f"paper-{split}", zorder=1)
        named.append((line, f"paper, {split} {value:g}"))
    marks = [Mark(m.label, m.steps[m.steps >= begin], m.color, m.dashes, m.points) for m in marks_of(run)]
    axes.set_xlim(*_room(begin, max(metrics.last_step, begin + 1)))
    hidden = _limit(axes, in_unit, list(run.papers.values()))
    draw_marks(axes, marks)
    value_axis(axes, log=unit == "ppl")
    step_axis(axes)
    label(axes, y=UNITS[unit])
    legend(axes, [*named, *marks_named(axes, marks)])
    left_out = ", spikes left out" if len(metrics.marks["spike"]) else ""
    mean = f"the strong line is the mean over {window:,} steps{left_out}" if window > 1 else "every step is drawn"
    paper = "; horizontal lines are the paper's results" if run.papers else ""
    return Picture(
        name=name,
        title=title,
        alt=f"{title} by step. {_course(run, begin)}",
        caption=f"Training, validation and test in {UNITS[unit]}; {mean}{paper}.{hidden}",
        figure=figure,
    )


def _curves(run: Run, smoothed: Curve, window: int) -> dict[str, Curve]:
    raw = {"raw": run.metrics.loss} if window > 1 else {}
    return {**raw, "train": smoothed, "valid": run.metrics.valid, "test": run.metrics.test}


def _draw_loss(axes: Any, curves: dict[str, Curve]) -> list[tuple[Any, str]]:
    """Draw what there is of the curves; the lines with their labels."""
    styles: dict[str, tuple[str, dict[str, Any]]] = {
        "raw": ("", {"color": BLUE, "alpha": 0.22, "linewidth": 0.7}),
        "train": ("training", {"color": BLUE, "linewidth": 1.6}),
        "valid": ("validation", {"color": ORANGE, "linewidth": 1.4, "marker": "o", "markersize": 3.2, "zorder": 3}),
        "test": ("test", {"color": GREEN, "linestyle": "", "marker": "D", "markersize": 6, "zorder": 4}),
    }
    named = []
    for gid, curve in curves.items():
        words, style = styles[gid]
        thinned = thin(curve)
        if not len(thinned.known):
            continue
        (line,) = axes.plot(thinned.steps, thinned.values, gid=gid, **style)
        if words:
            named.append((line, words))
    return named


def _limit(axes: Any, curves: dict[str, Curve], papers: Sequence[float]) -> str:
    """Keep single steps from pressing everything else flat; what the caption says of them."""
    calm = [curve.known.values for gid, curve in curves.items() if gid != "raw"]
    values = np.concatenate([*calm, np.array(papers, dtype=float)])
    raw = curves["raw"].known.values if "raw" in curves else np.array([])
    if not len(values) or not len(raw):
        return ""
    low, high = min(values.min(), raw.min()), values.max()
    limit = low + _SPIKE_ROOM * (high - low)
    above = raw[raw > limit]
    if not len(above) or high <= low:
        return ""
    axes.set_ylim(low - 0.05 * (high - low), limit)
    steps = "One step lies" if len(above) == 1 else f"{len(above):,} steps lie"
    return f" {steps} above the picture, up to {in_short(float(above.max()))}."


def _course(run: Run, begin: int) -> str:
    """What the curves do, in a sentence."""
    parts = []
    for words, curve in (("Training", run.metrics.loss), ("validation", run.metrics.valid)):
        known = _since(curve, begin).known
        if len(known):
            first, last = (float(run.in_unit(known.values[i])) for i in (0, -1))
            parts.append(f"{words} goes from {first:.4g} to {last:.4g} at step {known.steps[-1]:,}")
    return ("; ".join(parts) or "There is no value") + "."


def rate_picture(run: Run) -> Picture:
    """gids: lr, grad_norm."""
    figure, (upper, lower) = new_figure(2, 4.0)
    lr, norm = (thin(run.metrics.train[name]) for name in ("lr", "grad_norm"))
    upper.plot(lr.steps, lr.values, color=BLUE, linewidth=1.5, gid="lr")
    lower.plot(norm.steps, norm.values, color=ORANGE, linewidth=0.7, gid="grad_norm")
    from_zero(upper)
    known = norm.known.values
    value_axis(upper)
    value_axis(lower, log=bool(len(known)) and known.min() > 0)
    label(upper, y="learning rate")
    label(lower, y="gradient norm")
    marks = _finish(run, upper, lower)
    last = run.metrics.train["lr"].last
    rate = f"The learning rate ends at {in_short(last[1])}." if last else "There is no value."
    return Picture(
        name="rate",
        title="Learning rate and gradient norm",
        alt=f"Learning rate and gradient norm by step. {rate}",
        caption=f"The norm is that of the whole gradient before clipping.{marks}",
        figure=figure,
    )


def speed_picture(run: Run) -> Picture:
    """gids: raw-speed, speed (tokens/s), memory (GiB; left out where it was not measured)."""
    memory = run.observations.memory
    figure, (upper, *lower) = new_figure(2 if memory else 1, 4.0 if memory else SIZE[1])
    rates = run.metrics.train["tokens_per_second"]
    mean = smooth(rates, window_of(len(rates)))
    for gid, curve, alpha, width in (("raw-speed", rates, 0.22, 0.7), ("speed", mean, 1.0, 1.6)):
        thinned = thin(curve)
        upper.plot(thinned.steps, thinned.values, color=BLUE, gid=gid, alpha=alpha, linewidth=width)
    from_zero(upper)
    value_axis(upper)
    label(upper, y="tokens per second")
    told = [f"Median {in_short(float(np.median(rates.known.values)))} tokens per second" if len(rates.known) else ""]
    for axes in lower:
        steps, gib = [one.step for one in memory], [one.peak_bytes / 2**30 for one in memory]
        style = {"color": PINK, "linewidth": 1.4, "marker": "o", "markersize": 3, "drawstyle": "steps-post"}
        axes.plot(steps, gib, gid="memory", **style)
        from_zero(axes)
        value_axis(axes)
        label(axes, y="peak memory, GiB")
        kind = {"cuda": "GPU memory", "host": "host memory"}.get(memory[-1].device, memory[-1].device)
        told.append(f"at most {max(gib):.3g} GiB of {kind} on the rank that needs most")
    marks = _finish(run, upper, *lower)
    words = "; ".join(part for part in told if part)
    return Picture(
        name="speed",
        title="Throughput and memory" if memory else "Throughput",
        alt=f"Tokens per second{' and peak memory' if memory else ''} by step. {words}.",
        caption=f"{words}. Evaluations and saves are not counted.{marks}",
        figure=figure,
    )


def _finish(run: Run, upper: Any, *others: Any) -> str:
    """Marks in all axes, their legend above the first, steps below the last."""
    marks = marks_of(run)
    for axes in (upper, *others):
        axes.set_xlim(*_room(0, max(run.metrics.last_step, 1)))
        draw_marks(axes, marks)
    legend(upper, marks_named(upper, marks))
    step_axis(others[-1] if others else upper)
    return " Marks are those of the loss." if any(len(mark.steps) for mark in marks) else ""


def _room(first: float, last: float) -> tuple[float, float]:
    """Limits of the steps, a little wider than they are."""
    return first - 0.015 * (last - first), last + 0.015 * (last - first)


def _since(curve: Curve, begin: int) -> Curve:
    later = curve.steps >= begin
    return Curve(curve.steps[later], curve.values[later])
