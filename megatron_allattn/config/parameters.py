"""How many weights a network has, from its configuration alone: no torch, no network.

A test holds this formula against the networks themselves. d is the hidden size, H the heads, N the persistent vectors,
L the longest span, V the vocabulary, F the width of a feed-forward sublayer.
"""

import itertools
from dataclasses import dataclass

from megatron_allattn.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of weights: all of them, and those that are persistent vectors."""

    total: int
    persistent: int


def count_parameters(model: ModelConfig, vocab_size: int) -> Parameters:
    """The weights of the network that `model` describes over `vocab_size` tokens."""
    d, heads, context_heads = model.hidden_size, model.num_attention_heads, model.num_context_heads
    # W_q and W_o of all heads, W_k and W_v of those that see the context; one LayerNorm; one z a head
    attention = 2 * d * d + 2 * d * (d // heads) * context_heads + 2 * d
    spans = context_heads if model.adaptive_span else 0
    # k' and v': of N vectors for each head that has them, or of N vectors of width d, which is as many
    memory = 2 * model.persistent_memory_size * d
    if model.variant == "head-split":
        memory = memory * (heads - context_heads) // heads
    feed_forward = 0
    if model.variant == "transformer":
        feed_forward = 2 * d * model.feed_forward_size + model.feed_forward_size + d + 2 * d
    elif model.variant == "ff-attn":
        memory, feed_forward = 2 * model.feed_forward_size * d, 2 * d
    layer = attention + spans + memory + feed_forward
    positions = (d // heads) * model.max_attention_span
    return Parameters(
        total=model.num_layers * layer + positions + _vocabulary(model, vocab_size),
        persistent=model.num_layers * memory,
    )


def _vocabulary(model: ModelConfig, vocab_size: int) -> int:
    """Input and output: vectors (twice unless tied) and a bias of each word; adaptive also projections and clusters."""
    d, copies = model.hidden_size, 2 if model.untie_embeddings_and_output_weights else 1
    if not model.cutoffs:
        return copies * vocab_size * d + vocab_size
    sizes = [stop - start for start, stop in itertools.pairwise((0, *model.cutoffs, vocab_size))]
    widths: list[int] = [d // model.adaptive_div_value**k for k in range(len(sizes))]
    vectors = sum(size * width for size, width in zip(sizes, widths, strict=True))
    projections, cluster_logits = d * sum(widths), len(model.cutoffs) * (d + 1)
    return copies * (vectors + projections) + cluster_logits + vocab_size
