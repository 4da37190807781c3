"""The type in which matrices are multiplied: their own, or float32 on a CPU without instructions for bfloat16.

There PyTorch multiplies bfloat16 matrices about a hundred times slower than float32 ones (docs/performance.md). Copies
in float32 hold the same numbers, and a product of them is rounded once, as instructions for bfloat16 do, which add in
float32 too. Half precision on such a machine saves memory between layers, not time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 that PyTorch uses (oneDNN: AVX-512 and later, some of Arm's)."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_type(tensor: Tensor) -> torch.dtype:
    """In which `tensor` is multiplied where it is."""
    half = tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"
    return torch.float32 if half and not multiplies_bfloat16() else tensor.dtype


def widen(tensor: Tensor) -> Tensor:
    """The tensor in its `product_type`; itself, where that is its own."""
    return tensor.to(product_type(tensor))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, [..., in] → [..., out], for weight [out, in] and bias [out]; rounded to the type of x."""
    if product_type(x) == x.dtype:
        return F.linear(x, weight, bias)
    return _Widened.apply(x, weight, bias)


class _Widened(torch.autograd.Function):
    """What is kept for the backward pass is what was given, not its copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return F.linear(widen(x), widen(weight), None if bias is None else widen(bias)).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        wide = widen(dy)
        rows = wide.flatten(0, -2)
        return (
            (wide @ widen(weight)).to(x.dtype),
            (rows.t() @ widen(x).flatten(0, -2)).to(weight.dtype),
            None if bias is None else rows.sum(dim=0).to(bias.dtype),
        )
