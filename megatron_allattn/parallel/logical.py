"""Logical tensors: what a parameter is, independent of the layout that holds it.

Every parameter carries a `LogicalTensor`: its global name, its global shape, the dimension that tensor parallelism
cuts (None: every rank holds all of it) and the distribution it starts from. Initial weights, checkpoints and norms
know logical tensors only. A cut dimension that the group does not divide (a vocabulary) is dealt in equal blocks whose
last ones are padded with zeros; padding is never part of the logical tensor.

Tensors that are cut by heads are dealt in whole heads, in their order or as a `Placement` says; the logical tensor has
them in their order whatever the placement.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.layout import padded_share
from megatron_allattn.parallel.random import tensor_generator


@dataclass(frozen=True)
class Init:
    """The distribution of an initial weight: normal(0, scale²), uniform(−scale, scale) or the constant `scale`."""

    kind: Literal["normal", "uniform", "constant"]
    scale: float

    def draw(self, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
        """The full float32 tensor: a function of (seed, name, shape) alone."""
        full = torch.empty(shape, dtype=torch.float32)
        generator = tensor_generator(seed, name)
        if self.kind == "normal":
            return full.normal_(0.0, self.scale, generator=generator)
        if self.kind == "uniform":
            return full.uniform_(-self.scale, self.scale, generator=generator)
        return full.fill_(self.scale)


Placement = tuple[tuple[int, ...], ...]
"""Which heads of a layer every rank of the tensor group holds, in rank order: logical numbers, equally many each."""


def in_order(count: int, parts: int) -> Placement:
    """`count` heads over `parts` ranks, consecutive ones together."""
    each = count // parts
    return tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(parts))


@dataclass(frozen=True)
class LayerHeads:
    """The heads of a layer, as units by which tensors are cut: `count` equal parts of the cut dimension."""

    layer: int
    count: int


@dataclass(frozen=True)
class LogicalTensor:
    """Global name, global shape, cut dimension and start of a parameter. heads: by which it is cut, if it is."""

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None
    init: Init
    heads: LayerHeads | None = None

    def local_shape(self, parts: int) -> tuple[int, ...]:
        """Shape of one rank's shard, padding included, when `parts` ranks share the tensor."""
        if self.shard_dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.shard_dim] = padded_share(shape[self.shard_dim], parts)
        return tuple(shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard(self, full: Tensor, rank: int, parts: int, placement: Placement | None = None) -> Tensor:
        """This rank's part of `full` (the logical tensor), zero-padded to the local shape.

        placement: of the heads, if it is cut by heads; in their order if left out.
        """
        assert tuple(full.shape) == self.shape, f"{self.name}: {tuple(full.shape)} is not {self.shape}"
        if self.shard_dim is None:
            return full
        if placement is not None:
            own = torch.tensor(placement[rank], device=full.device)
            return self._by_head(full).index_select(self.shard_dim, own).flatten(self.shard_dim, self.shard_dim + 1)
        rows = self.local_shape(parts)[self.shard_dim]
        size = self.shape[self.shard_dim]
        start, stop = min(rank * rows, size), min((rank + 1) * rows, size)
        local = full.new_zeros(self.local_shape(parts))
        local.narrow(self.shard_dim, 0, stop - start).copy_(full.narrow(self.shard_dim, start, stop - start))
        return local

    def join(self, shards: list[Tensor], placement: Placement | None = None) -> Tensor:
        """The logical tensor from every rank's shard, in rank order, without padding. placement: as of `shard`."""
        if self.shard_dim is None:
            return shards[0]
        whole = torch.cat(shards, dim=self.shard_dim)
        if placement is None:
            return whole.narrow(self.shard_dim, 0, self.shape[self.shard_dim])
        placed = self._by_head(whole)
        order = torch.tensor(list(itertools.chain.from_iterable(placement)), device=whole.device)
        joined = torch.empty_like(placed).index_copy_(self.shard_dim, order, placed)
        return joined.flatten(self.shard_dim, self.shard_dim + 1)

    def _by_head(self, whole: Tensor) -> Tensor:
        """With the heads as a dimension of their own, in front of what is left of the cut one."""
        assert self.shard_dim is not None and self.heads is not None, f"{self.name} is not cut by heads"
        return whole.unflatten(self.shard_dim, (self.heads.count, -1))


def logical_parameter(logical: LogicalTensor, group: Group) -> nn.Parameter:
    """An uninitialized parameter that holds this rank's shard of `logical`.

    The attribute `logical` names what it is; `tensor_model_parallel` is the mark by which DeepSpeed and Megatron-LM
    tell sharded parameters from replicated ones when they take norms.
    """
    parameter = nn.Parameter(torch.empty(logical.local_shape(group.size)))
    parameter.logical = logical  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = logical.shard_dim is not None and group.size > 1  # type: ignore[attr-defined]
    return parameter


def logical_of(parameter: nn.Parameter) -> LogicalTensor:
    """The logical tensor that `parameter` holds a shard of."""
    return parameter.logical  # type: ignore[attr-defined]
