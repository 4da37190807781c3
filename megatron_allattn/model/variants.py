"""Layers beyond all-attention: the standard transformer's feed-forward sublayer, the paper's baseline."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

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
