"""What each part of a network holds in memory during one micro-batch, from shapes alone, with the eager backend.

Counted are the tensors that autograd saves between a part's forward and its backward, and the most that is alive at any
moment inside either, in elements of float32 (masks of one byte count a quarter). What the code creates and frees, and
in which order, is written here term by term, and a test measures it. Indices, span masks, statistics of norms and other
tensors that are small beside B·M vectors are left out.

Shape letters: B streams, M block, T = B·M tokens, D hidden.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_allattn.config import ModelConfig
from megatron_allattn.parallel.layout import padded_share


@dataclass(frozen=True)
class Part:
    """Elements that a part of the network holds on a rank.

    kept: from its forward to its backward; forward, backward: the most at any moment of either, with what is kept and,
    in backward, the gradients of its parameters; gradients: of its parameters, which stay; unfinished: those of them
    that an earlier part of the network has yet to add to (tied weights).
    """

    name: str
    kept: int
    forward: int
    backward: int
    gradients: int
    unfinished: int = 0


@dataclass(frozen=True)
class Shape:
    """The sizes of one micro-batch on one of `ranks` tensor-parallel ranks."""

    batch: int
    block: int
    ranks: int

    @property
    def tokens(self) -> int:
        return self.batch * self.block


def layer_parts(model: ModelConfig, shape: Shape, window: int, layer: int, gradients: int) -> list[Part]:
    """A layer's parts in the order in which they run; its parameters count with its attention."""
    name, parts = f"layer {layer}", []
    D, N, ranks = model.hidden_size, model.persistent_memory_size, shape.ranks
    if model.variant == "attn-split":
        parts.append(_memory(name, shape, model.num_attention_heads // ranks, D // ranks, N, model.attention_dropout))
    elif model.variant == "head-split":
        heads = (model.num_attention_heads - model.num_context_heads) // ranks
        parts.append(_memory(name, shape, heads, D // ranks // 2, N, model.attention_dropout))
    elif model.variant == "single-head":
        parts.append(_memory(name, shape, 1, D, N // ranks, model.attention_dropout))
    parts.append(_attention(name, model, shape, window, gradients))
    units = model.feed_forward_size // ranks
    if model.variant == "ff-attn":
        parts += [_memory(name, shape, 1, D, units, model.feed_forward_dropout), _add_norm(name, shape, D)]
    elif model.variant == "transformer":
        parts += [_feed_forward(name, shape, D, units, model.feed_forward_dropout), _add_norm(name, shape, D)]
    return parts


def _add_norm(name: str, shape: Shape, width: int) -> Part:
    """LayerNorm(x + y): the sum and the result are kept; backward has gradients of both."""
    size = shape.tokens * width
    return Part(f"{name} norm", 2 * size, 3 * size, 4 * size, 0)


def _attention(name: str, model: ModelConfig, shape: Shape, window: int, gradients: int) -> Part:
    """Attention over the context, jointly with persistent vectors where they share its softmax, and the add-norm."""
    T, B, M, D = shape.tokens, shape.batch, shape.block, model.hidden_size
    joint = model.persistent_memory_size if model.variant == "all-attn" else 0  # columns beside the context's
    heads = model.num_context_heads // shape.ranks
    narrow = heads * (D // model.num_attention_heads)  # width of q, k and v on this rank
    rows = B * heads * M
    span, dropped = model.adaptive_span, model.attention_dropout > 0

    a, context = rows * (window + joint), rows * window
    raw, skewed = rows * (window + M), rows * (window + M + 1)  # scores by memory index; weights padded back to it
    changed = span or dropped  # the weights that meet the values are not the softmax's own result
    keep = a // 4 if dropped else 0
    softmaxes = a + (a if span else 0) + (a if changed and joint else 0) + keep
    if model.empty_cache == "mask" and (changed or joint):
        softmaxes += a
    values = context if model.position_values == "shared" and (changed or joint) else 0
    weights = softmaxes + skewed + values

    memory = B * (window + M)  # tokens whose K and V are made
    vectors = 2 * B * joint * narrow  # persistent keys and values, once for every stream
    # the add-norm; memory; q for each of its products and y; k and v; persistent vectors
    linear = 2 * T * D + memory * D + (3 + bool(joint)) * T * narrow + 2 * memory * narrow + vectors

    # forward: scores stay to the end; the dropout hash works on three 32-bit integers a weight; scores, scaled, softmax
    hashed = (5 + 2 * span) * a if dropped else 0
    large = max(a + weights, hashed, 3 * a, raw + skewed, skewed + 2 * context)
    forward = large + linear + T * narrow + 2 * memory * narrow
    # backward: renormalization holds its operands, the gradient and four quotients; before it, products with the values
    renormalized = 7 * a if span else 0
    products = (1 + span) * a + keep + (a if joint else 0) + skewed + raw + values
    backward = max(weights, renormalized, products) + linear + 2 * T * D + gradients
    return Part(name, weights + linear, forward, backward, gradients)


def _memory(name: str, shape: Shape, heads: int, width: int, vectors: int, dropout: float) -> Part:
    """A softmax of its own over `vectors` persistent vectors for each of `heads` heads, together `width` wide."""
    T, a = shape.tokens, shape.tokens * heads * vectors
    softmaxes = a + (a + a // 4 if dropout else 0)
    # q and y; keys and values, which matmul copies for every stream unless there is one head; backward makes their
    # gradients stream by stream
    own = vectors * width
    linear = 2 * T * width + 2 * own * (shape.batch if heads > 1 else 1)
    forward = max(softmaxes + a, 5 * a if dropout else 3 * a) + linear
    return Part(f"{name} memory", softmaxes + linear, forward, softmaxes + 2 * a + linear + shape.batch * own, 0)


def _feed_forward(name: str, shape: Shape, width: int, units: int, dropout: float) -> Part:
    """U·ReLU(V x + b) + c; the result of ReLU is kept, dropped or not."""
    size = shape.tokens * units
    kept = size + (size + size // 4 if dropout else 0)
    return Part(f"{name} feed-forward", kept, kept + size * (3 if dropout else 1), kept + 2 * size, 0)


def embedding(model: ModelConfig, shape: Shape, tables: Sequence[int], gradients: int) -> Part:
    """Look-up, and dropout of what it gives. tables: elements of this rank's part of each table."""
    size = shape.tokens * model.hidden_size
    kept = size + (size // 4 if model.embedding_dropout else 0) + _projections(model, shape)
    # backward of tied tables, one at a time: the look-up's gradient and its sum with the output's, which is there
    tied = 0 if model.untie_embeddings_and_output_weights else 2 * max(tables)
    return Part("embedding", kept, kept + 3 * size, kept + 3 * size + tied + gradients, gradients)


def output(model: ModelConfig, shape: Shape, tables: Sequence[tuple[int, int, int]], gradients: int, tied: int) -> Part:
    """Softmaxes over the vocabulary. tables: tokens, this rank's rows and width of each table of logits, in order.

    Logits and probabilities are there together in forward, probabilities and gradients of logits in backward; then one
    product after the other, the last first, takes its gradient of logits and leaves that of its weight.
    """
    T, D = shape.tokens, model.hidden_size
    logits = [tokens * rows for tokens, rows, _ in tables]
    hidden = sum(tokens for tokens, *_ in tables) * D + _projections(model, shape)
    if model.embedding_dropout:
        hidden += T * D + T * D // 4
    live, highest = sum(logits), 2 * sum(logits)
    for size, (_, rows, width) in reversed(list(zip(logits, tables, strict=True))):
        highest = max(highest, live + rows * width)
        live += rows * width - size
    kept = sum(logits) + hidden
    return Part("output", kept, kept + sum(logits), highest + hidden + 2 * T * D, gradients, tied)


def _projections(model: ModelConfig, shape: Shape) -> int:
    """The copy of all projections of an adaptive vocabulary that goes through one node."""
    if not model.cutoffs or shape.ranks == 1:
        return 0
    return model.hidden_size * sum(width for *_, width in vocabulary_tables(model, model.cutoffs[-1] + 1, shape.ranks))


def vocabulary_tables(model: ModelConfig, vocab_size: int, ranks: int) -> list[tuple[int, int]]:
    """This rank's rows and the width of every table of words: one, or one for each cluster."""
    bounds = [0, *model.cutoffs, vocab_size]
    return [
        (padded_share(stop - start, ranks), model.hidden_size // model.adaptive_div_value**k)
        for k, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
