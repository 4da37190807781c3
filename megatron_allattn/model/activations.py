"""What each part of a network holds in memory during one micro-batch, from shapes alone.

Counted are the tensors that autograd saves between a part's forward and its backward, and the most that is alive at any
moment inside either, in elements of float32 (masks of one byte count a quarter). What the code creates and frees, and
in which order, is written here term by term, and a test measures it. Indices, span masks, statistics of norms and other
tensors that are small beside B·M vectors are left out.

Shape letters: B streams, M block, T = B·M tokens, D hidden.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig, Recompute
from megatron_allattn.kernels.interface import BlockState, LayerWeights
from megatron_allattn.kernels.registry import make_blocked
from megatron_allattn.model.attention import attention_settings
from megatron_allattn.parallel.layout import padded_share
from megatron_allattn.parallel.random import DropoutKeys

FLOAT = 4  # bytes


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


def layer_parts(
    model: ModelConfig, shape: Shape, window: int, layer: int, gradients: int, eager: bool, recompute: Recompute
) -> list[Part]:
    """A layer's parts in the order in which they run; its parameters count with its attention.

    eager: the backend, otherwise blocked. Recomputed as a whole, a layer is one part.
    """
    parts = _layer_parts(model, shape, window, layer, gradients, eager, recompute == "selective")
    return [_recomputed(parts, shape.tokens * model.hidden_size)] if recompute == "full" else parts


def _recomputed(parts: Sequence[Part], size: int) -> Part:
    """One part of a layer's, of which only its result of `size` elements is kept and the rest made anew in backward."""
    name, live, forward, backward = parts[0].name, 0, [], []
    for part in parts:
        forward.append(live + part.forward)
        live += part.kept
    everything, gradients = live, 0
    for part in reversed(parts):
        live -= part.kept
        backward.append(live + gradients + part.backward)
        gradients += part.gradients
    again = max(*forward, everything) + size  # the second forward pass meets the gradient of the layer's result
    return Part(name, size, max(forward), max(again, *backward), gradients)


def _layer_parts(
    model: ModelConfig, shape: Shape, window: int, layer: int, gradients: int, eager: bool, selective: bool
) -> list[Part]:
    name, parts = f"layer {layer}", []
    D, N, ranks = model.hidden_size, model.persistent_memory_size, shape.ranks
    if model.variant == "attn-split":
        parts.append(_memory(name, shape, model.num_attention_heads // ranks, D // ranks, N, model.attention_dropout))
    elif model.variant == "head-split":
        heads = (model.num_attention_heads - model.num_context_heads) // ranks
        parts.append(_memory(name, shape, heads, D // ranks // 2, N, model.attention_dropout))
    elif model.variant == "single-head":
        parts.append(_memory(name, shape, 1, D, N // ranks, model.attention_dropout))
    if eager:
        parts.append(_attention(name, model, shape, window, gradients))
    else:
        parts.append(_blocked_attention(name, model, shape, gradients, selective))
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
    narrow = heads * model.head_size  # width of q, k and v on this rank
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


def _blocked_attention(name: str, model: ModelConfig, shape: Shape, gradients: int, selective: bool) -> Part:
    """The same by the blocked backend, without its scratch memory (`blocked_scratch`)."""
    T, D = shape.tokens, model.hidden_size
    joint = model.persistent_memory_size if model.variant == "all-attn" else 0
    narrow = model.num_context_heads // shape.ranks * model.head_size
    projections, vectors = 3 * T * narrow, 2 * joint * narrow  # q, k and v; persistent vectors times their scales
    kept = 2 * T * D + T * narrow + vectors + (0 if selective else projections)  # and the add-norm and y
    forward = vectors + T * narrow + max(projections, kept - vectors - T * narrow + T * D)
    # backward: of the add-norm and W_o; then, when their tensors are gone, gradients of the sum, the block and y, of q,
    # k and v, of the weights and of the scaled vectors
    attended = vectors + 2 * projections + 2 * T * D + T * narrow + gradients + vectors
    return Part(name, kept, forward, max(kept + 2 * T * D, attended), gradients)


def blocked_scratch(model: ModelConfig, shape: Shape, longest: int) -> int:
    """Elements of the blocked backend's scratch memory, which all layers share: of heads that look back `longest`.

    The backend itself says so, from a pass over tensors without memory. Compiled heads have memory for every thread.
    """
    size, heads = model.head_size, model.num_context_heads // shape.ranks
    joint = model.persistent_memory_size if model.variant == "all-attn" else 0

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, device="meta", requires_grad=True)

    projection = empty(heads * size, model.hidden_size)
    weights = LayerWeights(
        query=projection,
        key=projection,
        value=projection,
        persistent_key=empty(heads, size, joint) if joint else None,
        persistent_value=empty(heads, joint, size) if joint else None,
        span=empty(heads, 1, 1) if model.adaptive_span else None,
        position_key=empty(1, size, model.max_attention_span),
    )
    streams, ids = (torch.empty(count, dtype=torch.int32, device="meta") for count in (shape.batch, heads))
    keys = DropoutKeys(0, 0, streams) if model.attention_dropout else None
    state = BlockState(longest, longest, ids, 0, keys, (longest,) * heads)
    backend, block = make_blocked(ids.device), empty(shape.batch, shape.block, model.hidden_size)
    cache = torch.empty(shape.batch, longest, model.hidden_size, device="meta")
    backend(block, cache, weights, attention_settings(model), state).sum().backward()
    return backend.scratch_bytes // FLOAT


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
    # backward of tied tables, one at a time: the look-up's gradient, to be added to the output's, which is there
    tied = 0 if model.untie_embeddings_and_output_weights else max(tables)
    return Part("embedding", kept, kept + 3 * size, kept + 3 * size + tied + gradients, gradients)


def output(model: ModelConfig, shape: Shape, tables: Sequence[tuple[int, int, int]], gradients: int, tied: int) -> Part:
    """Softmaxes over the vocabulary. tables: tokens, this rank's rows and width of each table of logits, in order.

    There is one copy of the logits, until all products of backward are done.
    """
    T, D = shape.tokens, model.hidden_size
    logits = [tokens * rows for tokens, rows, _ in tables]
    hidden = sum(tokens for tokens, *_ in tables) * D + _projections(model, shape)
    if model.embedding_dropout:
        hidden += T * D + T * D // 4
    kept = sum(logits) + hidden
    weights = sum(rows * width for _, rows, width in tables)
    return Part("output", kept, kept, kept + weights + 2 * T * D, gradients, tied)


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
