"""What every attention backend computes, and from what.

    s_tc = q_t · (k_c + u_{t−c})          for the W positions c before t
    s_ti = q_t · k'_i                     for the N persistent vectors (already scaled by √d_h)
    ã    = softmax over both sets of s / √d_h, times m_z(t − c) on the context
    a    = dropout(ã / (Σ ã + 1e-8))                           normalization "window": the paper's code
    a    = dropout(softmax over both sets of s / √d_h + log m_z(t − c))        normalization "span"
    y_t  = Σ_c a_tc (v_c [+ u_{t−c}]) + Σ_i a_ti v'_i          (v' already scaled by √N)

(equations 12 and 13 of the paper, with the span mask of its section 4.3 and the details of its published code.) The two
normalizations differ by the 1e-8 alone; but for it the window would not matter, and only without it can the work
follow each head's span. A token attends to the positions before it, never to itself. Which positions are projected for
which head is a backend's business; today's K and V of cached positions are always made from cached hidden states with
today's weights.

Without persistent vectors only the context is attended to. That is N = 0, and also how the variants that keep the two
apart (model/variants.py) use a backend: it needs to know nothing of them, except that `heads` may have gaps.

Shape letters: B streams, M block, C cached positions, W window, D hidden size, H local heads, K head size, N persistent
vectors, L maximum span.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_allattn.parallel.products import widen
from megatron_allattn.parallel.random import DropoutKeys


@dataclass(frozen=True)
class LayerWeights:
    """One layer's local weights. `query`, `key`, `value` [H·K, D]; `persistent_key` [H, K, N] and `persistent_value`
    [H, N, K], scaled, or both None; `span` z [H, 1, 1] or None for a fixed span; `position_key` u [1, K, L],
    column j for the distance L − j."""

    query: Tensor
    key: Tensor
    value: Tensor
    persistent_key: Tensor | None
    persistent_value: Tensor | None
    span: Tensor | None
    position_key: Tensor

    @property
    def num_vectors(self) -> int:
        """N."""
        return 0 if self.persistent_key is None else self.persistent_key.shape[2]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the fields, as an autograd function takes and returns them."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def widened(self) -> "LayerWeights":
        """In the type in which they are multiplied."""
        return self.split([None if tensor is None else widen(tensor) for tensor in self.tensors()])[0]

    @classmethod
    def split(cls, tensors: Sequence[Any]) -> "tuple[LayerWeights, Sequence[Any]]":
        """The inverse of `tensors` on the first of `tensors`, and the rest."""
        count = len(fields(cls))
        return cls(*tensors[:count]), tensors[count:]


@dataclass(frozen=True)
class AttentionSettings:
    """What never changes during a run. max_span L and ramp R in tokens; dropout: probability on attention weights;
    normalization: see above, of no effect where spans are fixed; keep_projections: whether a backend that recomputes
    may keep q, k and v for its backward pass, or makes them anew there too."""

    max_span: int
    ramp: int
    position_values: Literal["none", "shared"]
    empty_cache: Literal["attend", "mask"]
    dropout: float
    normalization: Literal["span", "window"]
    keep_projections: bool = True


@dataclass(frozen=True)
class BlockState:
    """What changes from call to call.

    window: W, the number of positions before a token that are looked at, equal on all ranks; cached: how many of the
    cache's last positions hold tokens (the rest, and whatever the cache is too short for, are zeros); heads: int32
    [H], the logical ids of the local heads; layer: its index; dropout_keys: None when evaluating; spans: for each local
    head the distance up to which its mask or the mask's gradient is not zero, at most W, known to the host (`look_back`
    of model/span.py), None where that is not known: then the window's end.
    """

    window: int
    cached: int
    heads: Tensor
    layer: int
    dropout_keys: DropoutKeys | None
    spans: tuple[int, ...] | None = None


def distances_seen(adaptive: bool, settings: AttentionSettings, state: BlockState) -> tuple[int, ...]:
    """For each head the longest distance that its output depends on: its span, or the layer's window, where that is
    all that is known or the normalization looks at all of it."""
    if state.spans is None or (adaptive and settings.normalization == "window"):
        return (state.window,) * len(state.heads)
    return state.spans


def span_slope(span: Tensor, distances: Tensor, max_span: int, ramp: int) -> Tensor:
    """(R + z·L + 1 − x) / R, the span mask before its clamp, for z [H, 1, 1] and distances x [W] ≥ 1; [H, 1, W]."""
    return (ramp + 1 - distances + span * max_span) / ramp


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type of masks and sums: float32, or what is wider."""
    return dtype if dtype == torch.float64 else torch.float32


# With normalization "span", the mask's gradient where it is 0 is a softmax weight that no mask has made small:
# e^(score − log Σ e^…) of what is hidden, against what is seen. Its exponent is at most this in every backend: what is
# larger moves a span as far as the clip lets it, and must not become infinite.
LARGEST_HIDDEN = 40 * math.log(2.0)


def span_mask(span: Tensor, distances: Tensor, max_span: int, ramp: int) -> Tensor:
    """m_z(x) = clamp((R + z·L + 1 − x) / R, 0, 1) for z [H, 1, 1] and distances x [W] ≥ 1; [H, 1, W].

    The clamp passes gradient at both ends, as the paper's code does: at z = 0 the distance R + 1 has m = 0 and a
    gradient.
    """
    return span_slope(span, distances, max_span, ramp).clamp(0, 1)


def check_shapes(block: Tensor, cache: Tensor, weights: LayerWeights, state: BlockState) -> None:
    """Refuse shapes that no backend could mean. Raises ValueError naming the tensor."""
    batch, _, hidden = block.shape
    if cache.shape[0] != batch or cache.shape[2] != hidden:
        raise ValueError(f"cache {tuple(cache.shape)}: a block {tuple(block.shape)} needs [{batch}, C, {hidden}]")
    heads, size = len(state.heads), weights.position_key.shape[1]
    if weights.query.shape != torch.Size((heads * size, hidden)):
        raise ValueError(
            f"query weight {tuple(weights.query.shape)}: {heads} heads of {size} need [{heads * size}, {hidden}]"
        )
    if not 0 < state.window <= weights.position_key.shape[2]:
        raise ValueError(f"window {state.window}: it must be in 1 … {weights.position_key.shape[2]}, the maximum span")
    if state.spans is not None and (
        len(state.spans) != heads or not 0 < min(state.spans) <= max(state.spans) <= state.window
    ):
        raise ValueError(f"spans {state.spans}: {heads} heads need one each, in 1 … {state.window}, the window")
