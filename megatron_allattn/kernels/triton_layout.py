"""How the Triton backend lays out what its kernels read: keys and values as far as each head sees, and nothing more.

See triton_tiles.py for the forms "kv" and "packed". Projections are plain matrix products.
"""

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from megatron_allattn.kernels.interface import LayerWeights
from megatron_allattn.kernels.memory import memory_weight, project_cache

ALIGNMENT = 16  # padded spans are multiples: 32 bytes of half precision, and what tiles of tensor cores want


def round_up(length: int, multiple: int) -> int:
    """The next multiple that is not below `length`."""
    return -(-length // multiple) * multiple


class Packing:
    """Where each head's rows and distances lie.

    spans: of each head; padded: the same, rounded up; longest: the largest of these; total: their sum; table: for the
    kernels (triton_tiles.py).
    """

    def __init__(self, spans: tuple[int, ...], batch: int, length: int, device: torch.device) -> None:
        self.batch, self.length, self.heads = batch, length, len(spans)
        self.padded = tuple(round_up(span, ALIGNMENT) for span in spans)
        self.longest, self.total = max(self.padded), sum(self.padded)
        self._order = sorted(range(self.heads), key=lambda head: -spans[head])
        self._before = [0, *accumulate(self.padded[head] for head in self._order)][: self.heads]
        rows = [[head, self.padded[head], self._before[i], spans[head]] for i, head in enumerate(self._order)]
        table = torch.tensor(rows, dtype=torch.int32)
        if device.type == "cuda":  # from pinned memory, so that the host does not wait
            table = table.pin_memory()
        self.table = table.to(device, non_blocking=True)

    @property
    def elements(self) -> int:
        """Of a packed tensor, B·M·ΣS."""
        return self.batch * self.length * self.total

    def new_kv(self, size: int, like: Tensor) -> Tensor:
        """Room for the keys and values, or their gradients, of block and cache; [rows, 2K]."""
        return like.new_empty(self.batch * (self.length * self.heads + self.total), 2 * size)

    def block_rows(self, kv: Tensor) -> Tensor:
        """Those of the block, [B·M, H·2K]."""
        return kv[: self.batch * self.length * self.heads].view(self.batch * self.length, -1)

    def cached_rows(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every head and its rows of the cache [B, S, 2K]."""
        first = self.batch * self.length * self.heads
        for head, before in zip(self._order, self._before, strict=True):
            start, span = first + self.batch * before, self.padded[head]
            yield head, kv[start : start + self.batch * span].view(self.batch, span, -1)


def project_kv(block: Tensor, cache: Tensor, weights: LayerWeights, packing: Packing) -> Tensor:
    """Keys and values of the block, and of the cache as far as each head sees; zeros where nothing was cached."""
    weight = memory_weight(weights)
    kv = packing.new_kv(weights.position_key.shape[1], block)
    torch.mm(block.flatten(0, 1), weight.flatten(0, 1).t(), out=packing.block_rows(kv))
    for head, rows in packing.cached_rows(kv):
        project_cache(cache, weight[head], rows)
    return kv


def kv_gradients(
    dkv: Tensor, block: Tensor, cache: Tensor, weights: LayerWeights, packing: Packing
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradients of `project_kv`'s result to those of the block [B·M, D], of W_k and of W_v."""
    weight, of_block = memory_weight(weights), packing.block_rows(dkv)
    dblock = of_block @ weight.flatten(0, 1)
    dweight = (of_block.t() @ block.flatten(0, 1)).view_as(weight)
    for head, rows in packing.cached_rows(dkv):
        known = min(rows.shape[1], cache.shape[1])
        if known:
            of_cache = rows[:, rows.shape[1] - known :].transpose(1, 2)
            dweight[head] += torch.bmm(of_cache, cache[:, cache.shape[1] - known :]).sum(0)
    key, value = dweight.chunk(2, dim=1)
    return dblock, key.flatten(0, 1), value.flatten(0, 1)


def position_rows(position_key: Tensor, longest: int) -> Tensor:
    """u as rows [longest, K], row w for the distance longest − w; zeros for distances beyond L."""
    known = min(longest, position_key.shape[2])
    rows = position_key.new_zeros(longest, position_key.shape[1])
    rows[longest - known :] = position_key[0, :, position_key.shape[2] - known :].t()
    return rows


def position_columns(rows: Tensor, position_key: Tensor) -> Tensor:
    """Back from rows [longest, K] to the form of `position_key` [1, K, L], zeros where no head sees."""
    known = min(len(rows), position_key.shape[2])
    columns = torch.zeros_like(position_key)
    columns[0, :, position_key.shape[2] - known :] = rows[len(rows) - known :].t()
    return columns


def stack_vectors(weights: LayerWeights, packing: Packing) -> Tensor:
    """Persistent keys and values of each head side by side, [H, N, 2K]; N = 0 where there are none."""
    if weights.persistent_key is None or weights.persistent_value is None:
        return weights.position_key.new_empty(packing.heads, 0, 2 * weights.position_key.shape[1])
    return torch.cat([weights.persistent_key.mT, weights.persistent_value], dim=2)
