"""How far heads look back: the learned span, the window and cache length that follow from it, the span loss.

Each head of an adaptive layer learns one number z ∈ [0, 1] (Sukhbaatar et al. 2019a, *Adaptive attention span*). Its
mask m_z(x) is 1 up to a distance of z·L + 1, falls to 0 over a ramp of R tokens, and is 0 beyond.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.logical import Init, LayerHeads, LogicalTensor, logical_parameter

CHUNK = 64  # windows grow in steps of this many tokens, and a cache keeps one step more than its window


class AdaptiveSpan(nn.Module):
    """z of this rank's heads, [H_local, 1, 1], cut over heads; starts at 0. The optimizer clamps it to [0, 1].

    `forward` returns a copy: under ZeRO 3 a parameter's storage is gone once its module's forward is over.
    """

    def __init__(self, name: str, num_heads: int, group: Group, heads: LayerHeads | None = None) -> None:
        super().__init__()
        self.z = logical_parameter(LogicalTensor(name, (num_heads, 1, 1), 0, Init("constant", 0.0), heads), group)

    def forward(self) -> Tensor:
        return self.z.clone()


def window_length(z_max: float, max_span: int, ramp: int) -> int:
    """W: the positions before a token that a layer looks at when its longest head has z_max.

    W = L − 64·⌊(L − min(L, ⌈z_max·L⌉ + R)) / 64⌋, as in the paper's code.
    """
    longest = min(max_span, math.ceil(z_max * max_span) + ramp)
    return max_span - CHUNK * ((max_span - longest) // CHUNK)


def cache_length(window: int, max_span: int) -> int:
    """Positions a layer keeps for the next block: one step more than today's window, so that a span may grow."""
    return min(max_span, window + CHUNK)


def look_back(z: float, window: int, max_span: int, ramp: int) -> int:
    """The distance up to which a head's mask, or the mask's gradient, is not zero: min(W, ⌈z·L⌉ + R + 1).

    z·L is rounded as the mask itself rounds it in float32, so that its last distance is never cut off.
    """
    reach = max(math.ceil(z * max_span), math.ceil(torch.tensor(z, dtype=torch.float32).mul(max_span).item()))
    return min(window, reach + ramp + 1)


def layer_windows(z: Sequence[Sequence[float]], max_span: int, ramp: int) -> tuple[int, ...]:
    """W of every layer; z: of all heads of each."""
    return tuple(window_length(max(layer), max_span, ramp) for layer in z)


def layers_look_back(
    z: Sequence[Sequence[float]], windows: Sequence[int], max_span: int, ramp: int
) -> tuple[tuple[int, ...], ...]:
    """`look_back` of heads of every layer in its window."""
    return tuple(
        tuple(look_back(head, window, max_span, ramp) for head in layer)
        for layer, window in zip(z, windows, strict=True)
    )


def window_of_reach(longest: int, max_span: int) -> int:
    """W of a layer from the `look_back` of its longest head."""
    return max_span - CHUNK * ((max_span - longest + 1) // CHUNK)


def span_in_tokens(z: Tensor, max_span: int, ramp: int) -> Tensor:
    """How many tokens a head looks back, ramp included: min(L, z·L + R), the number the paper's code logs."""
    return (z.double() * max_span + ramp).clamp(max=max_span)


class _AddSpanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, z: Tensor, gradient: float) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device, ctx.gradient = z.shape, z.dtype, z.device, gradient
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # float16's loss scale may make it too large: infinite then, as any gradient, where `full` would refuse
        wide = torch.full(ctx.shape, ctx.gradient, dtype=torch.float64, device=ctx.device)
        return grads[0], wide.to(ctx.dtype), None


def add_span_loss(hidden: Tensor, z: Tensor, gradient: float) -> Tensor:
    """`hidden` unchanged; in backward each z of the layer gets `gradient` added.

    The span loss, coefficient · L · (mean of z over the layer's heads), is linear in z, so its gradient is the constant
    coefficient · L / H; a node on the hidden states adds it in every stage and under every engine. `gradient` carries
    whatever the engine scales the main loss by.
    """
    return _AddSpanLoss.apply(hidden, z, gradient)
