"""Persistent vectors: N learned key/value pairs per head that do not depend on the input (section 4.2 of the paper).

They take the place of the feed-forward sublayer. k' ~ N(0, 1/K) and v' ~ N(0, 1/N) are stored unscaled and multiplied
by √K and √N when used (K: width of a pair), so that they start with the unit variance of context vectors while the
learning rate acts on small numbers. Over the tensor group heads are cut, and their persistent vectors with them; where
one set of wide vectors serves all heads, the vectors themselves are cut.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_allattn.parallel.collectives import softmax_over_shards
from megatron_allattn.parallel.groups import ALONE, Group
from megatron_allattn.parallel.logical import Init, LayerHeads, LogicalTensor, logical_parameter
from megatron_allattn.parallel.products import product_type, widen


class PersistentMemory(nn.Module):
    """`forward` → scaled keys √K·k' [H, K, N] and scaled values √N·v' [H, N, K], of this rank's heads.

    heads: of a layer, if these are their vectors. cut_vectors: deal the N vectors of every head to the ranks, instead
    of the heads. `sharers` are then the ranks that hold the rest of a head's vectors, and `first` is the index of this
    rank's first one.
    """

    def __init__(
        self,
        name: str,
        num_heads: int,
        width: int,
        size: int,
        group: Group,
        heads: LayerHeads | None = None,
        *,
        cut_vectors: bool = False,
    ) -> None:
        super().__init__()
        assert (size if cut_vectors else num_heads) % group.size == 0
        self.sharers = group if cut_vectors else ALONE
        self.first = self.sharers.rank * (size // self.sharers.size)
        self.key_scale, self.value_scale, self._folded = math.sqrt(width), math.sqrt(size), False
        key_init, value_init = Init("normal", 1.0 / self.key_scale), Init("normal", 1.0 / self.value_scale)
        key, value = (num_heads, width, size), (num_heads, size, width)
        key_dim, value_dim = (2, 1) if cut_vectors else (0, 0)
        self.key = logical_parameter(LogicalTensor(f"{name}.key", key, key_dim, key_init, heads), group)
        self.value = logical_parameter(LogicalTensor(f"{name}.value", value, value_dim, value_init, heads), group)

    def forward(self) -> tuple[Tensor, Tensor]:
        if self._folded:
            return self.key, self.value
        return self.key * self.key_scale, self.value * self.value_scale

    @torch.no_grad()
    def fold_scales(self) -> None:
        """Multiply the scales into the weights, which are then no longer the logical tensors: for inference, where
        scaling the same vectors again for every token would take about a third of its time."""
        assert not self._folded
        self.key.mul_(self.key_scale)
        self.value.mul_(self.value_scale)
        self._folded = True


def attend_to_memory(memory: PersistentMemory, query: Tensor, dropout: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention to persistent vectors alone: y = Σ_i a_i v_i with a = softmax over i of q · k_i / √K.

    query: [B, M, H·K] of the memory's heads on this rank; dropout: acts on a [B, H, M, N], in float32 or wider.
    Returns [B, M, H·K]; where vectors are cut, this rank's part of the sum.
    """
    key_HKN, value_HNK = memory()
    q_BHMK = query.unflatten(-1, (key_HKN.shape[0], -1)).transpose(1, 2)
    scores = widen(q_BHMK) @ widen(key_HKN) / math.sqrt(key_HKN.shape[1])
    a = dropout(softmax_over_shards(scores, memory.sharers)).to(product_type(query))
    return (a @ widen(value_HNK)).transpose(1, 2).flatten(2).to(query.dtype)
