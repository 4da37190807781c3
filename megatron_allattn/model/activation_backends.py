"""What the attention backends that keep no scores hold of a layer, and their scratch memory (see activations.py)."""

import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.interface import BlockState, LayerWeights
from megatron_allattn.kernels.registry import make_blocked
from megatron_allattn.model.activation_shapes import FLOAT, Held, Layer, Shape
from megatron_allattn.model.attention import attention_settings
from megatron_allattn.parallel.layout import padded_share
from megatron_allattn.parallel.random import DropoutKeys


def blocked_attention(model: ModelConfig, shape: Shape, layer: Layer, selective: bool) -> Held:
    """Of the blocked backend, without its scratch memory (`blocked_scratch`)."""
    T, D = shape.tokens, model.hidden_size
    joint = model.persistent_memory_size if model.variant == "all-attn" else 0
    narrow = model.num_context_heads // shape.ranks * model.head_size
    projections, vectors = 3 * T * narrow, 2 * joint * narrow  # q, k and v; persistent vectors times their scales
    kept = T * narrow + vectors + (0 if selective else projections)  # and y
    # backward: gradients of the block and y, of q, k and v, and of the scaled vectors
    return Held(kept, vectors + T * narrow + projections, vectors + 2 * projections + T * D + T * narrow + vectors)


ALIGNMENT, PROGRAMS = 16, 512  # of kernels/triton_layout.py and triton_launch.py, which load triton
VECTORS = {4: (16, 64), 2: (32, 64)}  # rows and vectors of a tile of the persistent gradient, by bytes of an element


def triton_attention(model: ModelConfig, shape: Shape, layer: Layer, selective: bool) -> Held:
    """Of the triton backend: `_Attend` of kernels/triton_attention.py, tensor by tensor.

    k and v are there of all that a head sees, cached positions included, and "packed" tensors have an element for every
    row and distance of every head: so both grow with the spans.
    """
    T, D, size, heads = shape.tokens, model.hidden_size, model.head_size, len(layer.look_back)
    joint = model.persistent_memory_size if model.variant == "all-attn" else 0
    narrow, padded = heads * size, [padded_share(span, ALIGNMENT) * ALIGNMENT for span in layer.look_back]
    kv = 2 * size * (T * heads + shape.batch * sum(padded))
    q = y = T * narrow
    scaled = stacked = 2 * joint * narrow  # persistent vectors, times their scales and side by side
    weights, positions, packed = 2 * narrow * D, max(padded) * size, T * sum(padded)
    row_sums, wide = shape.wide(T * heads), shape.wide(T * narrow)
    shared = model.position_values == "shared"  # then y is added up in float32
    kept = scaled + y + row_sums + (0 if selective else q + kv)
    between = positions + stacked + packed
    forward = scaled + q + kv + max(weights, between + row_sums + (wide + y if shared else y))

    base = scaled + q + kv + y + row_sums + y + between  # once more y: its gradient
    rows = packed + wide + 2 * row_sums  # gradients of scores and q, and two numbers a row
    vectors = _persistent_parts(shape, heads, joint) * shape.wide(stacked)
    positions_gradient = shape.wide(shape.batch * max(padded) * size)
    inside = base + rows + positions_gradient + max(q + kv + vectors + shape.wide(stacked), positions_gradient)
    # of the block, and of W_k, W_v and W_q
    products = base + shape.wide(max(padded) * size) + q + kv + shape.wide(stacked) + T * D + 2 * weights + narrow * D
    return Held(kept, forward, max(inside, products))


def _persistent_parts(shape: Shape, heads: int, joint: int) -> int:
    """Into how many sums the gradient of persistent vectors is cut (`Launch._persistent_gradient`)."""
    if not joint:
        return 0
    rows, columns = VECTORS[shape.element]
    parts = min(padded_share(PROGRAMS, padded_share(joint, columns) * heads), padded_share(shape.tokens, rows))
    part = padded_share(padded_share(shape.tokens, parts), rows) * rows
    return padded_share(shape.tokens, part)


def blocked_scratch(model: ModelConfig, shape: Shape, longest: int, *, compiled: bool = True) -> int:
    """Elements of the blocked backend's scratch memory, which all layers share: of heads that look back `longest`.

    The backend itself says so, from a pass over tensors without memory. Compiled heads, of CPUs, have memory for every
    thread.
    """
    size = model.head_size
    heads = model.num_context_heads // shape.ranks if compiled else 1  # PyTorch's take turns with the same memory
    joint = model.persistent_memory_size if model.variant == "all-attn" else 0
    dtype = torch.float32 if shape.element == FLOAT else torch.bfloat16

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, device="meta", dtype=dtype, requires_grad=True)

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
    backend = make_blocked(ids.device) if compiled else Blocked(None)
    block = empty(shape.batch, shape.block, model.hidden_size)
    cache = torch.empty(shape.batch, longest, model.hidden_size, device="meta", dtype=dtype)
    backend(block, cache, weights, attention_settings(model), state).sum().backward()
    return backend.scratch_bytes // shape.element
