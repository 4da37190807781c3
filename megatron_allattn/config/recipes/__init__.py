"""Named configurations: every row and ablation of the paper, its baselines, and larger models beyond it.

Where the paper is silent the recipe says what was chosen, in its function's comments and on its page in docs/cookbook.
"""

from megatron_allattn.config.recipes.ablations import ABLATIONS
from megatron_allattn.config.recipes.characters import CHARACTERS
from megatron_allattn.config.recipes.demo import DEMO
from megatron_allattn.config.recipes.recipe import BYTES, Recipe
from megatron_allattn.config.recipes.scaled import SCALED
from megatron_allattn.config.recipes.words import WORDS

__all__ = ["RECIPES", "Recipe", "prepare_arguments", "recipe_table"]

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (DEMO, *CHARACTERS, *WORDS, *ABLATIONS, *SCALED)}
"""Every recipe by the name that --recipe takes."""

_HEADER = ("recipe", "parameters", "persistent", "tokens/step", "GPUs", "")


def prepare_arguments(recipe: str | None) -> str:
    """How a run's data is made: the arguments of tools/prepare_data.py, those for any text without a recipe."""
    return RECIPES[recipe].prepare if recipe in RECIPES else BYTES


def recipe_table() -> str:
    """The recipes as a table of text: a header, then a line each, in the order of `RECIPES`."""
    rows = [_HEADER, *map(_row, RECIPES.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{w}}" for cell, w in zip(row[1:5], widths[1:5], strict=True))
        + (f"  {row[5]}" if row[5] else "")
        for row in rows
    )


def _row(recipe: Recipe) -> tuple[str, ...]:
    count = recipe.parameters
    return (
        recipe.name,
        in_words(count.total),
        f"{100 * count.persistent / count.total:.0f} %",
        f"{recipe.tokens_per_step:,}",
        str(recipe.gpus),
        recipe.about,
    )


def in_words(parameters: int) -> str:
    """3,200,000 → 3.2M; 1,310,000,000 → 1.31B."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 999_950_000 else f"{parameters / 1e6:.1f}M"
