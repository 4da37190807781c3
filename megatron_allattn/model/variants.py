"""The variants of the paper's ablation (its section 5.3 and Figure 2), and which layer each configuration has.

    all-attn      attention.AllAttention: one softmax over context and persistent vectors
    attn-split    two softmaxes, one over the context and one over the persistent vectors; outputs are added
    head-split    even heads attend to the context only, odd ones to their persistent vectors only
    single-head   as attn-split, but one set of N persistent vectors of width d for all heads together
    ff-attn       attention over the context, then softmax attention to vectors of width d as a sublayer of its own
    transformer   attention over the context, then a ReLU feed-forward sublayer: the baseline
    N = 0         attention over the context and nothing else

A variant overrides what becomes of the queries before W_o, or gives the layer a second sublayer; everything else is
shared. Attention over the context is the backend's in all of them.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_allattn.config import ModelConfig, Recompute
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.model.attention import AllAttention, OverContext, SelfAttention, memory_of_heads
from megatron_allattn.model.block import Block
from megatron_allattn.model.persistent import PersistentMemory, attend_to_memory
from megatron_allattn.parallel.collectives import gather_shards, sum_to_shards
from megatron_allattn.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_allattn.parallel.logical import Init
from megatron_allattn.parallel.products import linear
from megatron_allattn.parallel.random import DropoutKeys, Site
from megatron_allattn.parallel.residual import Residual


class AttnSplit(SelfAttention):
    """The softmax of equation 13 as two: over the context only and over the persistent vectors only."""

    def __init__(self, config: ModelConfig, layer: int, attend: Attend, residual: Residual) -> None:
        super().__init__(config, layer, attend, residual)
        self.persistent = memory_of_heads(config, layer, config.num_attention_heads, self.group)

    def local_heads(
        self, hidden: Tensor, over_context: OverContext, weights: LayerWeights, state: BlockState
    ) -> Tensor:
        # The backend projects the queries once more: d² of more than 4d² + 2Nd products, and no backend need know.
        query = linear(hidden, weights.query)
        persistent = _read(self.persistent, query, state.heads, self.settings, state)
        return over_context(hidden, weights, state) + persistent


class HeadSplit(SelfAttention):
    """Even heads attend to the context only, odd heads to their N persistent vectors only.

    An even head and the odd one behind it stay together, so that every tensor-parallel rank has as many of both.
    """

    def __init__(self, config: ModelConfig, layer: int, attend: Attend, residual: Residual) -> None:
        super().__init__(config, layer, attend, residual)
        self.head_size = config.head_size
        self.persistent = memory_of_heads(
            config, layer, config.num_attention_heads - config.num_context_heads, self.group
        )

    def local_heads(
        self, hidden: Tensor, over_context: OverContext, weights: LayerWeights, state: BlockState
    ) -> Tensor:
        even, odd = weights.query.unflatten(0, (-1, 2, self.head_size)).unbind(1)
        context = over_context(hidden, replace(weights, query=even.flatten(0, 1)), state)
        query = linear(hidden, odd.flatten(0, 1))
        persistent = _read(self.persistent, query, state.heads + 1, self.settings, state)
        pairs = [y.unflatten(-1, (-1, self.head_size)) for y in (context, persistent)]
        return torch.stack(pairs, dim=3).flatten(2)


class SingleHead(SelfAttention):
    """One set of N persistent vectors of width d; its query is the heads' queries side by side, its output is added to
    their outputs side by side, before W_o.

    The vectors are cut over the tensor group: queries are gathered, every rank reads its vectors for all columns, and
    the sum over ranks goes back to each rank's columns.
    """

    def __init__(self, config: ModelConfig, layer: int, attend: Attend, residual: Residual) -> None:
        super().__init__(config, layer, attend, residual)
        size = config.persistent_memory_size
        name = f"layers.{layer}.persistent"
        self.persistent = PersistentMemory(name, 1, config.hidden_size, size, self.group, cut_vectors=True)

    def local_heads(
        self, hidden: Tensor, over_context: OverContext, weights: LayerWeights, state: BlockState
    ) -> Tensor:
        query = gather_shards(linear(hidden, weights.query), self.group, dim=-1)  # projected twice, as in AttnSplit
        head = torch.zeros_like(state.heads[:1])
        persistent = _read(self.persistent, query, head, self.settings, state)
        return over_context(hidden, weights, state) + sum_to_shards(persistent, self.group, dim=-1)


def _read(
    memory: PersistentMemory, query: Tensor, heads: Tensor, settings: AttentionSettings, state: BlockState
) -> Tensor:
    """`attend_to_memory` with attention dropout, for the memory's logical `heads` on this rank."""

    def dropout(a: Tensor) -> Tensor:
        if state.dropout_keys is None:
            return a
        columns = memory.first + torch.arange(a.shape[-1], dtype=torch.int32, device=a.device)
        return state.dropout_keys.attention_dropout(a, state.layer, heads, columns, settings.dropout)

    return attend_to_memory(memory, query, dropout)


class FeedForward(nn.Module):
    """U·ReLU(V x + b) + c (equation 5 of the paper): what entered [B, M, D] → the residual stream. Its units are cut
    over the tensor group."""

    def __init__(self, config: ModelConfig, layer: int, residual: Residual) -> None:
        super().__init__()
        group = residual.group
        self.layer, self.dropout = layer, config.feed_forward_dropout
        name, hidden, size = f"layers.{layer}.ff", config.hidden_size, config.feed_forward_size
        inner, outer = Init("uniform", 1.0 / math.sqrt(hidden)), Init("uniform", 1.0 / math.sqrt(size))
        self.inner = ColumnParallelLinear(f"{name}.in", hidden, size, group, inner, bias=True)
        self.outer = RowParallelLinear(f"{name}.out", size, hidden, residual, outer, bias=True)
        self.first = group.rank * (size // group.size)

    def forward(self, x: Tensor, keys: DropoutKeys | None) -> Tensor:
        units = self.inner(x).relu()
        if keys is not None:
            units = keys.dropout(units, Site.FEED_FORWARD, self.dropout, layer=self.layer, first_channel=self.first)
        return self.outer(units)


class SoftmaxFeedForward(nn.Module):
    """U·softmax(V x) (equation 9 of the paper), what entered [B, M, D] → the residual stream: the persistent vectors
    of one head of width d, with x itself for the query. V = k', U = √N·v'. They are cut over the tensor group.
    """

    def __init__(self, config: ModelConfig, layer: int, residual: Residual) -> None:
        super().__init__()
        self.layer, self.residual, self.dropout = layer, residual, config.feed_forward_dropout
        name, size = f"layers.{layer}.ff.persistent", config.feed_forward_size
        self.persistent = PersistentMemory(name, 1, config.hidden_size, size, residual.group, cut_vectors=True)

    def forward(self, x: Tensor, keys: DropoutKeys | None) -> Tensor:
        def dropout(a: Tensor) -> Tensor:
            if keys is None:
                return a
            first = self.persistent.first
            return keys.dropout(
                a[:, 0], Site.FEED_FORWARD, self.dropout, layer=self.layer, first_channel=first
            ).unsqueeze(1)

        return self.residual.leave(attend_to_memory(self.persistent, x, dropout))


_ATTENTION: dict[str, type[SelfAttention]] = {
    "all-attn": AllAttention,
    "attn-split": AttnSplit,
    "head-split": HeadSplit,
    "single-head": SingleHead,
}
_FEED_FORWARD: dict[str, type[FeedForward] | type[SoftmaxFeedForward]] = {
    "ff-attn": SoftmaxFeedForward,
    "transformer": FeedForward,
}


def build_block(
    config: ModelConfig, layer: int, residual: Residual, fused: FusedOps, attend: Attend, recompute: Recompute = "none"
) -> Block:
    """Layer number `layer` of the network that `config` describes. recompute: see `Network`."""
    kind = _ATTENTION[config.variant] if config.persistent_memory_size else SelfAttention
    attention = kind(config, layer, attend, residual)
    attention.settings = replace(attention.settings, keep_projections=recompute != "selective")
    sublayer = _FEED_FORWARD.get(config.variant)
    feed_forward = sublayer(config, layer, residual) if sublayer is not None else None
    return Block(attention, config.hidden_size, residual, fused, feed_forward, recompute=recompute == "full")
