"""How pictures look: one size, one set of colours, little ink; and what all of them share: axes of steps, marks, PNG.

Colours follow those of Okabe and Ito, which people with any colour vision tell apart. Pictures are drawn on white; the
page turns their lightness over where the reader prefers dark, which keeps the hues.
"""

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SIZE = (5.6, 3.5)  # inches: its letters are readable both at half of a wide page and at a phone's width
DPI = 170
INK, FAINT, GRID = "#22262b", "#6b7280", "#e5e7eb"
BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, RED = (
    *("#0072b2", "#d55e00", "#009e73", "#aa4499", "#56b4e9", "#b58900", "#c1121f"),
)
SERIES = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, INK)
DASHES = ("-", "--", ":", "-.")
CELLS = "YlGnBu"
LARGEST_LABEL = 32  # characters


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of the page. name: of its PNG; alt: what it shows, for who cannot see it; caption: how to read it."""

    name: str
    title: str
    alt: str
    caption: str
    figure: Any


@dataclass(frozen=True)
class Mark:
    """Steps at which something happened, as vertical lines or (`points`) as ticks at the lower edge."""

    label: str
    steps: np.ndarray
    color: str
    dashes: str = "-"
    points: bool = False


def blank_figure(height: float) -> Any:
    """A figure without axes, as wide as all are."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (optional)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(SIZE[0], height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def new_figure(rows: int = 1, height: float = SIZE[1]) -> tuple[Any, list[Any]]:
    """A figure with axes above each other that share the steps."""
    figure = blank_figure(height)
    found = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    for axes in found:
        _plain(axes)
    return figure, list(found)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=10, color=FAINT, which="both")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def label(axes: Any, *, x: str | None = None, y: str | None = None) -> None:
    if x is not None:
        axes.set_xlabel(x, fontsize=11, color=INK)
    if y is not None:
        axes.set_ylabel(y, fontsize=11, color=INK)


def step_axis(axes: Any) -> None:
    """Whole numbers, in short: 500k, 1.5M."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator  # noqa: PLC0415

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: in_short(value)))
    label(axes, x="step")


def value_axis(axes: Any, *, log: bool = False) -> None:
    """Plain numbers, on a logarithmic axis too."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        narrow = high / low < 30  # where powers of ten alone would leave an axis with one number
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if narrow else (1,), numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_short(value)))


def from_zero(axes: Any) -> None:
    """A value axis that begins at 0, with room above: what hardly changes would lie on the frame."""
    highest = axes.dataLim.y1
    axes.set_ylim(0, 1.05 * highest if math.isfinite(highest) and highest > 0 else None)


def in_short(value: float) -> str:
    """0.0007 → 7e-4, 1.25 → 1.25, 1500 → 1.5k, 2000000 → 2M."""
    size = abs(value)
    if size and size < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.3g}{name}" if size < 1e15 else f"{value:.1e}"
    return f"{value:.4g}"


def draw_marks(axes: Any, marks: Sequence[Mark]) -> None:
    """Draw what happened, with entries for the legend."""
    for mark in (mark for mark in marks if len(mark.steps)):
        transform = axes.get_xaxis_transform()  # x in steps, y in parts of the height
        if mark.points:
            style = {"marker": "|", "markersize": 9, "markeredgewidth": 1.4}
            heights = np.full(len(mark.steps), 0.03)
            axes.plot(mark.steps, heights, linestyle="", color=mark.color, transform=transform, gid=mark.label, **style)
            continue
        x = np.repeat(mark.steps.astype(float), 3)
        y = np.tile([0.0, 1.0, np.nan], len(mark.steps))
        style = {"linestyle": mark.dashes, "linewidth": 1.1, "alpha": 0.85, "zorder": 1.5}
        axes.plot(x, y, color=mark.color, transform=transform, gid=mark.label, **style)


def legend(axes: Any, named: Sequence[tuple[Any, str]], *, columns: int = 3) -> None:
    """A legend above the axes. Labels are shown as they are: no formula, no leading underscore that hides one."""
    if not named:
        return
    handles, labels = zip(*named, strict=True)
    made = axes.legend(
        handles,
        [f"{number}" for number in range(len(labels))],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        borderaxespad=0.2,
        columnspacing=1.2,
        handlelength=1.6,
    )
    for text, words in zip(made.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(shortened(words))


def marks_named(axes: Any, marks: Sequence[Mark]) -> list[tuple[Any, str]]:
    """The drawn marks with their labels, for `legend`."""
    drawn = {line.get_gid(): line for line in axes.lines}
    return [(drawn[mark.label], mark.label) for mark in marks if mark.label in drawn]


def in_lines(words: str, width: int) -> str:
    """A label over more than one line, cut at spaces and hyphens where it can be."""
    return "\n".join(textwrap.wrap(shortened(words), width)) or words


def shortened(words: str) -> str:
    """A label of bearable length, its beginning and its end."""
    half = (LARGEST_LABEL - 1) // 2
    return words if len(words) <= LARGEST_LABEL else f"{words[:half]}…{words[-half:]}"


def as_png(figure: Any) -> bytes:
    """The picture; a letter that the font does not have is drawn as a box."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()
