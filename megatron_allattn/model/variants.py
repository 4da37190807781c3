"""Layers beyond all-attention: the standard transformer's feed-forward sublayer, the paper's baseline."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_allattn.config import ModelConfig
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.kernels.interface import AttentionSettings
from megatron_allattn.kernels.registry import backend
from megatron_allattn.model.attention import AllAttention
from megatron_allattn.model.block import Block
from megatron_allattn.parallel.collectives import copy_to_shards
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_allattn.parallel.logical import Init


class FeedForward(nn.Module):
    """U·ReLU(V x + b) + c (equation 5 of the paper), [B, M, D] → [B, M, D]; its units are cut over the tensor group."""

    def __init__(self, name: str, hidden_size: int, size: int, group: Group) -> None:
        super().__init__()
        self.group = group
        inner, outer = Init("uniform", 1.0 / math.sqrt(hidden_size)), Init("uniform", 1.0 / math.sqrt(size))
        self.inner = ColumnParallelLinear(f"{name}.in", hidden_size, size, group, inner, bias=True)
        self.outer = RowParallelLinear(f"{name}.out", size, hidden_size, group, outer, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.relu(self.inner(copy_to_shards(x, self.group))))


def build_block(config: ModelConfig, layer: int, group: Group, fused: FusedOps) -> Block:
    """Layer number `layer` of the network that `config` describes."""
    settings = AttentionSettings(
        max_span=config.max_attention_span,
        ramp=config.span_ramp,
        position_values=config.position_values,
        empty_cache=config.empty_cache,
        dropout=config.attention_dropout,
    )
    attention = AllAttention(
        layer=layer,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        persistent_memory_size=config.persistent_memory_size,
        adaptive_span=config.adaptive_span,
        settings=settings,
        span_loss=config.span_loss,
        attend=backend("eager"),
        group=group,
    )
    feed_forward = (
        FeedForward(f"layers.{layer}.ff", config.hidden_size, config.feed_forward_size, group)
        if config.feed_forward_size
        else None
    )
    return Block(attention, config.hidden_size, fused, feed_forward)
