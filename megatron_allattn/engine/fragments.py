"""What every rank gives of a checkpoint: together all of it, each element from one rank alone.

A tensor of the checkpoint is a logical one (parallel/logical.py): a weight, a piece of optimizer state in its weight's
shape, or a layer's caches of all streams. Tensor parallelism cuts it into shards, and the replicas share what they have
of a shard as flat ranges of its elements: ZeRO's partitions as they lie, a shard that every replica has by one replica
alone, streams by the replica that reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_allattn.parallel.logical import LogicalTensor

Kind = Literal["weights", "optimizer", "caches"]
KINDS: tuple[Kind, ...] = ("weights", "optimizer", "caches")


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint. order: its place among all of its kind; name: unique in it; logical: shape and cut."""

    kind: Kind
    order: int
    name: str
    logical: LogicalTensor
    dtype: torch.dtype


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + len(values)) of a flattened shard; values: [n]."""

    stored: Stored
    shard: int
    start: int
    values: Tensor

    def copied(self, into: Tensor | None = None) -> "Fragment":
        """The same, with values of its own in host memory that later steps do not change; in memory that an earlier
        copy had, if it fits."""
        values = self.values
        if into is None or into.shape != values.shape:
            into = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        return replace(self, values=into.copy_(values))


Join = Callable[[LogicalTensor, list[Tensor]], Tensor]
"""A logical tensor from its shards, in rank order."""
