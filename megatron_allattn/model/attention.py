"""The attention sublayer: over the context alone, and the paper's, over context and persistent vectors together.

Heads are cut over the tensor group: this rank holds the rows of W_q, W_k, W_v, the persistent vectors and the spans of
its heads, and the matching columns of W_o. The block's hidden states enter and leave the sublayer once
(parallel/residual.py): one all-reduce per direction and layer, where a Megatron transformer layer needs two.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_allattn.config import ModelConfig
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.model.persistent import PersistentMemory
from megatron_allattn.model.span import AdaptiveSpan, add_span_loss
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.linear import RowParallelLinear
from megatron_allattn.parallel.logical import Init, LayerHeads, LogicalTensor, in_order, logical_parameter
from megatron_allattn.parallel.random import DropoutKeys
from megatron_allattn.parallel.residual import Residual

OverContext = Callable[[Tensor, LayerWeights, BlockState], Tensor]  # an `Attend` with its cache and settings
Observe = Callable[[Tensor, Tensor, LayerWeights, AttentionSettings, BlockState], None]  # is shown what an `Attend` is


class HiddenStateCache(Protocol):
    """Hidden states of the positions before a block, per layer. What is written is read from the next block on."""

    @property
    def length(self) -> int:
        """How many tokens of its streams have passed since they started or were restarted."""

    def read(self, layer: int) -> Tensor:
        """[B, C, D], C ≥ 0."""

    def written(self, layer: int) -> bool:
        """Whether something is kept for the next block already."""

    def write(self, layer: int, hidden: Tensor) -> None:
        """Keep [B, C', D] for the next block; `hidden` requires no gradient."""


@dataclass(frozen=True)
class BlockContext:
    """Everything a forward pass depends on besides weights and tokens.

    windows: W of every layer of the network; cache: of this batch's streams; dropout_keys: None when evaluating;
    loss_scale: the factor by which the engine scales the main loss's gradient; look_back: how far each local head of
    every layer looks (model/span.py), None: its layer's whole window; attend: the attention backend of this pass, None:
    the network's own; observe: is shown what every layer's backend is given; reread_caches: a cache is read once more
    in backward instead of being kept until then.
    """

    windows: tuple[int, ...]
    cache: HiddenStateCache
    dropout_keys: DropoutKeys | None
    loss_scale: float = 1.0
    look_back: tuple[tuple[int, ...], ...] | None = None
    attend: Attend | None = None
    observe: Observe | None = None
    reread_caches: bool = False


class SelfAttention(nn.Module):
    """Multi-head attention over the context alone (section 3 of the paper), and what all variants of it share.

    Hidden states [B, M, D] (`Residual.enter`) and cached ones [B, C, D] → the sublayer's output, as the residual stream
    holds it. Subclasses override `local_heads`. Where only some heads attend to the context, W_k, W_v and z exist for
    those.
    """

    def __init__(self, config: ModelConfig, layer: int, attend: Attend, residual: Residual) -> None:
        super().__init__()
        group = residual.group
        self.layer, self.attend, self.group = layer, attend, group
        self.settings = attention_settings(config)
        name, size, num_heads = f"layers.{layer}", config.hidden_size, config.num_context_heads
        assert num_heads % group.size == 0
        linear = Init("uniform", 1.0 / math.sqrt(size))
        context_shape, heads = (num_heads * config.head_size, size), LayerHeads(layer, num_heads)
        self.query = logical_parameter(LogicalTensor(f"{name}.query.weight", (size, size), 0, linear, heads), group)
        self.key = logical_parameter(LogicalTensor(f"{name}.key.weight", context_shape, 0, linear, heads), group)
        self.value = logical_parameter(LogicalTensor(f"{name}.value.weight", context_shape, 0, linear, heads), group)
        self.out = RowParallelLinear(f"{name}.out", size, size, residual, linear, bias=False, heads=heads)
        self.span = AdaptiveSpan(f"{name}.span", num_heads, group, heads) if config.adaptive_span else None
        self.span_gradient = config.span_loss * config.max_attention_span / num_heads
        self.every = config.num_attention_heads // num_heads
        self.register_buffer("heads", torch.empty(num_heads // group.size, dtype=torch.int32), persistent=False)
        self.hold(in_order(num_heads, group.size)[group.rank])

    def hold(self, heads: Sequence[int]) -> None:
        """This rank's weights are those of these heads, numbered among the heads that attend to the context."""
        buffer = self.get_buffer("heads")
        buffer.copy_(torch.tensor(heads, dtype=torch.int32, device=buffer.device) * self.every)

    def forward(self, hidden: Tensor, cached: Tensor, position_key: Tensor, context: BlockContext) -> Tensor:
        z = self.span() if self.span is not None else None
        weights = LayerWeights(
            query=self.query,
            key=self.key,
            value=self.value,
            persistent_key=None,
            persistent_value=None,
            span=z,
            position_key=position_key,
        )
        state = BlockState(
            window=context.windows[self.layer],
            cached=context.cache.length,
            heads=self.get_buffer("heads"),
            layer=self.layer,
            dropout_keys=context.dropout_keys,
            spans=None if context.look_back is None else context.look_back[self.layer],
        )
        attend = context.attend or self.attend

        def over_context(block: Tensor, weights: LayerWeights, state: BlockState) -> Tensor:
            if context.observe is not None:
                context.observe(block, cached, weights, self.settings, state)
            return attend(block, cached, weights, self.settings, state)

        output = self.out(self.local_heads(hidden, over_context, weights, state))
        return output if z is None else add_span_loss(output, z, self.span_gradient * context.loss_scale)

    def local_heads(
        self, hidden: Tensor, over_context: OverContext, weights: LayerWeights, state: BlockState
    ) -> Tensor:
        """Outputs of this rank's heads before W_o, [B, M, H·K].

        over_context: attention of the heads that `state` names over the positions before them.
        """
        return over_context(hidden, weights, state)


class AllAttention(SelfAttention):
    """Every head attends jointly over its context and its N persistent vectors (section 4.2, equations 12 and 13)."""

    def __init__(self, config: ModelConfig, layer: int, attend: Attend, residual: Residual) -> None:
        super().__init__(config, layer, attend, residual)
        self.persistent = memory_of_heads(config, layer, config.num_attention_heads, self.group)

    def local_heads(
        self, hidden: Tensor, over_context: OverContext, weights: LayerWeights, state: BlockState
    ) -> Tensor:
        key, value = self.persistent()
        return over_context(hidden, replace(weights, persistent_key=key, persistent_value=value), state)


def attention_settings(config: ModelConfig) -> AttentionSettings:
    """What a backend needs to know of a model."""
    return AttentionSettings(
        max_span=config.max_attention_span,
        ramp=config.span_ramp,
        position_values=config.position_values,
        empty_cache=config.empty_cache,
        dropout=config.attention_dropout,
        normalization=config.span_normalization,
    )


def memory_of_heads(config: ModelConfig, layer: int, num_heads: int, group: Group) -> PersistentMemory:
    """The persistent vectors of `num_heads` heads of a layer, each with its own."""
    name, heads = f"layers.{layer}.persistent", LayerHeads(layer, config.num_context_heads)
    return PersistentMemory(name, num_heads, config.head_size, config.persistent_memory_size, group, heads)
