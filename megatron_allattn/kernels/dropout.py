"""Attention dropout on tiles that lie in reused memory: the mask of parallel/random.py at the cost of a few passes.

A pair of columns shares one 32-bit hash, so a tile [R, C] needs C / 2 of them per row; seen as 16-bit numbers they lie
in the order of the columns. On a CPU the comparison and the product with the mask are one vectorized pass,
`threshold_backward`, which wants numbers of the tile's own type: 14 bits are an exact float32, and read as the bits of
a bfloat16 they are a number in [0, 2) of the same order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_allattn.kernels.workspace import Workspace
from megatron_allattn.parallel.random import FIELD, drop_threshold, pair_keys, scramble_


def tile_columns(span: int, persistent: int, device: torch.device) -> Tensor:
    """Keys of the column pairs of a tile [R, S + N], int32 [⌈(S + N) / 2⌉]: distances S … 1, then persistent vectors.

    span: S, even, so that no pair has a column of each kind.
    """
    assert span % 2 == 0
    return pair_keys(torch.arange(-(span // 2), (persistent + 1) // 2, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class DropoutRows:
    """Keys of rows, int32 [R], of all local heads [H, B·M], and of column pairs, int32 [⌈(S + N) / 2⌉], and the
    probability of being dropped."""

    rows: Tensor
    pairs: Tensor
    probability: float


class TileMask:
    """The mask of one tile, applied by `apply_` as often as needed until the next `draw`."""

    def __init__(self, workspace: Workspace, probability: float) -> None:
        self._workspace, self._threshold = workspace, drop_threshold(probability)
        self._field: Tensor | None = None

    def draw(self, rows: Tensor, pairs: Tensor, columns: int, dtype: torch.dtype) -> None:
        """Compute the mask of a tile of `dtype` from row keys [R] and pair keys [P], for its first `columns`."""
        shape = (len(rows), len(pairs))
        bits = self._workspace.take("bits", shape, torch.int32, rows.device)
        spare = self._workspace.take("spare bits", shape, torch.int32, rows.device)
        torch.bitwise_xor(rows[:, None], pairs, out=bits)
        halves = scramble_(bits, spare).view(torch.int16)
        halves &= FIELD
        halves = halves[:, :columns]
        if dtype == torch.bfloat16:
            self._field = halves.view(torch.bfloat16)
            return
        self._field = self._workspace.take("field", halves.shape, dtype, rows.device)
        self._field.copy_(halves)

    def apply_(self, source: Tensor, out: Tensor | None = None) -> Tensor:
        """`source` [R, C] with what is dropped set to zero, unscaled, in `out` (in place by default)."""
        out = source if out is None else out
        assert self._field is not None
        limit = float(self._threshold - 1)  # threshold_backward keeps what is above
        if source.dtype == torch.bfloat16:
            limit = torch.tensor(self._threshold - 1, dtype=torch.int16).view(torch.bfloat16).item()
        return torch.ops.aten.threshold_backward.grad_input(source, self._field, limit, grad_input=out)
