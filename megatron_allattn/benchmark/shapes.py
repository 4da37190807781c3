"""What is measured: a recipe's model, with what the flags change of it, and a span profile that fits it."""

import difflib
from dataclasses import dataclass, replace
from typing import Any

from megatron_allattn.benchmark.profiles import FLAG, SpanProfile, read_profile
from megatron_allattn.config import RECIPES, ModelConfig, usage_error

DEFAULT_RECIPE, DEFAULT_PROFILE = "enwik8-small", "facts"


@dataclass(frozen=True)
class Shape:
    """batch: streams B of a micro-batch; block: tokens M of each; profile: None where spans are fixed or a sweep's."""

    recipe: str
    model: ModelConfig
    vocab_size: int
    batch: int
    block: int
    profile: SpanProfile | None

    @property
    def z(self) -> tuple[tuple[float, ...], ...] | None:
        return None if self.profile is None else self.profile.z(self.model.max_attention_span)

    @property
    def notes(self) -> list[str]:
        return [] if self.profile is None else list(self.profile.notes)

    def to_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        model = self.model
        spans = {} if self.profile is None else {"span_mean": self.profile.mean, "span_max": self.profile.longest}
        return {
            "recipe": self.recipe,
            "micro_batch_size": self.batch,
            "seq_length": self.block,
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "persistent_memory_size": model.persistent_memory_size,
            "max_attention_span": model.max_attention_span,
            "attention_dropout": model.attention_dropout,
            "span_profile": None if self.profile is None else self.profile.name,
            **spans,
            "notes": self.notes,
        }

    def describe(self) -> str:
        """One line."""
        model = self.model
        sizes = f"{model.num_layers} × {model.hidden_size}, {model.num_attention_heads} heads"
        rest = f"N {model.persistent_memory_size}, dropout {model.attention_dropout}"
        spans = "" if model.adaptive_span else f", spans fixed at {model.max_attention_span}"
        if self.profile is not None:
            spans = f", spans {self.profile.name}: mean {self.profile.mean:.0f}, longest {self.profile.longest:.0f}"
        return f"{self.recipe}: {sizes}, {rest}, {self.batch} × {self.block} tokens{spans}"


def shape_of(
    recipe: str, batch: int, block: int | None, span_profile: str | None, *, sweep: bool = False, **changes: Any
) -> Shape:
    """The shape that flags ask for.

    changes: fields of `ModelConfig`; those that are None change nothing · sweep: the command has spans of its own.

    Raises UsageError: an unknown recipe, a model that cannot be, or a profile that cannot be read or has no use.
    """
    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, n=1)
        hint = f"did you mean {near[0]}?" if near else "python pretrain.py --recipe list shows all"
        raise usage_error("--recipe", recipe, "unknown recipe", hint)
    run = RECIPES[recipe]()
    model = replace(run.model, **{field: value for field, value in changes.items() if value is not None})
    profile = None
    if sweep:
        if span_profile is not None:
            raise usage_error(FLAG, span_profile, "--sweep has spans of its own", "leave one of the two out")
    elif model.adaptive_span:
        read = read_profile(span_profile or DEFAULT_PROFILE)
        profile = read.fit(model.num_layers, model.num_context_heads, model.max_attention_span)
    elif span_profile is not None:
        raise usage_error(FLAG, span_profile, f"the spans of {recipe} are fixed", "leave it out")
    block = run.training.seq_length if block is None else block
    return Shape(recipe, model, RECIPES[recipe].vocab_size, batch, block, profile)
