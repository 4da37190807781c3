"""The readable truth: the equations of `interface.py` line by line, every head over the layer's whole window.

It follows the paper's published code to rounding: the 1e-8 of the renormalization, the zero positions of an empty or
short cache that are attended to, the window. Scores take [B, H, M, W + N] memory; faster backends must agree with it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_allattn.kernels.interface import (
    LARGEST_HIDDEN,
    AttentionSettings,
    BlockState,
    LayerWeights,
    check_shapes,
    span_mask,
    wide_type,
)
from megatron_allattn.parallel.products import widen


def attend(
    block_BMD: Tensor,
    cache_BCD: Tensor,
    weights: LayerWeights,
    settings: AttentionSettings,
    state: BlockState,
) -> Tensor:
    """The local heads' outputs before W_o, [B, M, H·K], for a block and the hidden states cached before it."""
    check_shapes(block_BMD, cache_BCD, weights, state)
    own, window, weights = block_BMD.dtype, state.window, weights.widened()
    block_BMD, memory_BSD = _widened(block_BMD, cache_BCD, window)
    a = _weights(block_BMD, memory_BSD, cache_BCD.shape[1], weights, settings, state)
    a = _dropout(a, settings, state).to(block_BMD.dtype)

    v_BHSK = _split_heads(F.linear(memory_BSD, weights.value), len(state.heads))
    position_KW = weights.position_key[0, :, -window:]
    a_context = a[..., :window]
    y_BHMK = _from_distance(a_context) @ v_BHSK
    if settings.position_values == "shared":
        y_BHMK = y_BHMK + a_context @ position_KW.transpose(0, 1)
    if weights.persistent_value is not None:
        y_BHMK = y_BHMK + a[..., window:] @ weights.persistent_value
    return y_BHMK.transpose(1, 2).flatten(2).to(own)


def attention_weights(
    block_BMD: Tensor,
    cache_BCD: Tensor,
    weights: LayerWeights,
    settings: AttentionSettings,
    state: BlockState,
) -> Tensor:
    """a before dropout, [B, H, M, W + N]: over the context by distance W, W − 1, …, 1, then the persistent vectors."""
    check_shapes(block_BMD, cache_BCD, weights, state)
    block_BMD, memory_BSD = _widened(block_BMD, cache_BCD, state.window)
    return _weights(block_BMD, memory_BSD, cache_BCD.shape[1], weights.widened(), settings, state)


def _weights(
    block_BMD: Tensor,
    memory_BSD: Tensor,
    cache_length: int,
    weights: LayerWeights,
    settings: AttentionSettings,
    state: BlockState,
) -> Tensor:
    """`attention_weights` from what is widened."""
    window, num_heads = state.window, len(state.heads)
    q_BHMK = _split_heads(F.linear(block_BMD, weights.query), num_heads)
    k_BHSK = _split_heads(F.linear(memory_BSD, weights.key), num_heads)
    position_KW = weights.position_key[0, :, -window:]

    scores = _to_distance(q_BHMK @ k_BHSK.transpose(-1, -2), window) + q_BHMK @ position_KW
    if weights.persistent_key is not None:
        scores = torch.cat([scores, q_BHMK @ weights.persistent_key], dim=-1)
    scores = scores / math.sqrt(q_BHMK.shape[-1])
    empty = _empty(settings, state, cache_length, scores)
    if weights.span is None:
        return _softmax(scores, empty)
    wide = wide_type(scores.dtype)
    distances = _distances(window, scores).to(wide)
    mask = span_mask(weights.span.to(wide), distances, settings.max_span, settings.ramp)
    weigh = _mask_and_renormalize if settings.normalization == "window" else _masked_softmax
    return weigh(scores, mask, empty)


def _widened(block_BMD: Tensor, cache_BCD: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """A block in the type of products, once, and what it attends to, [B, W + M, D]."""
    block_BMD = widen(block_BMD)
    return block_BMD, torch.cat([fit_cache(widen(cache_BCD), window), block_BMD], dim=1)


def fit_cache(cache_BCD: Tensor, window: int) -> Tensor:
    """The cache's last `window` positions [B, W, D]; positions that were never cached are zeros, in front."""
    length = cache_BCD.shape[1]
    return cache_BCD[:, length - window :] if length >= window else F.pad(cache_BCD, (0, 0, window - length, 0))


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, S, H·K] → [B, H, S, K]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _to_distance(scores: Tensor, window: int) -> Tensor:
    """[..., M, W + M] by memory index → [..., M, W] by distance: row m keeps columns m … m + W − 1.

    Row-major, element (m, m + j) sits at m·(W + M + 1) + j: appending M zeros makes that a plain view.
    """
    block = scores.shape[-2]
    return F.pad(scores.flatten(-2), (0, block)).unflatten(-1, (block, window + block + 1))[..., :window]


def _from_distance(a: Tensor) -> Tensor:
    """[..., M, W] by distance → [..., M, W + M] by memory index, zero elsewhere: the inverse of `_to_distance`."""
    block, window = a.shape[-2:]
    return F.pad(a, (0, block + 1)).flatten(-2)[..., :-block].unflatten(-1, (block, window + block))


def _distances(window: int, like: Tensor) -> Tensor:
    """The distance t − c of each window column: W, W − 1, …, 1."""
    return torch.arange(window, 0, -1, device=like.device)


def _empty(settings: AttentionSettings, state: BlockState, cache_length: int, scores: Tensor) -> Tensor | None:
    """[M, W + N] True where the position before the block holds no token; None where zeros are attended to."""
    if settings.empty_cache == "attend":
        return None
    cached = min(state.cached, cache_length)
    queries = torch.arange(scores.shape[-2], device=scores.device)[:, None]
    empty = _distances(state.window, scores) > queries + cached
    return F.pad(empty, (0, scores.shape[-1] - state.window), value=False)


def _softmax(scores: Tensor, empty: Tensor | None) -> Tensor:
    """Softmax over the last dimension in float32 or wider; zero where `empty`, even in a row that is all empty."""
    dtype = wide_type(scores.dtype)
    if empty is None:
        return scores.softmax(dim=-1, dtype=dtype)
    # The lowest finite number instead of −∞ keeps a row without any column free of NaN, in both directions.
    masked = scores.masked_fill(empty, torch.finfo(scores.dtype).min)
    return masked.softmax(dim=-1, dtype=dtype).masked_fill(empty, 0.0)


def _mask_and_renormalize(scores: Tensor, mask: Tensor, empty: Tensor | None) -> Tensor:
    """Normalization "window": the softmax over all of the window times the mask [H, 1, W], made to sum to 1."""
    a, window = _softmax(scores, empty), mask.shape[-1]
    a = torch.cat([a[..., :window] * mask, a[..., window:]], dim=-1)
    return a / (a.sum(dim=-1, keepdim=True) + 1e-8)


def _masked_softmax(scores: Tensor, mask: Tensor, empty: Tensor | None) -> Tensor:
    """Normalization "span": the softmax of score + log mask [H, 1, W].

    Where the mask is 0 the logarithm has no gradient, but the weight e·m / Σ e·m has: e / Σ e·m there, which
    `LARGEST_HIDDEN` bounds, at the expense of all other weights. It is added as a term that is 0.
    """
    window, hidden = mask.shape[-1], mask == 0
    log_mask = mask.masked_fill(hidden, 1.0).log().masked_fill(hidden, -torch.inf)
    masked = torch.cat([scores[..., :window] + log_mask, scores[..., window:].to(mask.dtype)], dim=-1)
    a = _softmax(masked, empty)
    if empty is not None:
        masked = masked.masked_fill(empty, -torch.inf)
        hidden = hidden & ~empty[:, :window]
    exponents = scores[..., :window].to(mask.dtype) - masked.logsumexp(dim=-1, keepdim=True)
    unmasked = exponents.clamp(max=LARGEST_HIDDEN).exp().masked_fill(~hidden, 0.0).detach()
    ends = F.pad(unmasked * mask, (0, scores.shape[-1] - window))
    return a + ends - a.detach() * ends.sum(dim=-1, keepdim=True)


def _dropout(a: Tensor, settings: AttentionSettings, state: BlockState) -> Tensor:
    """Dropout on the weights [B, H, M, W + N], from keys; kept ones are divided by the keep rate."""
    if state.dropout_keys is None:
        return a
    columns = torch.arange(-state.window, a.shape[-1] - state.window, dtype=torch.int32, device=a.device)
    return state.dropout_keys.attention_dropout(a, state.layer, state.heads, columns, settings.dropout)
