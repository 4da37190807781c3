"""Column- and row-parallel linear layers (Megatron-LM, Shoeybi et al. 2019, section 3).

column   y = x Wᵀ + b   rows of W (output channels) are cut: y is sharded, x replicated; no communication here,
                        the caller lets x enter (residual.py) once for all the products that share it
row      y = x Wᵀ + b   columns of W (input channels) are cut: x is sharded, the partial products are summed as they
                        leave for the residual stream, b is replicated and added once after that
"""

from torch import Tensor, nn

from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.logical import Init, LayerHeads, LogicalTensor, logical_parameter
from megatron_allattn.parallel.products import linear
from megatron_allattn.parallel.residual import Residual


class ColumnParallelLinear(nn.Module):
    """[..., in] → [..., out / parts]. Weight [out, in] and bias [out] are cut over their first dimension."""

    def __init__(self, name: str, in_size: int, out_size: int, group: Group, init: Init, bias: bool) -> None:
        super().__init__()
        self.weight = logical_parameter(LogicalTensor(f"{name}.weight", (out_size, in_size), 0, init), group)
        self.bias = logical_parameter(LogicalTensor(f"{name}.bias", (out_size,), 0, init), group) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """[B, M, in / parts] → the sum over the group [B, M, out] as the residual stream holds it. Weight [out, in] is cut
    over its second dimension. heads: of a layer, whose outputs side by side x is."""

    def __init__(
        self,
        name: str,
        in_size: int,
        out_size: int,
        residual: Residual,
        init: Init,
        bias: bool,
        heads: LayerHeads | None = None,
    ) -> None:
        super().__init__()
        self.residual, group = residual, residual.group
        self.weight = logical_parameter(LogicalTensor(f"{name}.weight", (out_size, in_size), 1, init, heads), group)
        self.bias = logical_parameter(LogicalTensor(f"{name}.bias", (out_size,), None, init), group) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.residual.leave(linear(x, self.weight))
        return y if self.bias is None else y + self.residual.replicated(self.bias)[0]
