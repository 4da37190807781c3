"""Column- and row-parallel linear layers (Megatron-LM, Shoeybi et al. 2019, section 3).

column   y = x Wᵀ + b   rows of W (output channels) are cut: y is sharded, x replicated; no communication here,
                        the caller passes x through `copy_to_shards` once for all the products that share it
row      y = x Wᵀ + b   columns of W (input channels) are cut: x is sharded, the partial products are summed by one
                        all-reduce, b is replicated and added once after it
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_allattn.parallel.collectives import sum_over_shards
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_parameter


class ColumnParallelLinear(nn.Module):
    """[..., in] → [..., out / parts]. Weight [out, in] and bias [out] are cut over their first dimension."""

    def __init__(self, name: str, in_size: int, out_size: int, group: Group, init: Init, bias: bool) -> None:
        super().__init__()
        self.weight = logical_parameter(LogicalTensor(f"{name}.weight", (out_size, in_size), 0, init), group)
        self.bias = logical_parameter(LogicalTensor(f"{name}.bias", (out_size,), 0, init), group) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """[..., in / parts] → [..., out], summed over the group. Weight [out, in] is cut over its second dimension."""

    def __init__(self, name: str, in_size: int, out_size: int, group: Group, init: Init, bias: bool) -> None:
        super().__init__()
        self.group = group
        self.weight = logical_parameter(LogicalTensor(f"{name}.weight", (out_size, in_size), 1, init), group)
        self.bias = logical_parameter(LogicalTensor(f"{name}.bias", (out_size,), None, init), group) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = sum_over_shards(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias
