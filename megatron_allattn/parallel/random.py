"""Layout-free randomness: every random number is a function of global identities, never of a rank.

Two kinds:

*Tensors* (initial weights) come from a PyTorch generator seeded by (seed, logical name); the full tensor is drawn, then
cut.

*Masks* (dropout) come from a 32-bit integer hash, so that any backend can compute any element of a mask alone,
whatever its tile, cache length or shard. An element has a row key and a column; its bits are

    bits(row, column) = mix(key(row) + mix(column · 0x9E3779B9 + 1))      (all arithmetic modulo 2³²)

with `mix` the two-multiplication finalizer "lowbias32" (C. Wellons, "Prospecting for hash functions", 2018) and
key(row) = mix(… mix(mix(seed) + a) + b …) over the row's integers (a, b, …), seed's high word first. It is kept when
bits, read as an unsigned number, are ≥ p · 2³².

    attention weights    row (seed, site, step, layer, stream, head, query)    column = key: the distance t − c for the
                         context, L + 1 + i for persistent vector i (head 0 where one set of vectors serves all heads)
    feed-forward units   row (seed, site, step, layer, stream, position)       column = global unit
    other sites          row (seed, site, step, stream, position)              column = global channel

`query` and `position` are offsets in the block; `head`, `stream`, `unit` and `channel` are global.
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_COLUMN_STEP = 0x9E3779B9
_SIGN = 0x80000000


class Site(IntEnum):
    """Where a mask is applied. The numbers are part of the hash: never renumber."""

    ATTENTION = 1
    EMBEDDING = 2
    REPRESENTATION = 3
    FEED_FORWARD = 4


def tensor_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the logical tensor `name`: equal on every rank of every layout."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def mix(value: int) -> int:
    """The 32-bit finalizer on a Python integer."""
    value &= _MASK
    value ^= value >> 16
    value = value * 0x7FEB352D & _MASK
    value ^= value >> 15
    value = value * 0x846CA68B & _MASK
    return value ^ value >> 16


def _signed(value: int) -> int:
    """The same 32 bits read as a two's-complement number."""
    return value - (1 << 32) if value & _SIGN else value


def mix_tensor(bits: Tensor) -> Tensor:
    """`mix` on an int32 tensor whose bits are the unsigned values; returns a new tensor.

    int32 products wrap modulo 2³² on every backend used here; the right shift is arithmetic, hence the masks.
    """
    bits = bits ^ (bits >> 16 & 0xFFFF)
    bits *= 0x7FEB352D
    bits ^= bits >> 15 & 0x1FFFF
    bits *= _signed(0x846CA68B)
    bits ^= bits >> 16 & 0xFFFF
    return bits


def row_keys(seed: int, *parts: int | Tensor) -> Tensor:
    """key(row) for a row's integers, each a number or an int32 tensor; int32 of their joint broadcast shape."""
    key = _bits(mix(mix(seed >> 32) + (seed & _MASK)))
    for part in parts:
        key = mix_tensor(key + (part if isinstance(part, Tensor) else _bits(part)))
    return key


def _bits(value: int) -> Tensor:
    """The low 32 bits of `value` as a scalar int32 tensor (a CPU scalar combines with tensors of any device)."""
    return torch.tensor(_signed(value & _MASK), dtype=torch.int32)


def column_keys(columns: Tensor) -> Tensor:
    """mix(column · 0x9E3779B9 + 1) for an integer tensor of columns below 2³¹; int32 of the same shape."""
    return mix_tensor(columns.to(torch.int32) * _signed(_COLUMN_STEP) + 1)


def keep_mask(rows: Tensor, columns: Tensor, probability: float) -> Tensor:
    """True where an element is kept.

    rows: int32 row keys [..., 1] and columns: int32 column keys [K], or any shapes that broadcast; probability: of
    being dropped, in [0, 1).
    """
    threshold = round(probability * 2**32) - 2**31  # unsigned comparison by way of signed numbers: flip the sign bit
    return (mix_tensor(rows + columns) ^ _signed(_SIGN)) >= threshold


@dataclass(frozen=True)
class DropoutKeys:
    """What a mask depends on besides the place inside the block: the seed, the step and the batch's global streams.

    streams: int32 [B], the global stream of each row of the batch, on the device of the activations.
    """

    seed: int
    step: int
    streams: Tensor

    def attention_rows(self, layer: int, heads: Tensor, queries: Tensor) -> Tensor:
        """Row keys [B, H, M] for logical `heads` [H] and `queries` [M] (offsets in the block), both int32."""
        streams = self.streams[:, None, None]
        return row_keys(self.seed, Site.ATTENTION, self.step, layer, streams, heads[:, None], queries)

    def attention_dropout(
        self, weights: Tensor, layer: int, heads: Tensor, columns: Tensor, probability: float
    ) -> Tensor:
        """Dropout on attention weights [B, H, M, C] of logical `heads` [H]; kept ones are divided by the keep rate.

        columns: the key of each column [C], a distance, or L + 1 + i.
        """
        if probability == 0.0:
            return weights
        queries = torch.arange(weights.shape[-2], dtype=torch.int32, device=weights.device)
        rows = self.attention_rows(layer, heads, queries)
        return _drop(weights, keep_mask(rows[..., None], column_keys(columns), probability), probability)

    def dropout(
        self, tensor: Tensor, site: Site, probability: float, *, layer: int | None = None, first_channel: int = 0
    ) -> Tensor:
        """Dropout on [B, M, D], consecutive channels from `first_channel`; kept values are divided by the keep rate.

        layer: its index, at sites that every layer has.
        """
        if probability == 0.0:
            return tensor
        device = tensor.device
        positions = torch.arange(tensor.shape[1], dtype=torch.int32, device=device)
        place = () if layer is None else (layer,)
        rows = row_keys(self.seed, site, self.step, *place, self.streams[:, None], positions)
        columns = column_keys(torch.arange(first_channel, first_channel + tensor.shape[2], device=device))
        return _drop(tensor, keep_mask(rows[:, :, None], columns, probability), probability)


def _drop(tensor: Tensor, keep: Tensor, probability: float) -> Tensor:
    zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    return torch.where(keep, tensor * (1.0 / (1.0 - probability)), zero)
