"""The all-attention sublayer: every head attends jointly over its context and its persistent vectors.

Heads are cut over the tensor group: this rank holds the rows of W_q, W_k, W_v, the persistent vectors and the spans of
its heads, and the matching columns of W_o. The block's hidden states enter through one identity/all-reduce node and
leave through the one all-reduce of W_o: one per direction and layer, where a Megatron transformer layer needs two.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.model.persistent import PersistentMemory
from megatron_allattn.model.span import AdaptiveSpan, add_span_loss
from megatron_allattn.parallel.collectives import copy_to_shards
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.linear import RowParallelLinear
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_parameter
from megatron_allattn.parallel.random import DropoutKeys


class HiddenStateCache(Protocol):
    """Hidden states of the positions before a block, per layer. What is written is read from the next block on."""

    @property
    def length(self) -> int:
        """How many tokens of its streams have passed since they started or were restarted."""

    def read(self, layer: int) -> Tensor:
        """[B, C, D], C ≥ 0."""

    def write(self, layer: int, hidden: Tensor) -> None:
        """Keep [B, C', D] for the next block; `hidden` requires no gradient."""


@dataclass(frozen=True)
class BlockContext:
    """Everything a forward pass depends on besides weights and tokens.

    windows: W of every layer of the network; cache: of this batch's streams; dropout_keys: None when evaluating;
    loss_scale: the factor by which the engine scales the main loss's gradient.
    """

    windows: tuple[int, ...]
    cache: HiddenStateCache
    dropout_keys: DropoutKeys | None
    loss_scale: float = 1.0


class AllAttention(nn.Module):
    """Hidden states [B, M, D] and cached ones [B, C, D] → the sublayer's output [B, M, D], replicated.

    span_loss: the coefficient of the span loss, coefficient · L · mean over the layer's heads of z.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        num_heads: int,
        persistent_memory_size: int,
        adaptive_span: bool,
        settings: AttentionSettings,
        span_loss: float,
        attend: Attend,
        group: Group,
    ) -> None:
        super().__init__()
        self.layer, self.settings, self.attend, self.group = layer, settings, attend, group
        name = f"layers.{layer}"
        linear = Init("uniform", 1.0 / math.sqrt(hidden_size))
        square = (hidden_size, hidden_size)
        self.query = logical_parameter(LogicalTensor(f"{name}.query.weight", square, 0, linear), group)
        self.key = logical_parameter(LogicalTensor(f"{name}.key.weight", square, 0, linear), group)
        self.value = logical_parameter(LogicalTensor(f"{name}.value.weight", square, 0, linear), group)
        self.out = RowParallelLinear(f"{name}.out", hidden_size, hidden_size, group, linear, bias=False)
        head_size, local_heads = hidden_size // num_heads, num_heads // group.size
        self.persistent = (
            PersistentMemory(f"{name}.persistent", num_heads, head_size, persistent_memory_size, group)
            if persistent_memory_size
            else None
        )
        self.span = AdaptiveSpan(f"{name}.span", num_heads, group) if adaptive_span else None
        self.span_gradient = span_loss * settings.max_span / num_heads
        heads = torch.arange(group.rank * local_heads, (group.rank + 1) * local_heads, dtype=torch.int32)
        self.register_buffer("heads", heads, persistent=False)

    def forward(self, hidden: Tensor, cached: Tensor, position_key: Tensor, context: BlockContext) -> Tensor:
        persistent_key, persistent_value = self.persistent() if self.persistent is not None else (None, None)
        z = self.span() if self.span is not None else None
        weights = LayerWeights(
            query=self.query,
            key=self.key,
            value=self.value,
            persistent_key=persistent_key,
            persistent_value=persistent_value,
            span=z,
            position_key=position_key,
        )
        state = BlockState(
            window=context.windows[self.layer],
            cached=context.cache.length,
            heads=self.get_buffer("heads"),
            layer=self.layer,
            dropout_keys=context.dropout_keys,
        )
        output = self.out(self.attend(copy_to_shards(hidden, self.group), cached, weights, self.settings, state))
        return output if z is None else add_span_loss(output, z, self.span_gradient * context.loss_scale)
