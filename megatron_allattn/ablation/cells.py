"""The runs of the paper's Figure 2, at whatever size: the number of persistent vectors (left), and how they are
integrated (right). Every run is one cell, a configuration and a seed; the model as it is belongs to both panels.

All versions have as many parameters as the model itself, but for head-split, half of whose vectors no head uses, and
for other numbers of vectors. FF-attn has two sublayers a layer, so two thirds of the layers, and the feed-forward size
that makes up for it (the paper: 24 of 36 layers).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_allattn.config import ModelConfig, UsageError, usage_error
from megatron_allattn.config.cli import without_flag
from megatron_allattn.config.parameters import count_parameters

BASE = "all-attn"
VARIANTS = (BASE, "attn-split", "head-split", "single-head", "ff-attn")
"""In the order in which the paper lists them."""


@dataclass(frozen=True)
class Version:
    """One bar or point of the figure. vectors: N in the panel of numbers, None if it is not in it; flags: of
    pretrain.py, what makes it another model than the base."""

    name: str
    vectors: int | None
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A run: a version at one seed."""

    version: Version
    seed: int

    @property
    def name(self) -> str:
        """Of its run folder."""
        return f"{self.version.name}-seed{self.seed}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (*self.version.flags, "--seed", str(self.seed))


def versions(model: ModelConfig, variants: Sequence[str], sizes: Sequence[int]) -> list[Version]:
    """The model itself, the variants and the other numbers of vectors. Raises UsageError: there is no such model."""
    if model.variant != BASE or not model.persistent_memory_size:
        value = (
            model.variant if model.variant != BASE else f"with --persistent-memory-size {model.persistent_memory_size}"
        )
        raise usage_error("--variant", value, "versions differ from all-attn with persistent vectors", "leave it out")
    found = [Version(BASE, model.persistent_memory_size, ())]
    found += [Version(name, None, _flags(model, name)) for name in variants if name != BASE]
    for size in sizes:
        if size != model.persistent_memory_size:
            found.append(Version(f"n{size}", size, ("--persistent-memory-size", str(size))))
    return found


def cells(found: Sequence[Version], seeds: Sequence[int]) -> list[Cell]:
    """Every version at the first seed, then at the next: what is there early says something of all of them."""
    return [Cell(version, seed) for seed in seeds for version in found]


def _flags(model: ModelConfig, variant: str) -> tuple[str, ...]:
    if variant != "ff-attn":
        changed = replace(model, variant=variant)  # type: ignore[arg-type]  # raises where there is none
        assert changed.num_context_heads > 0
        return ("--variant", variant)
    if model.num_layers % 3:
        rule = "ff-attn has two thirds of the layers, each of two sublayers"
        raise usage_error("--num-layers", model.num_layers, rule, "give a multiple of 3, or --variants without ff-attn")
    layers, size = model.num_layers * 2 // 3, _feed_forward_size(model)
    # its weights get the dropout of attention weights
    sizes = {"num-layers": layers, "persistent-memory-size": 0, "feed-forward-size": size}
    rate = {"feed-forward-dropout": model.attention_dropout} if model.attention_dropout else {}
    return (
        "--variant",
        variant,
        *(word for name, value in (sizes | rate).items() for word in (f"--{name}", str(value))),
    )


def _feed_forward_size(model: ModelConfig) -> int:
    """So many parameters are nearest to the model's: a unit of the sublayer has 2 d in each layer."""

    def total(size: int) -> int:
        layers = model.num_layers * 2 // 3
        other = replace(model, variant="ff-attn", num_layers=layers, persistent_memory_size=0, feed_forward_size=size)
        return count_parameters(other, 1000).total

    one, two = total(1), total(2)
    return max(1, 1 + round((count_parameters(model, 1000).total - one) / (two - one)))


def with_flags(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Arguments of pretrain.py, in which no flag may be twice, with these flags, each with a value, in place of their
    own."""
    kept = list(arguments)
    for name in flags[::2]:
        kept = without_flag(kept, name.removeprefix("--"))
    return [*kept, *flags]


def check_seeds(number: int, first: int) -> list[int]:
    """The seeds of a sweep. Raises UsageError: pretrain.py has no such seed."""
    if first + number > 2**31:
        raise usage_error("--seeds", number, f"the first is {first}, and the last is at most {2**31 - 1}", "lower one")
    return list(range(first, first + number))


def sizes_of(text: str) -> tuple[int, ...]:
    """0,64,256 → (0, 64, 256). Raises UsageError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise usage_error("--sizes", text, "must be different whole numbers", "give 0,64,256 or, for none, ''")
    return tuple(map(int, words))


def variants_of(text: str) -> tuple[str, ...]:
    """attn-split,ff-attn → both, with all-attn. Raises UsageError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in words if word not in VARIANTS]:
        raise UsageError(f"--variants {text}: {unknown[0]} is none of {', '.join(VARIANTS)}; correct it")
    return tuple(word for word in VARIANTS if word in words or word == BASE)
