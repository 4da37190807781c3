"""Attention in Triton kernels, for NVIDIA GPUs from compute capability 8.0: `--attention-backend triton`.

Every head walks over its own positions and its persistent vectors, in one online softmax; nothing beyond its span is
computed. Products take operands of the block's type and add up in float32. Kept for the backward pass are q, k, v (or
not: `keep_projections`), y and one number per row; what has an element per row and distance lives only during a call.
The position term meets the scores by distance, not by position: position logits are computed for themselves, with the
logarithm of the span mask in them, and read skewed; in float16 where operands have 16 bits, so that they are as fine as
the operands or finer.

It computes normalization "span" of interface.py, and bit for bit the dropout masks of every backend. All sums have a
fixed order: equal calls give equal bits.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_allattn.kernels.interface import (
    AttentionSettings,
    BlockState,
    LayerWeights,
    check_shapes,
    distances_seen,
)
from megatron_allattn.kernels.triton_launch import Launch, Tiles, choose_tiles
from megatron_allattn.kernels.triton_layout import (
    Packing,
    kv_gradients,
    position_columns,
    position_rows,
    project_kv,
    stack_vectors,
)


class Triton:
    """The backend. tiles: by default those of `choose_tiles`."""

    def __init__(self, tiles: Tiles | None = None) -> None:
        self._tiles = tiles

    def __call__(
        self,
        block_BMD: Tensor,
        cache_BCD: Tensor,
        weights: LayerWeights,
        settings: AttentionSettings,
        state: BlockState,
    ) -> Tensor:
        check_shapes(block_BMD, cache_BCD, weights, state)
        return _Attend.apply(block_BMD, cache_BCD, *weights.tensors(), (self._tiles, settings, state))


def _launch(
    block: Tensor,
    cache: Tensor,
    weights: LayerWeights,
    tiles: Tiles | None,
    settings: AttentionSettings,
    state: BlockState,
) -> Launch:
    """Raises ValueError for a normalization that the kernels do not have."""
    adaptive, size = weights.span is not None, weights.position_key.shape[1]
    if adaptive and settings.normalization != "span":
        raise ValueError(
            f"--attention-backend triton: it has no --span-normalization {settings.normalization}; choose blocked"
        )
    batch, length = block.shape[:2]
    packing = Packing(distances_seen(adaptive, settings, state), batch, length, block.device)
    keys = None
    if state.dropout_keys is not None and settings.dropout > 0:
        queries = torch.arange(length, dtype=torch.int32, device=block.device)
        keys = state.dropout_keys.attention_rows(state.layer, state.heads, queries).transpose(1, 2).contiguous()
    return Launch(
        tiles=tiles or choose_tiles(size, block.dtype),
        settings=settings,
        packing=packing,
        size=size,
        # rounded as the mask of interface.py rounds it, so that both agree on where it ends
        reach=None if weights.span is None else weights.span.flatten().float() * settings.max_span,
        cached=min(state.cached, cache.shape[1]) if settings.empty_cache == "mask" else packing.longest,
        keys=keys,
    )


def _project(block: Tensor, cache: Tensor, weights: LayerWeights, launch: Launch) -> tuple[Tensor, Tensor]:
    """q [B·M, H·K], and k and v of the positions that each head sees."""
    return block.flatten(0, 1) @ weights.query.t(), project_kv(block, cache, weights, launch.packing)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, cache: Tensor, *rest: Any) -> Tensor:
        *tensors, call = rest
        weights = LayerWeights(*tensors)
        launch = _launch(block, cache, weights, *call)
        q, kv = _project(block, cache, weights, launch)
        positions = position_rows(weights.position_key, launch.packing.longest)
        y, lse = launch.forward(q, kv, launch.between(q, positions, stack_vectors(weights, launch.packing)))
        y = y.view(*block.shape[:2], -1)
        ctx.launch = launch
        ctx.save_for_backward(block, cache, *tensors, y, lse, *((q, kv) if launch.settings.keep_projections else ()))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        block, cache, *saved = ctx.saved_tensors
        (weights, (y, lse, *kept)), launch = LayerWeights.split(saved), ctx.launch
        q, kv = kept or _project(block, cache, weights, launch)
        positions = position_rows(weights.position_key, launch.packing.longest)
        between = launch.between(q, positions, stack_vectors(weights, launch.packing))
        grads = launch.backward(q, kv, y, lse, dy.contiguous(), between)
        dblock, dkey, dvalue = kv_gradients(grads.kv, block, cache, weights, launch.packing)
        dblock.addmm_(grads.q, weights.query)
        dpersistent_key = dpersistent_value = dspan = None
        if weights.persistent_key is not None:
            vectors = grads.persistent.to(block.dtype)
            dpersistent_key, dpersistent_value = vectors[:, :, : launch.size].mT, vectors[:, :, launch.size :]
        if weights.span is not None and grads.span is not None:
            dspan = grads.span.to(weights.span.dtype).view_as(weights.span)
        return (
            dblock.view_as(block),
            None,
            grads.q.t() @ block.flatten(0, 1),
            dkey,
            dvalue,
            dpersistent_key,
            dpersistent_value,
            dspan,
            position_columns(grads.positions, weights.position_key),
            None,
        )
