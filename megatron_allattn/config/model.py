"""What is trained: the sizes of the network, its attention span and its dropout."""

from dataclasses import dataclass
from typing import Literal

from megatron_allattn.config.checks import LARGEST, check_range, conform_types
from megatron_allattn.config.errors import usage_error


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

    position_values: Literal["none", "shared"] = "none"
    """Positions on the value side: none as in the paper's code, or shared with the keys as in its equation."""

    empty_cache: Literal["attend", "mask"] = "attend"
    """Positions before the start of the text: attended to as zeros as in the paper's code, or masked."""

    attention_dropout: float = 0.0
    """Dropout of attention weights, after their normalisation."""

    embedding_dropout: float = 0.0
    """Dropout of the input embeddings and of the final representation."""

    variant: Literal["all-attn", "transformer"] = "all-attn"
    """All-attention, or the baseline: attention followed by a ReLU feed-forward sublayer."""

    feed_forward_size: int = 0
    """Width of the baseline's feed-forward sublayer (--variant transformer only)."""

    def __post_init__(self) -> None:
        conform_types(self)
        for name in ("num_layers", "hidden_size", "num_attention_heads", "max_attention_span", "span_ramp"):
            check_range(self, name, at_least=1, at_most=LARGEST)
        for name in ("persistent_memory_size", "feed_forward_size"):
            check_range(self, name, at_least=0, at_most=LARGEST)
        check_range(self, "span_loss", at_least=0)
        for name in ("attention_dropout", "embedding_dropout"):
            check_range(self, name, at_least=0, below=1)
        if self.hidden_size % self.num_attention_heads:
            raise usage_error(
                "--hidden-size",
                self.hidden_size,
                f"must be a multiple of --num-attention-heads {self.num_attention_heads}",
                f"the next one is {-(-self.hidden_size // self.num_attention_heads) * self.num_attention_heads}",
            )
        self._check_variant()

    def _check_variant(self) -> None:
        """Persistent vectors and a feed-forward sublayer stand in for each other: each variant has only its own."""
        if self.variant == "all-attn" and self.feed_forward_size:
            raise usage_error(
                "--feed-forward-size",
                self.feed_forward_size,
                "an all-attention layer has no feed-forward sublayer",
                "use --persistent-memory-size, or add --variant transformer",
            )
        if self.variant == "transformer" and not self.feed_forward_size:
            raise usage_error(
                "--variant",
                self.variant,
                "its feed-forward sublayer has no width",
                f"add --feed-forward-size, e.g. {4 * self.hidden_size}",
            )
        if self.variant == "transformer" and self.persistent_memory_size:
            raise usage_error(
                "--persistent-memory-size",
                self.persistent_memory_size,
                "--variant transformer has a feed-forward sublayer instead of persistent vectors",
                "add --persistent-memory-size 0",
            )
