"""What is trained: the sizes of the network, its attention span and its dropout."""

import itertools
from dataclasses import dataclass
from typing import Literal

from megatron_allattn.config.checks import LARGEST, check_range, conform_types
from megatron_allattn.config.errors import flag, usage_error

DROPOUT_UNITS = 2**14
"""A probability of dropout is a whole number of 1/16384, rounded (parallel/random.py compares numbers of 14 bits)."""

Variant = Literal["all-attn", "attn-split", "head-split", "single-head", "ff-attn", "transformer"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model: layers of attention over the context and over persistent vectors, without a feed-forward sublayer."""

    num_layers: int = 4
    """Number of layers."""

    hidden_size: int = 128
    """Width d of the hidden states."""

    num_attention_heads: int = 4
    """Attention heads H of each layer; each is hidden-size / H wide."""

    persistent_memory_size: int = 256
    """Persistent key/value pairs N of each head; 0 leaves them out."""

    max_attention_span: int = 256
    """Positions L before a token that a head can attend to at most."""

    adaptive_span: bool = True
    """Learn one span per head, up to the maximum; otherwise every head has the maximum."""

    span_loss: float = 1e-6
    """Coefficient of the loss on the learned spans: coefficient x L x mean over heads, summed over layers."""

    span_ramp: int = 32
    """Width R of the soft edge of a learned span, in positions."""

    span_normalization: Literal["span", "window"] = "span"
    """How weights under a learned span come to sum to 1: by one softmax over the head's own span, or as in the paper's
    code by a softmax over the layer's window, the mask, and a division by the sum plus 1e-8. They differ where the mask
    hides all but some 1e-8 of the first softmax; window costs the longest head for all."""

    position_values: Literal["none", "shared"] = "none"
    """Positions on the value side: none as in the paper's code, or shared with the keys as in its equation."""

    empty_cache: Literal["attend", "mask"] = "attend"
    """Positions before the start of the text: attended to as zeros as in the paper's code, or masked."""

    attention_dropout: float = 0.0
    """Dropout of attention weights, after their normalisation."""

    embedding_dropout: float = 0.0
    """Dropout of the input embeddings and of the final representation."""

    variant: Variant = "all-attn"
    """All-attention, an ablation of it (attn-split, head-split, single-head, ff-attn), or the transformer baseline."""

    feed_forward_size: int = 0
    """Width of the feed-forward sublayer (--variant transformer: ReLU; ff-attn: softmax)."""

    feed_forward_dropout: float = 0.0
    """Dropout of the feed-forward sublayer's activations."""

    adaptive_cutoffs: str | None = None
    """Adaptive input and softmax: ids at which a new cluster starts, ascending, such as 20000,40000,200000."""

    adaptive_div_value: int = 4
    """Cluster k of the adaptive input and softmax has vectors of width hidden-size / value^k."""

    untie_embeddings_and_output_weights: bool = True
    """Separate weights for input and output, as in the paper's character models; --no-untie-… shares them."""

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """The first id of every cluster after the first; empty without adaptive input and softmax."""
        return tuple(int(part) for part in self.adaptive_cutoffs.split(",")) if self.adaptive_cutoffs else ()

    @property
    def head_size(self) -> int:
        """Channels of a head, K."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_context_heads(self) -> int:
        """Heads of a layer that attend to the context, and so have a span."""
        return self.num_attention_heads // 2 if self.variant == "head-split" else self.num_attention_heads

    def __post_init__(self) -> None:
        conform_types(self)
        for name in ("num_layers", "hidden_size", "num_attention_heads", "max_attention_span", "span_ramp"):
            check_range(self, name, at_least=1, at_most=LARGEST)
        for name in ("persistent_memory_size", "feed_forward_size"):
            check_range(self, name, at_least=0, at_most=LARGEST)
        check_range(self, "adaptive_div_value", at_least=1, at_most=LARGEST)
        check_range(self, "span_loss", at_least=0)
        for name in ("attention_dropout", "embedding_dropout", "feed_forward_dropout"):
            check_range(self, name, at_least=0, below=1)
            self._check_dropout(name)
        if self.hidden_size % self.num_attention_heads:
            raise usage_error(
                "--hidden-size",
                self.hidden_size,
                f"must be a multiple of --num-attention-heads {self.num_attention_heads}",
                f"the next one is {-(-self.hidden_size // self.num_attention_heads) * self.num_attention_heads}",
            )
        self._check_variant()
        self._check_cutoffs()

    def _check_dropout(self, name: str) -> None:
        """A probability that is neither 0 nor 1 must not become one of them in silence."""
        probability = getattr(self, name)
        units = round(probability * DROPOUT_UNITS)
        if units == DROPOUT_UNITS:
            fix = f"give at most {DROPOUT_UNITS - 1}/{DROPOUT_UNITS} ({1 - 1 / DROPOUT_UNITS})"
        elif probability and not units:
            fix = f"give 0, or at least 1/{DROPOUT_UNITS} ({1 / DROPOUT_UNITS})"
        else:
            return
        rule = f"dropout has a resolution of 1/{DROPOUT_UNITS}, at which this is {units // DROPOUT_UNITS}"
        raise usage_error(flag(name), probability, rule, fix)

    def _check_variant(self) -> None:
        """Persistent vectors and a feed-forward sublayer stand in for each other: each variant has only its own."""
        has_feed_forward = self.variant in ("transformer", "ff-attn")
        if not has_feed_forward and self.feed_forward_size:
            raise usage_error(
                "--feed-forward-size",
                self.feed_forward_size,
                f"--variant {self.variant} has no feed-forward sublayer",
                "use --persistent-memory-size, or add --variant transformer",
            )
        if not has_feed_forward and self.feed_forward_dropout:
            raise usage_error(
                "--feed-forward-dropout",
                self.feed_forward_dropout,
                f"--variant {self.variant} has no feed-forward sublayer",
                "use --attention-dropout",
            )
        if has_feed_forward and not self.feed_forward_size:
            raise usage_error(
                "--variant",
                self.variant,
                "its feed-forward sublayer has no width",
                f"add --feed-forward-size, e.g. {4 * self.hidden_size}",
            )
        if has_feed_forward and self.persistent_memory_size:
            raise usage_error(
                "--persistent-memory-size",
                self.persistent_memory_size,
                f"--variant {self.variant} has a feed-forward sublayer instead of persistent vectors",
                "add --persistent-memory-size 0",
            )
        if self.variant in ("attn-split", "head-split", "single-head") and not self.persistent_memory_size:
            raise usage_error(
                "--persistent-memory-size",
                self.persistent_memory_size,
                f"--variant {self.variant} is another way to attend to persistent vectors, so it needs some",
                "give a number above 0, or use --variant all-attn",
            )
        if self.variant == "head-split" and self.num_attention_heads % 2:
            raise usage_error(
                "--num-attention-heads",
                self.num_attention_heads,
                "--variant head-split gives half of the heads to the context",
                "give an even number",
            )

    def _check_cutoffs(self) -> None:
        """Cut-offs are cumulative; whether the last is below the vocabulary is known once the data is open."""
        if self.adaptive_cutoffs is None:
            return
        fix = "give ascending numbers such as 20000,40000,200000, or leave it out"
        parts = self.adaptive_cutoffs.split(",")
        if not all(part.isdecimal() and part.isascii() for part in parts):
            raise usage_error("--adaptive-cutoffs", self.adaptive_cutoffs, "its parts are not all numbers", fix)
        starts = (0, *self.cutoffs)
        if any(start >= stop for start, stop in itertools.pairwise(starts)):
            raise usage_error("--adaptive-cutoffs", self.adaptive_cutoffs, "they must ascend, from above 0", fix)
        if self.cutoffs[-1] > LARGEST:
            raise usage_error("--adaptive-cutoffs", self.adaptive_cutoffs, f"must be at most {LARGEST}", fix)
        if self.hidden_size < self.adaptive_div_value ** len(self.cutoffs):
            raise usage_error(
                "--adaptive-div-value",
                self.adaptive_div_value,
                f"leaves the last of {len(parts) + 1} clusters no width of --hidden-size {self.hidden_size}",
                "lower it or give fewer cut-offs",
            )
