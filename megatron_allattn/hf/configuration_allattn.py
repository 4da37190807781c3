"""Configuration of all-attention language models for Hugging Face transformers. Needs nothing but transformers.

A file of megatron_allattn that lies beside exported weights; the names of its fields are those of pretrain.py's flags.
"""

import re
from typing import Any, ClassVar

import transformers
from transformers import PretrainedConfig

OLDEST = "5.20"  # of transformers, with which these files are tested


def check_transformers() -> None:
    """Raises ImportError: the transformers that is installed is older than these files need."""
    installed = transformers.__version__
    found, needed = ([int(part) for part in re.findall(r"\d+", version)[:2]] for version in (installed, OLDEST))
    if found < needed:
        fix = f"pip install --upgrade 'transformers>={OLDEST}'"
        raise ImportError(f"transformers {installed} is installed, these files need {OLDEST} or newer: {fix}")


check_transformers()


class AllAttentionConfig(PretrainedConfig):
    """What a model is. Defaults are those of pretrain.py.

    vocab_size V; num_layers; hidden_size d; num_attention_heads H; persistent_memory_size N: key/value pairs of every
    head; max_attention_span L: positions before a token that a head attends to at most; adaptive_span: one learned span
    per head, with a soft edge of span_ramp positions; span_normalization: how weights under such a span come to sum to
    1, `span` by one softmax, `window` as in the paper's code; position_values: `shared` adds positions to the values
    too; empty_cache: what comes before the text is attended to as zeros, or masked; adaptive_cutoffs: the first id of
    every further cluster of an adaptive input and softmax, of width d / adaptive_div_value^k, None for a plain one;
    untie_embeddings_and_output_weights: separate tables; variant, feed_forward_size: the baselines and ablations of the
    paper.
    """

    model_type = "all_attention"
    attribute_map: ClassVar[dict[str, str]] = {"num_hidden_layers": "num_layers"}

    def __init__(
        self,
        vocab_size: int = 256,
        num_layers: int = 4,
        hidden_size: int = 128,
        num_attention_heads: int = 4,
        persistent_memory_size: int = 256,
        max_attention_span: int = 256,
        adaptive_span: bool = True,
        span_ramp: int = 32,
        span_normalization: str = "span",
        position_values: str = "none",
        empty_cache: str = "attend",
        attention_dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        variant: str = "all-attn",
        feed_forward_size: int = 0,
        feed_forward_dropout: float = 0.0,
        adaptive_cutoffs: list[int] | None = None,
        adaptive_div_value: int = 4,
        untie_embeddings_and_output_weights: bool = True,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.persistent_memory_size = persistent_memory_size
        self.max_attention_span = max_attention_span
        self.adaptive_span = adaptive_span
        self.span_ramp = span_ramp
        self.span_normalization = span_normalization
        self.position_values = position_values
        self.empty_cache = empty_cache
        self.attention_dropout = attention_dropout
        self.embedding_dropout = embedding_dropout
        self.variant = variant
        self.feed_forward_size = feed_forward_size
        self.feed_forward_dropout = feed_forward_dropout
        self.adaptive_cutoffs = adaptive_cutoffs
        self.adaptive_div_value = adaptive_div_value
        self.untie_embeddings_and_output_weights = untie_embeddings_and_output_weights
        # what transformers' caches go by: no more than the longest span is kept
        self.layer_types = ["sliding_attention"] * num_layers
        self.sliding_window = max_attention_span + 1
        others.setdefault("tie_word_embeddings", False)  # shared tables are the model's own business
        for derived in ("layer_types", "sliding_window"):
            others.pop(derived, None)
        super().__init__(**others)
