"""One layer of the network: the attention sublayer and its add-norm (equations 6 to 8 and 14 of the paper).

    z = LayerNorm(x + Attention(x))              and, in the variants that have a feed-forward sublayer,
    y = LayerNorm(z + FeedForward(z))

The residual stream lies over the tensor group as parallel/residual.py says; caches hold whole positions. A layer reads
the hidden states cached before the block and writes the ones to keep for the next block; it never touches what it has
read, so a repeated forward sees the same input.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext, SelfAttention
from megatron_allattn.model.span import cache_length
from megatron_allattn.parallel.groups import ALONE
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_parameter
from megatron_allattn.parallel.residual import Residual


class AddNorm(nn.Module):
    """LayerNorm (Ba et al. 2016) of the residual stream and what a sublayer adds; its weights are replicated over the
    tensor group."""

    def __init__(
        self, name: str, hidden_size: int, fused: FusedOps, residual: Residual | None = None, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.fused, self.residual, self.eps = fused, residual or Residual(ALONE), eps
        shape = (hidden_size,)
        self.weight = logical_parameter(LogicalTensor(f"{name}.weight", shape, None, Init("constant", 1.0)), ALONE)
        self.bias = logical_parameter(LogicalTensor(f"{name}.bias", shape, None, Init("constant", 0.0)), ALONE)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, bias = self.residual.replicated(self.weight, self.bias)
        return self.fused.add_norm(x, y, weight, bias, self.eps)


class Block(nn.Module):
    """The residual stream before the layer → behind it; caches hidden states under its layer index.

    feed_forward: (what entered [B, M, D], dropout keys or None) → the residual stream. recompute: keep the layer's
    input alone and compute the layer again in backward; dropout comes from keys and the cache is written once, so to
    the same bits.
    """

    def __init__(
        self,
        attention: SelfAttention,
        hidden_size: int,
        residual: Residual,
        fused: FusedOps,
        feed_forward: nn.Module | None = None,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        name = f"layers.{attention.layer}"
        self.attention, self.norm1 = attention, AddNorm(f"{name}.norm1", hidden_size, fused, residual)
        self.residual, self.feed_forward, self.recompute = residual, feed_forward, recompute
        self.norm2 = AddNorm(f"{name}.norm2", hidden_size, fused, residual) if feed_forward is not None else None

    def forward(self, hidden: Tensor, position_key: Tensor, context: BlockContext) -> Tensor:
        inputs = (hidden, position_key, context)
        if self.recompute and torch.is_grad_enabled():
            # Without an early stop, since ZeRO 3 gives up a module's weights only when its forward is over.
            return checkpoint(self._sublayers, *inputs, use_reentrant=False, preserve_rng_state=False, early_stop=False)
        return self._sublayers(*inputs)

    def _sublayers(self, hidden: Tensor, position_key: Tensor, context: BlockContext) -> Tensor:
        layer, cache = self.attention.layer, context.cache
        entered, cached = self.residual.enter(hidden), cache.read(layer)
        if not cache.written(layer):  # it is where a layer is computed again
            keep = cache_length(context.windows[layer], self.attention.settings.max_span)
            cache.write(layer, _last(cached, entered.detach(), keep))
        of_cache = [(cached, partial(cache.read, layer))] if context.reread_caches else []
        with self._made_again(hidden, entered, of_cache):
            attended = self.attention(entered, cached, position_key, context)
        hidden = self.norm1(hidden, attended)
        if self.feed_forward is not None and self.norm2 is not None:
            entered = self.residual.enter(hidden)
            with self._made_again(hidden, entered):
                fed = self.feed_forward(entered, context.dropout_keys)
            hidden = self.norm2(hidden, fed)
        return hidden

    def _made_again(
        self, hidden: Tensor, entered: Tensor, others: Sequence["_Source"] = ()
    ) -> AbstractContextManager[None]:
        """Inside, autograd keeps neither what entered from a cut stream nor the `others`, but how to make them."""
        sources = list(others)
        if self.residual.sequence_parallel:
            sources.append((entered, partial(self.residual.enter, hidden.detach())))
        return nullcontext() if self.recompute or not sources else _MadeAgain(sources)


_Source = tuple[Tensor, Callable[[], Tensor]]  # a tensor, and what makes the same once more


class _MadeAgain(torch.autograd.graph.saved_tensors_hooks):
    """Has autograd keep a source's function where it would keep the tensor, or another shape of it."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        known = {_memory(tensor): make for tensor, make in sources if tensor.numel()}

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            make = known.get(_memory(tensor)) if tensor.is_contiguous() else None
            # an operation that keeps its own result would otherwise be in a cycle, which holds all of a step's memory
            return tensor.detach() if make is None else partial(_make, make, tensor.shape)

        def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
            return kept if isinstance(kept, Tensor) else kept()

        super().__init__(pack, unpack)


def _memory(tensor: Tensor) -> tuple[int, int, int]:
    """Which elements of which memory a contiguous tensor is; tensors that have none (device meta) differ too."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


def _make(make: Callable[[], Tensor], shape: torch.Size) -> Tensor:
    return make().view(shape)


def _last(cached: Tensor, hidden: Tensor, keep: int) -> Tensor:
    """The last `keep` positions of both, [B, keep, D] (or all), in memory of their own: no view of something longer."""
    dropped = max(0, cached.shape[1] + hidden.shape[1] - keep)
    return torch.cat([cached[:, dropped:], hidden[:, max(0, dropped - cached.shape[1]) :]], dim=1)
