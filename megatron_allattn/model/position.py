"""Relative position embeddings u, one table for all heads and all layers (as in the paper's code).

Column j of u [1, K, L] belongs to the distance L − j; the last column is one step back. Every tensor-parallel rank
holds all of u and uses it for its own heads, in every layer: the layers' contributions to its gradient add up first
and are then summed over the ranks by a single all-reduce.
"""

from torch import Tensor, nn

from megatron_allattn.parallel.collectives import copy_to_shards
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_parameter


class PositionEmbedding(nn.Module):
    """`forward` → u [1, K, L] for all layers of a stage, ~ N(0, 1) at the start.

    It returns a copy: under ZeRO 3 a parameter's storage is gone once its module's forward is over.
    """

    def __init__(self, name: str, head_size: int, max_span: int, group: Group) -> None:
        super().__init__()
        self.group = group
        self.key = logical_parameter(
            LogicalTensor(f"{name}.key", (1, head_size, max_span), None, Init("normal", 1.0)), group
        )

    def forward(self) -> Tensor:
        return copy_to_shards(self.key.clone(), self.group)
