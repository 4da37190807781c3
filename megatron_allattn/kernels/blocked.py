"""Work that follows every head's own span, on any device, with no score matrix kept: `--attention-backend blocked`.

Heads are computed apart, each over its own S positions (`BlockState.spans`), in tiles that stay in cache memory: one
row buffer [R, S + N] holds the scores of both sets, so that one softmax covers them. The span mask depends on the
distance alone and becomes a bias log m (where m is 0 its gradient is a term of its own, `Columns.edges`); with
normalization `window` S is the window for every head, and the mask multiplies. The backward pass computes the weights a
second time instead of keeping them; of the forward pass it keeps at most q, k and v of the block
(`keep_projections`). On a CPU where there is a compiler the heads are C++, one thread for each (compiled_heads.py);
elsewhere they are PyTorch's operators (blocked_heads.py).
"""

import ctypes
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_allattn.kernels.band import tiling
from megatron_allattn.kernels.blocked_call import BlockedCall, Heads, Projected
from megatron_allattn.kernels.blocked_heads import TorchHeads
from megatron_allattn.kernels.compiled_heads import CompiledHeads, can_compute
from megatron_allattn.kernels.counts import ScoreCounts
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights, check_shapes
from megatron_allattn.kernels.workspace import Workspace
from megatron_allattn.parallel.products import widen
from megatron_allattn.parallel.random import keep_scale


class Blocked:
    """The backend; its scratch memory is shared by all layers that use the same object, which is for one thread at a
    time.

    library: of `load_library`, None where there is none or PyTorch's heads are wanted; about: what it says of it.
    `scored` counts what its heads compute.
    """

    def __init__(self, library: ctypes.CDLL | None, about: str = "heads of PyTorch") -> None:
        self.workspace, self._library, self.about = Workspace(), library, about
        self.scored = ScoreCounts()

    @property
    def scratch_bytes(self) -> int:
        """The scratch memory of the largest call so far."""
        return self.workspace.num_bytes

    def heads(self, call: BlockedCall) -> Heads:
        """The compiled ones, if they can do it."""
        if self._library is not None and can_compute(call):
            return CompiledHeads(self._library, call)
        return TorchHeads(call)

    def __call__(
        self,
        block_BMD: Tensor,
        cache_BCD: Tensor,
        weights: LayerWeights,
        settings: AttentionSettings,
        state: BlockState,
    ) -> Tensor:
        check_shapes(block_BMD, cache_BCD, weights, state)
        return _Attend.apply(block_BMD, cache_BCD, *weights.tensors(), (self, settings, state))


def project(block: Tensor, weights: LayerWeights) -> Projected:
    """Of a block [B, M, D]."""
    rows = block.flatten(0, 1)
    q, k, v = (rows @ weight.t() for weight in (weights.query, weights.key, weights.value))
    q *= 1.0 / math.sqrt(weights.position_key.shape[1])
    return Projected(q, k, v)


def whole_tiles(block: Tensor) -> Tensor:
    """The block with zeros behind it, so that tiles divide its length."""
    tiles, tile = tiling(block.shape[1])
    missing = tiles * tile - block.shape[1]
    return F.pad(block, (0, 0, 0, missing)) if missing else block


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, cache: Tensor, *rest: Any) -> Tensor:
        *tensors, (backend, settings, state) = rest
        weights, whole = LayerWeights(*tensors).widened(), whole_tiles(widen(block))
        projected = project(whole, weights)
        call = BlockedCall(whole, widen(cache), weights, settings, state, backend.workspace, scored=backend.scored)
        y = backend.heads(call).forward(projected)
        y *= _dropout_scale(settings, state)
        ctx.call = backend, settings, state
        kept = (projected.q, projected.k, projected.v) if settings.keep_projections else ()
        ctx.save_for_backward(block, cache, *tensors, *kept)
        return y.unflatten(0, whole.shape[:2])[:, : block.shape[1]].to(block.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        block, cache, *saved = ctx.saved_tensors
        backend, settings, state = ctx.call
        weights, kept = LayerWeights.split(saved)
        weights, whole = weights.widened(), whole_tiles(widen(block))
        projected = Projected(*kept) if kept else project(whole, weights)
        call = BlockedCall(whole, widen(cache), weights, settings, state, backend.workspace, scored=backend.scored)
        grads = call.zero_gradients()
        dy = whole_tiles(widen(dy)).flatten(0, 1) * _dropout_scale(settings, state)
        of = backend.heads(call).backward(projected, dy, grads)
        of.q.mul_(1.0 / math.sqrt(call.size))
        rows = whole.flatten(0, 1)
        dblock = torch.mm(of.q, weights.query).addmm_(of.k, weights.key).addmm_(of.v, weights.value)
        results = (
            dblock.unflatten(0, whole.shape[:2])[:, : block.shape[1]],
            None,
            of.q.t() @ rows,
            grads.key.addmm_(of.k.t(), rows),
            grads.value.addmm_(of.v.t(), rows),
            grads.persistent_key,
            grads.persistent_value,
            call.columns.span_gradient(grads.columns, grads.edges),
            grads.position_key,
        )
        return *(None if gradient is None else gradient.to(block.dtype) for gradient in results), None


def _dropout_scale(settings: AttentionSettings, state: BlockState) -> float:
    """What kept weights are multiplied by."""
    return 1.0 if state.dropout_keys is None else keep_scale(settings.dropout)
