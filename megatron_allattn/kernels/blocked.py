"""Work that follows every head's own span, on any device, with no score matrix kept: `--attention-backend blocked`.

Heads are computed one after the other, each over its own S positions (`BlockState.spans`), in tiles that stay in cache
memory: one row buffer [R, S + N] holds the scores of both sets, so that one softmax covers them. The span mask depends
on the distance alone and becomes a bias log m; with normalization `window` S is the window for every head, and the mask
multiplies. The backward pass computes the weights a second time instead of keeping them; of the forward pass it keeps
at most q, k and v of the block (`keep_projections`). Between matrix products, passes over rows make weights of scores:
compiled ones on a CPU where there is a compiler, PyTorch's otherwise.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_allattn.kernels.band import tiling
from megatron_allattn.kernels.blocked_heads import Gradients, Heads
from megatron_allattn.kernels.compiled import TYPES, CompiledPasses
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights, check_shapes
from megatron_allattn.kernels.memory import memory_weight
from megatron_allattn.kernels.passes import Passes, TorchPasses
from megatron_allattn.kernels.workspace import Workspace
from megatron_allattn.parallel.random import keep_scale


class Blocked:
    """The backend; its scratch memory is shared by all layers that use the same object.

    compiled: passes of `load_passes`, None where there are none or PyTorch's are wanted; about: what it says of them.
    """

    def __init__(self, compiled: CompiledPasses | None, about: str = "passes of PyTorch") -> None:
        self._workspace, self._compiled, self.about = Workspace(), compiled, about

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
        passes = choose_passes(self._compiled, self._workspace, block_BMD, weights, settings)
        return _Attend.apply(block_BMD, cache_BCD, *weights.tensors(), (self._workspace, passes, settings, state))


def choose_passes(
    compiled: CompiledPasses | None,
    workspace: Workspace,
    block: Tensor,
    weights: LayerWeights,
    settings: AttentionSettings,
) -> Passes:
    """The compiled ones, if they can do it."""
    multiplies = weights.span is not None and settings.normalization == "window"
    known = block.device.type in ("cpu", "meta") and block.dtype in TYPES
    if compiled is None or multiplies or not known:
        return TorchPasses(workspace)
    return compiled


@dataclass(frozen=True)
class Projected:
    """q (divided by √K) [B·M, H·K] of the local heads, and k beside v of each of them [B·M, H·2·K]."""

    q: Tensor
    kv: Tensor


def project(block: Tensor, weights: LayerWeights, memory: Tensor) -> Projected:
    """Of a block [B, M, D], with `memory_weight`."""
    rows = block.flatten(0, 1)
    q = rows @ weights.query.t()
    q *= 1.0 / math.sqrt(weights.position_key.shape[1])
    return Projected(q, rows @ memory.flatten(0, 1).t())


def whole_tiles(block: Tensor) -> Tensor:
    """The block with zeros behind it, so that tiles divide its length."""
    tiles, tile = tiling(block.shape[1])
    missing = tiles * tile - block.shape[1]
    return F.pad(block, (0, 0, 0, missing)) if missing else block


def outputs(heads: Heads, projected: Projected) -> Tensor:
    """All heads' outputs, [B·M, H·K], without the scale of dropout."""
    y = torch.empty_like(projected.q)
    for index in range(heads.count):
        heads.select(index, projected.q, projected.kv)
        heads.forward(y)
    return y


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, cache: Tensor, *rest: Any) -> Tensor:
        *tensors, call = rest
        *_, settings, state = call
        weights = LayerWeights(*tensors)
        whole, memory = whole_tiles(block), memory_weight(weights)
        projected = project(whole, weights, memory)
        y = outputs(Heads(whole, cache, weights, memory, *call), projected)
        y *= dropout_scale(settings, state)
        ctx.call = call
        kept = (projected.q, projected.kv) if settings.keep_projections else ()
        ctx.save_for_backward(block, cache, *tensors, *kept)
        return y.unflatten(0, whole.shape[:2])[:, : block.shape[1]]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        block, cache, *saved = ctx.saved_tensors
        *_, settings, state = ctx.call
        weights, kept = LayerWeights.split(saved)
        whole, memory = whole_tiles(block), memory_weight(weights)
        projected = Projected(*kept) if kept else project(whole, weights, memory)
        rows = whole.flatten(0, 1)
        dy = whole_tiles(dy).flatten(0, 1) * dropout_scale(settings, state)
        dq, dkv = torch.empty_like(projected.q), torch.empty_like(projected.kv)
        heads, grads = Heads(whole, cache, weights, memory, *ctx.call), Gradients.of(weights, memory)
        for index in range(heads.count):
            heads.select(index, projected.q, projected.kv)
            heads.backward(dy, dq, dkv, grads)
        dq *= 1.0 / math.sqrt(weights.position_key.shape[1])
        dblock = torch.mm(dq, weights.query).addmm_(dkv, memory.flatten(0, 1))
        grads.memory.flatten(0, 1).addmm_(dkv.t(), rows)
        dkey, dvalue = (part.flatten(0, 1) for part in grads.memory.chunk(2, dim=1))
        return (
            dblock.unflatten(0, whole.shape[:2])[:, : block.shape[1]],
            None,
            dq.t() @ rows,
            dkey,
            dvalue,
            grads.persistent_key,
            grads.persistent_value,
            heads.span_gradient(),
            grads.position_key.to(block.dtype),
            None,
        )


def dropout_scale(settings: AttentionSettings, state: BlockState) -> float:
    """What kept weights are multiplied by."""
    return 1.0 if state.dropout_keys is None else keep_scale(settings.dropout)
