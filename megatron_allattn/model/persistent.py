"""Persistent vectors: N learned key/value pairs per head that do not depend on the input (section 4.2 of the paper).

They take the place of the feed-forward sublayer. k' ~ N(0, 1/K) and v' ~ N(0, 1/N) are stored unscaled and multiplied
by √K and √N when used (K: head size), so that they start with the unit variance of context vectors while the
learning rate acts on small numbers. Heads, and their persistent vectors with them, are cut over the tensor group.
"""

import math

from torch import Tensor, nn

from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_parameter


class PersistentMemory(nn.Module):
    """`forward` → scaled keys √K·k' [H_local, K, N] and scaled values √N·v' [H_local, N, K]."""

    def __init__(self, name: str, num_heads: int, head_size: int, size: int, group: Group) -> None:
        super().__init__()
        self.key_scale, self.value_scale = math.sqrt(head_size), math.sqrt(size)
        key_init, value_init = Init("normal", 1.0 / self.key_scale), Init("normal", 1.0 / self.value_scale)
        self.key = logical_parameter(LogicalTensor(f"{name}.key", (num_heads, head_size, size), 0, key_init), group)
        self.value = logical_parameter(
            LogicalTensor(f"{name}.value", (num_heads, size, head_size), 0, value_init), group
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.key * self.key_scale, self.value * self.value_scale
