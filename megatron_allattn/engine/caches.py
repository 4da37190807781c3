"""Hidden-state caches, bound to micro-batch slots.

A stream belongs to one (data rank, slot); each slot keeps, for every layer, the hidden states of the positions before
its streams' next block. Reading and writing are separate: a forward pass reads the current cache and writes the next
one, which replaces it in `commit`, after the step. A repeated forward (activation recomputation, a pipeline's
schedule) therefore sees the same input. Every tensor-parallel rank keeps the same caches, or a part of the channels
(`--shard-caches`), which all of them gather to read.
"""

import torch
from torch import Tensor

from megatron_allattn.parallel.collectives import all_gather
from megatron_allattn.parallel.groups import ALONE, Group


class CacheSlot:
    """The caches of one micro-batch slot: one [B, C, D] tensor per layer; C grows from 0 and differs between layers.

    layers: indices of the layers that this rank computes, a range of the network's; sharers: the ranks that keep equal
    parts of the channels D, to whom reading is collective.
    """

    def __init__(
        self,
        layers: range,
        batch_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        sharers: Group = ALONE,
    ) -> None:
        self._empty = torch.zeros(batch_size, 0, hidden_size, dtype=dtype, device=device)
        self.layers, self._sharers = layers, sharers
        self._current = [self._part(self._empty)] * len(layers)
        self._next: list[Tensor | None] = [None] * len(layers)
        self.length = 0

    def read(self, layer: int) -> Tensor:
        """The hidden states before this block, [B, C, D]."""
        part = self._current[self.layers.index(layer)]
        return torch.cat(all_gather(part, self._sharers), dim=2) if self._sharers.size > 1 else part

    def part(self, layer: int) -> Tensor:
        """What this rank keeps of it, [B, C, D] or a part of the channels."""
        return self._current[self.layers.index(layer)]

    def written(self, layer: int) -> bool:
        """Whether this block has written the layer's cache."""
        return self._next[self.layers.index(layer)] is not None

    def write(self, layer: int, hidden: Tensor) -> None:
        """Keep [B, C', D] for the next block (from `commit` on)."""
        self._next[self.layers.index(layer)] = self._part(hidden)

    def commit(self, block_length: int) -> None:
        """The block of `block_length` tokens is done: what was written is read from now on."""
        written = [hidden for hidden in self._next if hidden is not None]
        assert len(written) == len(self._next), "a layer has not written its cache"
        self._current, self._next = written, [None] * len(self._next)
        self.length += block_length

    def discard(self) -> None:
        """The block is not done: what was written is forgotten."""
        self._next = [None] * len(self._next)

    def clear(self) -> None:
        """Forget everything: the streams start anew."""
        self.restore([self._empty] * len(self._current), 0)

    def restore(self, layers: list[Tensor], length: int) -> None:
        """Set the caches of this rank's layers, [B, C, D], and how many tokens their streams have seen since they
        started."""
        self._current, self.length = [self._part(hidden) for hidden in layers], length
        self._next = [None] * len(layers)

    def _part(self, hidden: Tensor) -> Tensor:
        """What this rank keeps of [B, C, D]."""
        group = self._sharers
        return hidden if group.size == 1 else hidden.chunk(group.size, dim=2)[group.rank].contiguous()
