"""Work that follows every head's own span, on any device, with no score matrix kept: `--attention-backend blocked`.

Heads are computed one after the other, each over its own S positions (`BlockState.spans`), in tiles that stay in cache
memory: one row buffer [R, S + N] holds the scores of both sets, so that one softmax covers them. The span mask depends
on the distance alone and becomes a bias log m; with normalization `window` S is the window for every head, and the mask
multiplies. The backward pass computes the weights a second time instead of keeping them; of the forward pass it keeps
at most q, k and v of the block (`keep_projections`).
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.kernels.blocked_heads import Gradients, Heads
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights, check_shapes
from megatron_allattn.kernels.workspace import Workspace


class Blocked:
    """The backend; its scratch memory is shared by all layers that use the same object."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    @property
    def scratch_bytes(self) -> int:
        """The scratch memory of the largest call so far."""
        return self._workspace.num_bytes

    def __call__(
        self,
        block_BMD: Tensor,
        cache_BCD: Tensor,
        weights: LayerWeights,
        settings: AttentionSettings,
        state: BlockState,
    ) -> Tensor:
        check_shapes(block_BMD, cache_BCD, weights, state)
        return _Attend.apply(
            block_BMD,
            cache_BCD,
            weights.query,
            weights.key,
            weights.value,
            weights.persistent_key,
            weights.persistent_value,
            weights.span,
            weights.position_key,
            (self._workspace, settings, state),
        )


def project(block: Tensor, weights: LayerWeights) -> list[Tensor]:
    """q (divided by √K), k and v of the local heads, each [B·M, H·K]."""
    rows = block.flatten(0, 1)
    q, k, v = (rows @ weight.t() for weight in (weights.query, weights.key, weights.value))
    q *= 1.0 / math.sqrt(weights.position_key.shape[1])
    return [q, k, v]


def outputs(heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All heads' outputs, [B·M, H·K], from what `project` gives."""
    y = torch.empty_like(q)
    for index, columns in heads.columns():
        heads.select(index, q[:, columns], k[:, columns], v[:, columns])
        heads.forward(y[:, columns])
    return y


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, cache: Tensor, *rest: Any) -> Tensor:
        *tensors, call = rest
        weights = LayerWeights(*tensors)
        q, k, v = project(block, weights)
        y = outputs(Heads(block, cache, weights, *call), q, k, v)
        ctx.call = call
        _, settings, _ = call
        ctx.save_for_backward(block, cache, *tensors, *((q, k, v) if settings.keep_projections else ()))
        return y.unflatten(0, block.shape[:2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        block, cache, *saved = ctx.saved_tensors
        count = len(LayerWeights.__dataclass_fields__)
        weights = LayerWeights(*saved[:count])
        q, k, v = saved[count:] or project(block, weights)
        rows, dy = block.flatten(0, 1), dy.flatten(0, 1)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        heads, grads = Heads(block, cache, weights, *ctx.call), Gradients.of(weights)
        for index, columns in heads.columns():
            heads.select(index, q[:, columns], k[:, columns], v[:, columns])
            heads.backward(dy[:, columns], dq[:, columns], dk[:, columns], dv[:, columns], grads)
        dq *= 1.0 / math.sqrt(weights.position_key.shape[1])
        block_grad = torch.mm(dq, weights.query).addmm_(dk, weights.key).addmm_(dv, weights.value)
        for gradient, outer in ((grads.query, dq), (grads.key, dk), (grads.value, dv)):
            gradient.addmm_(outer.t(), rows)
        return block_grad.view_as(block), None, *grads.cast(weights), None
