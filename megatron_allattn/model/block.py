"""One layer of the network: the attention sublayer and its add-norm (equations 6 to 8 and 14 of the paper).

    z = LayerNorm(x + Attention(x))              and, in the variants that have a feed-forward sublayer,
    y = LayerNorm(z + FeedForward(z))

The residual stream is replicated over the tensor group. A layer reads the hidden states cached before the block and
writes the ones to keep for the next block; it never touches what it has read, so a repeated forward sees the same
input.
"""

import torch
from torch import Tensor, nn

from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext, SelfAttention
from megatron_allattn.model.span import cache_length
from megatron_allattn.parallel.groups import ALONE
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_parameter


class LayerNorm(nn.Module):
    """LayerNorm over the hidden dimension (Ba et al. 2016), replicated over the tensor group."""

    def __init__(self, name: str, hidden_size: int, fused: FusedOps, eps: float = 1e-5) -> None:
        super().__init__()
        self.fused, self.eps = fused, eps
        shape = (hidden_size,)
        self.weight = logical_parameter(LogicalTensor(f"{name}.weight", shape, None, Init("constant", 1.0)), ALONE)
        self.bias = logical_parameter(LogicalTensor(f"{name}.bias", shape, None, Init("constant", 0.0)), ALONE)

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.layer_norm(x, self.weight, self.bias, self.eps)


class Block(nn.Module):
    """Hidden states [B, M, D] → [B, M, D]; caches hidden states under its layer index.

    feed_forward: (hidden states [B, M, D], dropout keys or None) → [B, M, D].
    """

    def __init__(
        self, attention: SelfAttention, hidden_size: int, fused: FusedOps, feed_forward: nn.Module | None = None
    ) -> None:
        super().__init__()
        name = f"layers.{attention.layer}"
        self.attention, self.norm1 = attention, LayerNorm(f"{name}.norm1", hidden_size, fused)
        self.feed_forward = feed_forward
        self.norm2 = LayerNorm(f"{name}.norm2", hidden_size, fused) if feed_forward is not None else None

    def forward(self, hidden: Tensor, position_key: Tensor, context: BlockContext) -> Tensor:
        layer, max_span = self.attention.layer, self.attention.settings.max_span
        cached = context.cache.read(layer)
        keep = cache_length(context.windows[layer], max_span)
        context.cache.write(layer, _last(cached, hidden.detach(), keep))
        hidden = self.norm1(hidden + self.attention(hidden, cached, position_key, context))
        if self.feed_forward is not None and self.norm2 is not None:
            hidden = self.norm2(hidden + self.feed_forward(hidden, context.dropout_keys))
        return hidden


def _last(cached: Tensor, hidden: Tensor, keep: int) -> Tensor:
    """The last `keep` positions of both, [B, keep, D] (or all), in memory of their own: no view of something longer."""
    dropped = max(0, cached.shape[1] + hidden.shape[1] - keep)
    return torch.cat([cached[:, dropped:], hidden[:, max(0, dropped - cached.shape[1]) :]], dim=1)
