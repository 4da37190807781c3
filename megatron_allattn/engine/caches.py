"""Hidden-state caches, bound to micro-batch slots.

A stream belongs to one (data rank, slot); each slot keeps, for every layer, the hidden states of the positions before
its streams' next block. Reading and writing are separate: a forward pass reads the current cache and writes the next
one, which replaces it in `commit`, after the step. A repeated forward (activation recomputation, a pipeline's
schedule) therefore sees the same input. Every tensor-parallel rank keeps the same caches.
"""

import torch
from torch import Tensor


class CacheSlot:
    """The caches of one micro-batch slot: one [B, C, D] tensor per layer; C grows from 0 and differs between layers.

    layers: indices of the layers that this rank computes, a range of the network's.
    """

    def __init__(
        self, layers: range, batch_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._empty = torch.zeros(batch_size, 0, hidden_size, dtype=dtype, device=device)
        self.layers = layers
        self._current = [self._empty] * len(layers)
        self._next: list[Tensor | None] = [None] * len(layers)
        self.length = 0

    def read(self, layer: int) -> Tensor:
        """The hidden states before this block, [B, C, D]."""
        return self._current[self.layers.index(layer)]

    def write(self, layer: int, hidden: Tensor) -> None:
        """Keep [B, C', D] for the next block (from `commit` on)."""
        self._next[self.layers.index(layer)] = hidden

    def commit(self, block_length: int) -> None:
        """The block of `block_length` tokens is done: what was written is read from now on."""
        written = [hidden for hidden in self._next if hidden is not None]
        assert len(written) == len(self._next), "a layer has not written its cache"
        self._current, self._next = written, [None] * len(self._next)
        self.length += block_length

    def clear(self) -> None:
        """Forget everything: the streams start anew."""
        self.restore([self._empty] * len(self._current), 0)

    def restore(self, layers: list[Tensor], length: int) -> None:
        """Set the caches of this rank's layers, and how many tokens their streams have seen since they started."""
        self._current, self.length = list(layers), length
        self._next = [None] * len(layers)
