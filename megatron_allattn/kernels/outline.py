"""Attention without arithmetic, for tensors without memory: `attend` of which shapes alone are real.

It refuses the shapes that a backend refuses, keeps until backward what `blocked` keeps (block, cache, weights, and q, k
and v unless they are to be made again), and gives every input that has one a gradient of its shape and type. What a
rank calls around attention is thereby what it calls with `blocked` or `triton`, in a tenth of the time that their own
pass over tensors without memory takes.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights, check_shapes


def attend(
    block_BMD: Tensor, cache_BCD: Tensor, weights: LayerWeights, settings: AttentionSettings, state: BlockState
) -> Tensor:
    """Of the local heads' outputs before W_o their shape, [B, M, H·K]. Raises ValueError as backends do."""
    check_shapes(block_BMD, cache_BCD, weights, state)
    heads, size = len(state.heads), weights.position_key.shape[1]
    expected = {
        "key weight": (weights.key, (heads * size, block_BMD.shape[2])),
        "value weight": (weights.value, (heads * size, block_BMD.shape[2])),
        "persistent keys": (weights.persistent_key, (heads, size, weights.num_vectors)),
        "persistent values": (weights.persistent_value, (heads, weights.num_vectors, size)),
        "spans": (weights.span, (heads, 1, 1)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)}: {heads} heads of {size} need {list(shape)}")
    return _Outline.apply(block_BMD, cache_BCD, *weights.tensors(), settings.keep_projections)


class _Outline(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, cache: Tensor, *rest: Any) -> Tensor:
        *tensors, keeps = rest
        outputs = block.new_empty(*block.shape[:2], tensors[0].shape[0])
        kept = [torch.empty_like(outputs) for _ in range(3 if keeps else 0)]
        ctx.count = 2 + len(tensors)
        ctx.save_for_backward(block, cache, *tensors, *kept)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors[: ctx.count]
        needed = zip(given, ctx.needs_input_grad, strict=False)
        return *(torch.empty_like(one) if needs else None for one, needs in needed), None
