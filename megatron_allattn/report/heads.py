"""Pictures of heads: a cell for every head of every layer, and their spans over time.

Layers and heads count from 0, as in the names of weights; the first layer is at the bottom.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_allattn.report.figures import marks_of
from megatron_allattn.report.observations import Heads
from megatron_allattn.report.run import Run
from megatron_allattn.report.style import (
    BLUE,
    CELLS,
    FAINT,
    INK,
    ORANGE,
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
from megatron_allattn.report.thinning import thin

_WRITTEN = (12, 12)  # layers and heads up to which the numbers are written into the cells
_MOST_COLUMNS = 400  # evaluations of a picture over time


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something measured of every head. field: of `Heads`; unit: on the scale; top: the scale's end, if fixed."""

    field: str
    title: str
    unit: str
    caption: str
    top: float | None = None

    def scale_of(self, values: np.ndarray, vectors: int) -> Any:
        """The scale of these values, to an end that means something by itself where there is one: `top`, or all N
        vectors of a head."""
        return scale(values, float(vectors or 1) if self.unit == "vectors" else self.top)

    def picture(self, figure: Any, shown: str, found: str) -> Picture:
        """shown: what the cells are of, after the title; found: a sentence with its numbers."""
        return Picture(
            name=self.field,
            title=self.title,
            alt=f"{self.title}{shown}. {found}",
            caption=f"{self.caption} {found}",
            figure=figure,
        )


SPANS = Quantity(
    field="spans",
    title="Span of every head",
    unit="tokens",
    caption="How far back each head looks.",
)
QUANTITIES = (
    Quantity(
        field="persistent_share",
        title="Attention on persistent vectors",
        unit="share of attention",
        caption="What part of its attention each head spends on its persistent vectors instead of the context.",
        top=1.0,
    ),
    Quantity(
        field="effective_vectors",
        title="Persistent vectors in effect",
        unit="vectors",
        caption="exp(entropy) of the attention over a head's persistent vectors: as many, used equally, would give it.",
    ),
    Quantity(
        field="largest_vector",
        title="The most used persistent vector",
        unit="share of persistent attention",
        caption="What part of a head's persistent attention its most used vector takes. Near 1: one vector dominates.",
        top=1.0,
    ),
    Quantity(
        field="dead_vectors",
        title="Dead persistent vectors",
        unit="vectors",
        caption="Vectors that take less than a hundredth of an equal share.",
    ),
)


def heads_picture(run: Run, quantity: Quantity) -> Picture | None:
    """Layers × heads at the newest evaluation; None where it was not measured. The image's data is [layers, heads]."""
    newest = run.observations.heads[-1] if run.observations.heads else None
    values = None if newest is None else getattr(newest, quantity.field)
    if newest is None or values is None:
        return None
    figure, (axes,) = new_figure(height=_height(len(values)))
    size = run.config.model.persistent_memory_size
    image = draw_heads(axes, values, quantity.scale_of(values, size))
    plain_bar(figure.colorbar(image, ax=axes, pad=0.02), quantity.unit)
    known = values[np.isfinite(values)]
    extent = f"from {known.min():.4g} to {known.max():.4g}, {known.mean():.4g} on average" if len(known) else "unknown"
    of = f" of {size}" if quantity.unit == "vectors" else ""
    shown = f": {len(values)} layers × {values.shape[1]} heads"
    return quantity.picture(figure, shown, f"At step {newest.step:,}: {extent}{of}.")


def _height(layers: int) -> float:
    return 3.0 + 0.08 * max(0, layers - 12)


def draw_heads(axes: Any, values: np.ndarray, norm: Any, *, numbers: bool = True) -> Any:
    """An image of [layers, heads] on a scale; the image. numbers: write them into the cells where they are few."""
    image = axes.imshow(values, aspect="auto", origin="lower", cmap=_cells(), norm=norm, interpolation="nearest")
    axes.grid(False)
    _whole_ticks(axes.xaxis, values.shape[1])
    _whole_ticks(axes.yaxis, values.shape[0])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, which="both")
    label(axes, x="head", y="layer")
    _rule_off(axes, *values.shape)
    if numbers and values.shape[0] <= _WRITTEN[0] and values.shape[1] <= _WRITTEN[1]:
        _write_numbers(axes, values, image)
    return image


def _rule_off(axes: Any, layers: int, heads: int) -> None:
    """Thin white lines between cells, where they are large enough for it."""
    if layers <= 40 and heads <= 40:
        axes.set_xticks(np.arange(1, heads) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, layers) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)


def _cells() -> Any:
    from matplotlib import colormaps  # noqa: PLC0415  (optional)

    return colormaps[CELLS].with_extremes(bad="#d6d9de")


def scale(values: np.ndarray, top: float | None) -> Any:
    """From 0 to `top` or the largest value; where few are far above most, by logarithm above the median."""
    from matplotlib.colors import Normalize, SymLogNorm  # noqa: PLC0415  (optional)

    known = values[np.isfinite(values)]
    largest = float(known.max()) if len(known) else 1.0
    middle = max(1.0, float(np.median(known))) if len(known) else 1.0
    if top is None and largest > 8 * middle:
        return SymLogNorm(linthresh=middle, vmin=0, vmax=largest, base=10)
    return Normalize(0, max(largest, 1e-12) if top is None else top)


def plain_bar(bar: Any, unit: str) -> None:
    """The scale's numbers as everywhere else, without a frame."""
    from matplotlib.colors import SymLogNorm  # noqa: PLC0415  (optional)
    from matplotlib.ticker import FuncFormatter, NullLocator  # noqa: PLC0415

    by_logarithm = isinstance(bar.norm, SymLogNorm)
    if by_logarithm:
        middle, largest = bar.norm.linthresh, bar.norm.vmax
        powers = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]
        bar.set_ticks([0, middle, *(t for t in powers if 1.4 * middle <= t <= largest)])
        bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_short(float(f"{value:.3g}"))))
    bar.ax.tick_params(labelsize=9.5, colors=INK, color=FAINT)
    bar.outline.set_visible(False)
    bar.set_label(f"{unit} (logarithmic above the median)" if by_logarithm else unit, fontsize=10.5, color=INK)


def _whole_ticks(axis: Any, count: int) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415  (optional)

    if count <= 12:
        axis.set_ticks(range(count))
    else:
        axis.set_major_locator(MaxNLocator(9, integer=True))


def _write_numbers(axes: Any, values: np.ndarray, image: Any) -> None:
    size = 9.5 if values.shape[1] <= 8 else 7.5
    for (layer, head), value in np.ndenumerate(values):
        if np.isfinite(value):
            dark = image.norm(value) > 0.55
            words = in_short(float(f"{value:.3g}"))
            axes.text(head, layer, words, ha="center", va="center", fontsize=size, color="white" if dark else INK)


def spans_picture(run: Run) -> Picture | None:
    """Spans over time: of all heads together. gids: span-mean, span-max and, with observations, span-median; bands
    span-half (the middle half of the heads) and span-all. None without any."""
    heads = run.observations.heads
    mean, longest = run.metrics.train["span_mean"], run.metrics.train["span_max"]
    if not heads and not len(mean.known):
        return None
    figure, (axes,) = new_figure()
    named = _measured_spans(axes, heads) if heads else []
    if not heads:
        for gid, words, curve, color in (("span-mean", "mean", mean, BLUE), ("span-max", "longest", longest, ORANGE)):
            thinned = thin(curve)
            (line,) = axes.plot(thinned.steps, thinned.values, color=color, linewidth=1.5, gid=gid)
            named.append((line, words))
    from_zero(axes)
    value_axis(axes)
    step_axis(axes)
    label(axes, y="span, tokens")
    marks = marks_of(run)
    draw_marks(axes, marks)
    legend(axes, [*named, *marks_named(axes, marks)])
    model = run.config.model
    limit = f"of at most {model.max_attention_span:,}" if model.adaptive_span else "which is fixed"
    last = (heads[-1].step, float(np.nanmean(heads[-1].spans))) if heads else mean.last
    told = f"At step {last[0]:,} heads look back {last[1]:.4g} tokens on average, {limit}." if last else ""
    bands = " Bands hold all heads and the middle half of them." if heads else ""
    return Picture(name="spans_time", title="Spans over time", alt=told, caption=told + bands, figure=figure)


def _measured_spans(axes: Any, heads: Sequence[Heads]) -> list[tuple[Any, str]]:
    """Bands and lines over all heads of each evaluation."""
    shown = _chosen(heads)
    steps = np.array([one.step for one in shown])
    low, quarter, median, three_quarters, high = np.array(
        [np.nanpercentile(one.spans, [0, 25, 50, 75, 100]) for one in shown]
    ).T
    means = np.array([np.nanmean(one.spans) for one in shown])
    point = {"marker": "o", "markersize": 3} if len(steps) < 40 else {}
    everything = axes.fill_between(steps, low, high, color=BLUE, alpha=0.10, linewidth=0, gid="span-all")
    half = axes.fill_between(steps, quarter, three_quarters, color=BLUE, alpha=0.25, linewidth=0, gid="span-half")
    (longest,) = axes.plot(steps, high, color=ORANGE, linewidth=1.4, gid="span-max", **point)
    (mean,) = axes.plot(steps, means, color=BLUE, linewidth=1.8, gid="span-mean", **point)
    (middle,) = axes.plot(steps, median, color=INK, linewidth=1, linestyle=":", gid="span-median")
    names = ("longest", "mean", "median", "middle half", "all heads")
    return list(zip((longest, mean, middle, half, everything), names, strict=True))


def layers_picture(run: Run) -> Picture | None:
    """Spans of every layer over time, mean and longest: two images of [layers, evaluations]. None before two."""
    heads = _chosen(run.observations.heads)
    if len(heads) < 2:
        return None
    spans = np.array([one.spans for one in heads])  # [evaluations, layers, heads]
    steps = np.array([one.step for one in heads], dtype=float)
    mean, longest = np.nanmean(spans, axis=2).T, np.nanmax(spans, axis=2).T
    figure, (upper, lower) = new_figure(2, 4.0 + 0.06 * max(0, spans.shape[1] - 12))
    edges = np.concatenate(([steps[0] - (steps[1] - steps[0])], steps))  # a cell ends at its evaluation
    norm = scale(longest, None)
    for axes, values, words in ((upper, mean, "mean"), (lower, longest, "longest")):
        rows = np.arange(spans.shape[1] + 1) - 0.5
        image = axes.pcolormesh(edges, rows, values, cmap=_cells(), norm=norm, gid=words)
        axes.grid(False)
        _whole_ticks(axes.yaxis, spans.shape[1])
        label(axes, y=f"layer ({words})")
    plain_bar(figure.colorbar(image, ax=[upper, lower], pad=0.02), "tokens")
    step_axis(lower)
    far = int(longest[:, -1].argmax())
    return Picture(
        name="spans_layers",
        title="Spans by layer over time",
        alt=f"Mean and longest span of each of {spans.shape[1]} layers over {len(heads)} evaluations; "
        f"layer {far} looks furthest at the end, {longest[far, -1]:.4g} tokens.",
        caption=f"Mean (above) and longest span (below) in each layer. At step {heads[-1].step:,} layer {far} looks "
        f"furthest, {longest[far, -1]:.4g} tokens.",
        figure=figure,
    )


def _chosen(heads: Sequence[Heads]) -> list[Heads]:
    """All evaluations, or as many of them as can be told apart, evenly, the last among them."""
    if len(heads) <= _MOST_COLUMNS:
        return list(heads)
    return [heads[i] for i in np.unique(np.linspace(0, len(heads) - 1, _MOST_COLUMNS).round().astype(int))]
