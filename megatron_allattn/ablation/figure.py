"""The paper's Figure 2 from the results of an ablation: number of vectors (left), versions (right), every seed."""

from collections.abc import Sequence
from pathlib import Path

from megatron_allattn.ablation.cells import BASE
from megatron_allattn.ablation.results import Summary

COLOR, BASE_COLOR = "#8aa6c1", "#1f5a8a"
NAMES = {"bpc": "bits per character or byte", "ppl": "perplexity"}


def draw(path: Path, summaries: Sequence[Summary], unit: str, title: str) -> None:
    """Write it as PNG or SVG, by the ending of the name. Points are seeds, bars and lines their means."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (optional)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    left, right = figure.subplots(1, 2, sharey=True)
    sizes = sorted((one for one in summaries if one.vectors is not None), key=lambda one: one.vectors or 0)
    places = list(range(len(sizes)))  # numbers are doubled from one to the next: side by side, 0 among them
    left.plot(places, [one.mean for one in sizes], "-", color=BASE_COLOR)
    for place, one in zip(places, sizes, strict=True):
        left.plot([place] * len(one.values), one.values, "o", color=BASE_COLOR, alpha=0.6, markersize=4)
    left.set_xticks(places, [f"{one.vectors:,}" for one in sizes])
    left.set(xlabel="persistent vectors of a head, N", ylabel=f"validation, {NAMES[unit]}")

    versions = [one for one in summaries if one.vectors is None or one.name == BASE]
    for place, one in enumerate(versions):
        right.bar(place, one.mean, width=0.6, color=BASE_COLOR if one.name == BASE else COLOR)
        right.plot([place] * len(one.values), one.values, "o", color="black", alpha=0.6, markersize=4)
    right.set_xticks(range(len(versions)), [one.name for one in versions], rotation=20)
    every = [value for one in summaries for value in one.values]
    room = 0.1 * (max(every) - min(every)) or 0.01 * max(every)
    left.set_ylim(min(every) - room, max(every) + room)  # differences are small beside the losses: not from 0
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)
