"""What each part of a network holds in memory during one micro-batch, from shapes alone.

Counted are the tensors that autograd saves between a part's forward and its backward, and the most that is alive at any
moment inside either, in elements of the network's precision (`Shape.wide` and `Shape.mask` for others). What the code
creates and frees, and in which order, is written here term by term, and a test measures it. Indices, span masks,
statistics of norms and other tensors that are small beside B·M vectors are left out.

With sequence parallelism the residual stream is T / ranks tokens of a rank. What enters a sublayer is then gathered
(the parts and the whole, for a moment twice as much), lives as long as the sublayer's forward, and is gathered again in
backward. So is the cache of a layer that ranks share, which is cut into channels.

Shape letters: B streams, M block, T = B·M tokens, D hidden, C cached positions.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_allattn.config import ModelConfig, Recompute
from megatron_allattn.model.activation_backends import blocked_attention, triton_attention
from megatron_allattn.model.activation_shapes import FLOAT, Backend, Held, Layer, Part, Shape
from megatron_allattn.parallel.layout import padded_share


@dataclass(frozen=True)
class _Around:
    """What is there while a sublayer runs. entered: elements of what has entered from a cut stream; cached: of a shared
    cache; written: of the whole of its next state; stay: whether autograd keeps the first two (where the layer is
    computed again as a whole), instead of making them again."""

    entered: int
    cached: int
    written: int
    stay: bool

    @property
    def kept(self) -> int:
        return self.entered + self.cached if self.stay else 0

    @property
    def forward(self) -> int:
        """Beside what the sublayer keeps and works with."""
        return 0 if self.stay else self.entered + self.cached

    @property
    def entry(self) -> int:
        """Before the sublayer runs."""
        return max(2 * self.entered, self.entered + 2 * self.cached, self.entered + self.cached + self.written)

    @property
    def again(self) -> int:
        """In backward, while they are made anew."""
        return 0 if self.stay else max(2 * self.entered, self.entered + 2 * self.cached)


def layer_parts(model: ModelConfig, shape: Shape, layer: Layer, backend: Backend, recompute: Recompute) -> list[Part]:
    """A layer's parts in the order in which they run; its parameters count with its attention.

    Recomputed as a whole, a layer is one part.
    """
    parts = _layer_parts(model, shape, layer, backend, recompute)
    return [_recomputed(parts, shape.own * model.hidden_size)] if recompute == "full" else parts


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


def _layer_parts(model: ModelConfig, shape: Shape, layer: Layer, backend: Backend, recompute: Recompute) -> list[Part]:
    name, parts = f"layer {layer.index}", []
    D, N, ranks = model.hidden_size, model.persistent_memory_size, shape.ranks
    entered = shape.tokens * D if shape.cut else 0
    positions, full = shape.batch * D, recompute == "full"
    around = _Around(entered, positions * layer.cached, positions * layer.kept, full)
    if model.variant == "attn-split":
        heads = model.num_attention_heads // ranks
        parts.append(_memory(name, shape, heads, D // ranks, N, model.attention_dropout, around))
    elif model.variant == "head-split":
        heads = (model.num_attention_heads - model.num_context_heads) // ranks
        parts.append(_memory(name, shape, heads, D // ranks // 2, N, model.attention_dropout, around))
    elif model.variant == "single-head":
        parts.append(_memory(name, shape, 1, D, N // ranks, model.attention_dropout, around))
    if backend == "eager":
        parts.append(_eager_attention(name, model, shape, layer, around))
    else:
        of_backend = triton_attention if backend == "triton" else blocked_attention
        held = of_backend(model, shape, layer, recompute == "selective")
        parts.append(_attention(name, shape, D, layer.gradients, held, around))
    units = model.feed_forward_size // ranks
    inner = _Around(entered, 0, 0, full)
    if model.variant == "ff-attn":
        parts += [_memory(name, shape, 1, D, units, model.feed_forward_dropout, inner), _add_norm(name, shape, D)]
    elif model.variant == "transformer":
        parts += [_feed_forward(name, shape, units, model.feed_forward_dropout, inner), _add_norm(name, shape, D)]
    return parts


def _add_norm(name: str, shape: Shape, width: int) -> Part:
    """LayerNorm(x + y): the sum and the result are kept; backward has gradients of both."""
    size = shape.own * width
    return Part(f"{name} norm", 2 * size, 3 * size, 4 * size, 0)


def _eager_attention(name: str, model: ModelConfig, shape: Shape, layer: Layer, around: _Around) -> Part:
    """Attention over the context, jointly with persistent vectors where they share its softmax, and the add-norm."""
    T, B, M, D, window = shape.tokens, shape.batch, shape.block, model.hidden_size, layer.window
    joint = model.persistent_memory_size if model.variant == "all-attn" else 0  # columns beside the context's
    heads = model.num_context_heads // shape.ranks
    narrow = heads * model.head_size  # width of q, k and v on this rank
    rows = B * heads * M
    span, dropped = model.adaptive_span, model.attention_dropout > 0

    a, context = rows * (window + joint), rows * window
    raw, skewed = rows * (window + M), rows * (window + M + 1)  # scores by memory index; weights padded back to it
    changed = span or dropped  # the weights that meet the values are not the softmax's own result
    keep = shape.mask(a) if dropped else 0
    softmaxes = a + (a if span else 0) + (a if changed and joint else 0) + keep
    if model.empty_cache == "mask" and (changed or joint):
        softmaxes += a
    values = context if model.position_values == "shared" and (changed or joint) else 0
    weights = softmaxes + skewed + values

    memory = B * (window + M)  # tokens whose K and V are made
    vectors = 2 * B * joint * narrow  # persistent keys and values, once for every stream
    # the add-norm; memory; q for each of its products and y; k and v; persistent vectors
    linear = 2 * shape.own * D + memory * D + (3 + bool(joint)) * T * narrow + 2 * memory * narrow + vectors

    # forward: scores stay to the end; the dropout hash works on three 32-bit integers a weight; scores, scaled, softmax
    hashed = (5 + 2 * span) * a if dropped else 0
    large = max(a + weights, hashed, 3 * a, raw + skewed, skewed + 2 * context)
    forward = large + linear + T * narrow + 2 * memory * narrow + around.forward + around.kept
    # backward: renormalization holds its operands, the gradient and four quotients; before it, products with the values
    renormalized = 7 * a if span else 0
    products = (1 + span) * a + keep + (a if joint else 0) + skewed + raw + values
    residual = shape.own * D + T * D + around.entered
    backward = max(weights, renormalized, products) + linear + residual + layer.gradients + around.kept
    return Part(name, weights + linear + around.kept, max(around.entry, forward), backward, layer.gradients)


def _attention(name: str, shape: Shape, width: int, gradients: int, held: Held, around: _Around) -> Part:
    """Attention by a backend that keeps no scores, its products, and the add-norm."""
    own, whole = shape.own * width, shape.tokens * width
    kept = held.kept + 2 * own  # and the sum and the result of the add-norm
    copies = whole * (shape.batch > 1) + own if shape.cut else 0  # of the output, cut for the ranks; and this rank's
    after = held.kept + whole + copies
    inside = max(held.forward, after, kept + own) + around.forward + around.kept
    # backward: of the add-norm; of the output's product, whose gradient is gathered; of attention itself
    gathered = held.kept + own + (2 * whole if shape.cut else 0)
    again = held.kept + own + around.again + (whole if shape.cut else 0)
    attended = held.backward + own + around.forward + gradients
    backward = max(kept + 2 * own, gathered, again, attended) + around.kept
    return Part(name, kept + around.kept, max(around.entry, inside), backward, gradients)


def _memory(name: str, shape: Shape, heads: int, width: int, vectors: int, dropout: float, around: _Around) -> Part:
    """A softmax of its own over `vectors` persistent vectors for each of `heads` heads, together `width` wide."""
    T, a = shape.tokens, shape.tokens * heads * vectors
    softmaxes = a + (a + shape.mask(a) if dropout else 0)
    # q and y; keys and values, which matmul copies for every stream unless there is one head; backward makes their
    # gradients stream by stream
    own = vectors * width
    linear = 2 * T * width + 2 * own * (shape.batch if heads > 1 else 1)
    forward = max(softmaxes + a, 5 * a if dropout else 3 * a) + linear + around.entered
    backward = softmaxes + 2 * a + linear + shape.batch * own + 2 * around.entered
    return Part(f"{name} memory", softmaxes + linear, max(around.entry, forward), backward, 0)


def _feed_forward(name: str, shape: Shape, units: int, dropout: float, around: _Around) -> Part:
    """U·ReLU(V x + b) + c; the result of ReLU is kept, dropped or not."""
    size = shape.tokens * units
    kept = size + (size + shape.mask(size) if dropout else 0) + around.kept
    forward = kept + size * (3 if dropout else 1) + around.forward
    backward = kept + 2 * size + around.again
    return Part(f"{name} feed-forward", kept, max(around.entry, forward), backward, 0)


def embedding(model: ModelConfig, shape: Shape, tables: Sequence[int], gradients: int) -> Part:
    """Look-up, and dropout of what it gives. tables: elements of this rank's part of each table."""
    size, own = shape.tokens * model.hidden_size, shape.own * model.hidden_size
    kept = own + (shape.mask(own) if model.embedding_dropout else 0) + _projections(model, shape)
    # backward of tied tables, one at a time: the look-up's gradient, to be added to the output's, which is there
    tied = 0 if model.untie_embeddings_and_output_weights else max(tables)
    return Part("embedding", kept, kept + 3 * size, kept + 3 * size + tied + gradients, gradients)


def output(model: ModelConfig, shape: Shape, tables: Sequence[tuple[int, int, int]], gradients: int, tied: int) -> Part:
    """Softmaxes over the vocabulary. tables: tokens, this rank's rows and width of each table of logits, in order.

    There is one copy of the logits, until all products of backward are done.
    """
    T, D = shape.tokens, model.hidden_size
    logits = [shape.wide(tokens * rows) for tokens, rows, _ in tables]
    copy = 0 if shape.element == FLOAT else max(tokens * rows for tokens, rows, _ in tables)  # in half precision
    hidden = sum(tokens for tokens, *_ in tables) * D + _projections(model, shape)
    if model.embedding_dropout:
        hidden += shape.own * D + shape.mask(shape.own * D)
    kept = sum(logits) + hidden
    weights = sum(rows * width for _, rows, width in tables)
    return Part("output", kept, kept + copy, kept + copy + weights + 2 * T * D, gradients, tied)


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


def check_cluster_tokens(cluster_tokens: Sequence[int], num_clusters: int, tokens: int) -> None:
    """Raises ValueError: they are not how many of `tokens` are in each cluster."""
    if len(cluster_tokens) != num_clusters or sum(cluster_tokens) != tokens:
        raise ValueError(f"cluster_tokens {list(cluster_tokens)}: {num_clusters} clusters share {tokens} tokens")
