"""Where hidden states [B, M, D] lie between sublayers: the residual stream over the tensor group.

Whole on every rank, what sublayers add being summed by an all-reduce; or, with sequence parallelism (Korthikanti et al.
2022, section 4.2.2), M / parts consecutive positions on each rank: an all-gather before a sublayer and a reduce-scatter
behind it move as many bytes as that all-reduce, while norms, dropout and what autograd keeps of them are cut.

    residual   [B, M / parts, D]   enter → [B, M, D] as input to sharded work; its gradient is summed over the ranks
    partial    [B, M, D]           leave → the sum over the ranks, as the residual stream holds it
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_allattn.parallel.collectives import copy_to_shards, gather_shards, sum_over_shards, sum_to_shards
from megatron_allattn.parallel.groups import Group

_SEQUENCE = 1  # dimension of [B, M, D]


@dataclass(frozen=True)
class Residual:
    """The residual stream over `group`: cut into sequences of positions, or whole on every rank."""

    group: Group
    sequence_parallel: bool = False

    def enter(self, hidden: Tensor) -> Tensor:
        """The stream → all positions on every rank, as input to work that is cut in another way."""
        if self.sequence_parallel:
            return gather_shards(hidden, self.group, _SEQUENCE)
        return copy_to_shards(hidden, self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """Every rank's part of a sum [B, M, D] → the sum, as a part of the stream."""
        if self.sequence_parallel:
            return sum_to_shards(partial, self.group, _SEQUENCE)
        return sum_over_shards(partial, self.group)

    def first_position(self, hidden: Tensor) -> int:
        """Which position of the block is the first of `hidden` on this rank."""
        return self.group.rank * hidden.shape[_SEQUENCE] if self.sequence_parallel else 0

    def replicated(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """Weights of equal shape that act on the stream: of a cut one their gradients are summed over the ranks."""
        if not self.sequence_parallel:
            return weights
        return copy_to_shards(torch.stack(weights), self.group).unbind()
