"""One layer of the network: the attention sublayer and its add-norm (equations 6 to 8 and 14 of the paper).

    z = LayerNorm(x + Attention(x))              and, in the variants that have a feed-forward sublayer,
    y = LayerNorm(z + FeedForward(z))

The residual stream is replicated over the tensor group. A layer reads the hidden states cached before the block and
writes the ones to keep for the next block; it never touches what it has read, so a repeated forward sees the same
input.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext, SelfAttention
from megatron_allattn.model.span import cache_length
from megatron_allattn.parallel.groups import ALONE
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_parameter


class AddNorm(nn.Module):
    """LayerNorm (Ba et al. 2016) of the residual stream and what a sublayer adds, replicated over the tensor group."""

    def __init__(self, name: str, hidden_size: int, fused: FusedOps, eps: float = 1e-5) -> None:
        super().__init__()
        self.fused, self.eps = fused, eps
        shape = (hidden_size,)
        self.weight = logical_parameter(LogicalTensor(f"{name}.weight", shape, None, Init("constant", 1.0)), ALONE)
        self.bias = logical_parameter(LogicalTensor(f"{name}.bias", shape, None, Init("constant", 0.0)), ALONE)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fused.add_norm(x, y, self.weight, self.bias, self.eps)


class Block(nn.Module):
    """Hidden states [B, M, D] → [B, M, D]; caches hidden states under its layer index.

    feed_forward: (hidden states [B, M, D], dropout keys or None) → [B, M, D]. recompute: keep the layer's input alone
    and compute the layer again in backward; dropout comes from keys and the cache is written once, so to the same bits.
    """

    def __init__(
        self,
        attention: SelfAttention,
        hidden_size: int,
        fused: FusedOps,
        feed_forward: nn.Module | None = None,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        name = f"layers.{attention.layer}"
        self.attention, self.norm1 = attention, AddNorm(f"{name}.norm1", hidden_size, fused)
        self.feed_forward, self.recompute = feed_forward, recompute
        self.norm2 = AddNorm(f"{name}.norm2", hidden_size, fused) if feed_forward is not None else None

    def forward(self, hidden: Tensor, position_key: Tensor, context: BlockContext) -> Tensor:
        layer, max_span = self.attention.layer, self.attention.settings.max_span
        cached = context.cache.read(layer)
        keep = cache_length(context.windows[layer], max_span)
        context.cache.write(layer, _last(cached, hidden.detach(), keep))
        inputs = (hidden, cached, position_key, context)
        if self.recompute and torch.is_grad_enabled():
            # Without an early stop, since ZeRO 3 gives up a module's weights only when its forward is over.
            return checkpoint(self._sublayers, *inputs, use_reentrant=False, preserve_rng_state=False, early_stop=False)
        return self._sublayers(*inputs)

    def _sublayers(self, hidden: Tensor, cached: Tensor, position_key: Tensor, context: BlockContext) -> Tensor:
        hidden = self.norm1(hidden, self.attention(hidden, cached, position_key, context))
        if self.feed_forward is not None and self.norm2 is not None:
            hidden = self.norm2(hidden, self.feed_forward(hidden, context.dropout_keys))
        return hidden


def _last(cached: Tensor, hidden: Tensor, keep: int) -> Tensor:
    """The last `keep` positions of both, [B, keep, D] (or all), in memory of their own: no view of something longer."""
    dropped = max(0, cached.shape[1] + hidden.shape[1] - keep)
    return torch.cat([cached[:, dropped:], hidden[:, max(0, dropped - cached.shape[1]) :]], dim=1)
