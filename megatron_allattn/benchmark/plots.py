"""Cost against mean span and against maximum span, one SVG, by matplotlib, which is optional."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_allattn.config.errors import usage_error

LABELS = {
    "mean-span": "mean span at a fixed maximum, tokens",
    "max-span": "longest span at a fixed mean, tokens",
}


def check_plotting(flag: str, path: Path | None) -> None:
    """Refuse a plot that cannot be drawn, before anything is measured. Raises UsageError."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise usage_error(flag, path, "plots need matplotlib", "pip install matplotlib, or leave the flag out")


def plot_sweeps(path: Path, sweeps: Mapping[str, Mapping[str, Mapping[str, Any]]], title: str) -> None:
    """Draw {sweep: {backend: what `sweep_results` gives}}, a panel per sweep and a line per backend."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(5.2 * len(sweeps), 4), layout="constrained")
    FigureCanvasSVG(figure)
    figure.suptitle(title, fontsize=10)
    for number, (kind, by_backend) in enumerate(sweeps.items(), start=1):
        axes = figure.add_subplot(1, len(sweeps), number)
        for backend, found in by_backend.items():
            milliseconds = [1000 * value for value in found["seconds"]]
            told = (
                f"R² {found['r_squared']:.4f}"
                if kind == "mean-span"
                else f"flat within {100 * found['flatness']:.1f} %"
            )
            (points,) = axes.plot(found["x"], milliseconds, "o", label=f"{backend}: {told}")
            if kind == "mean-span":
                ends = [found["x"][0], found["x"][-1]]
                line = [1000 * (found["intercept"] + found["slope"] * x) for x in ends]
                axes.plot(ends, line, "-", color=points.get_color())
        axes.set(xlabel=LABELS[kind], ylabel="forward and backward, ms")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    figure.savefig(path, format="svg", metadata={"Date": None})
