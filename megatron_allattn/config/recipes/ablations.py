"""The ablations of the paper's Figure 2: its large model on text8 with one thing changed.

"All those versions have the same number of parameters except head-split", says the paper. FF-attn as it describes it,
24 layers of 3072, has 101M; with 3584 it has the 114M of the others, so there is a recipe for each.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_allattn.config.recipes.characters import VOCABULARY, all_attention
from megatron_allattn.config.recipes.recipe import Recipe
from megatron_allattn.config.run import RunConfig


def changed(**model: Any) -> RunConfig:
    """`text8-large` with other model settings."""
    run = all_attention("text8", "large")
    return replace(run, model=replace(run.model, **model))


def ff_attention(feed_forward_size: int) -> RunConfig:
    """A softmax over learned vectors as a sublayer of its own; its weights get the dropout of attention weights."""
    return changed(
        variant="ff-attn",
        num_layers=24,
        persistent_memory_size=0,
        feed_forward_size=feed_forward_size,
        feed_forward_dropout=0.4,
    )


def _recipe(suffix: str, about: str, *, millions: int | None = None, **model: Any) -> Recipe:
    return _of(suffix, about, lambda: changed(**model), millions)


def _of(suffix: str, about: str, make: Callable[[], RunConfig], millions: int | None = None) -> Recipe:
    return Recipe(
        name=f"text8-large-{suffix}",
        about=about,
        make=make,
        vocab_size=VOCABULARY["text8"],
        gpus=64,
        prepare="text8",
        paper_millions=millions,
    )


ABLATIONS: tuple[Recipe, ...] = (
    _recipe("attn-split", "ablation: two softmaxes, over context and over vectors", millions=114, variant="attn-split"),
    _recipe("head-split", "ablation: half of the heads for context, half for vectors", variant="head-split"),
    _recipe("single-head", "ablation: one set of vectors for all heads", millions=114, variant="single-head"),
    _of("ff-attn", "ablation: softmax feed-forward of 3072, 24 layers", lambda: ff_attention(3072), 114),
    _of("ff-attn-3584", "ablation: the same with 3584, which has the 114M", lambda: ff_attention(3584)),
    _recipe("n0", "ablation: no persistent vectors", millions=38, persistent_memory_size=0),
    *(
        _recipe(f"n{size}", f"ablation: {size} persistent vectors", persistent_memory_size=size)
        for size in (128, 256, 512, 1024, 4096)
    ),
)
"""Figure 2 of the paper; `text8-large` is its point of reference, with 2048 vectors."""
