"""Layout-free randomness: every random number is a function of global identities, never of a rank.

Two kinds:

*Tensors* (initial weights) come from a PyTorch generator seeded by (seed, logical name); the full tensor is drawn, then
cut.

*Masks* (dropout) come from a 32-bit integer hash, so that any backend can compute any element of a mask alone, whatever
its tile, cache length or shard. An element has a row key and a column; the two columns 2p and 2p + 1 share the bits

    bits(row, p) = scramble(key(row) ^ mix(p · 0x9E3779B9 + 1))           (all arithmetic modulo 2³²)
    scramble(x)  = (y ^ (y >> 15)) · 0x846CA68B   with   y = x · 0x7FEB352D

where >> keeps the sign (so y ^ (y >> 15) is each 31-bit number for two values of y). `mix` is the two-multiplication
finalizer "lowbias32" (C. Wellons, "Prospecting for hash functions", 2018) and
key(row) = mix(… mix(mix(seed) + a) + b …) over the row's integers (a, b, …), seed's high word first. Column 2p looks at
bits 0 to 13, column 2p + 1 at bits 16 to 29; an element is kept when that number is at least
`drop_threshold(probability)`, its probability in units of 2⁻¹⁴. Both `scramble` and the numbers of 14 bits are chosen
so that a mask costs a CPU little (kernels/dropout.py).

    attention weights    row (seed, site, step, layer, stream, head, query)    column: −(t − c) for the context, i for
                         persistent vector i (head 0 where one set of vectors serves all heads)
    feed-forward units   row (seed, site, step, layer, stream, position)       column: global unit
    other sites          row (seed, site, step, stream, position)              column: global channel

`query` and `position` are offsets in the block; `head`, `stream`, `unit` and `channel` are global.
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
COLUMN_STEP = 0x9E3779B9 - (1 << 32)  # read as a signed number, as the factors below
_SIGN = 0x80000000
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - (1 << 32)  # read as signed numbers
FIELD = (1 << 14) - 1


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


def pair_keys(pairs: Tensor) -> Tensor:
    """mix(p · 0x9E3779B9 + 1) for an integer tensor of column pairs p = column >> 1; int32 of the same shape."""
    return mix_tensor(pairs.to(torch.int32) * COLUMN_STEP + 1)


def scramble_(bits: Tensor, spare: Tensor) -> Tensor:
    """`scramble` in place on an int32 tensor whose bits are the unsigned values; `spare` has its shape and is lost."""
    bits *= FIRST_FACTOR
    torch.bitwise_right_shift(bits, 15, out=spare)
    bits ^= spare
    bits *= SECOND_FACTOR
    return bits


def drop_threshold(probability: float) -> int:
    """The probability of being dropped, in [0, 1), in units of 2⁻¹⁴, rounded."""
    return round(probability * (FIELD + 1))


def keep_scale(probability: float) -> float:
    """1 / the share that is kept."""
    return (FIELD + 1) / (FIELD + 1 - drop_threshold(probability))


def keep_mask(rows: Tensor, columns: Tensor, probability: float) -> Tensor:
    """True where an element is kept.

    rows: int32 row keys [..., 1] and columns: integer columns [C], or any shapes that broadcast; probability: of being
    dropped, in [0, 1).
    """
    bits = rows ^ pair_keys(columns >> 1)
    bits = scramble_(bits, torch.empty_like(bits))
    field = torch.where((columns & 1).bool(), bits >> 16, bits) & FIELD
    return field >= drop_threshold(probability)


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

        columns: the column of each weight [C], −distance or the persistent vector's number.
        """
        if probability == 0.0:
            return weights
        queries = torch.arange(weights.shape[-2], dtype=torch.int32, device=weights.device)
        rows = self.attention_rows(layer, heads, queries)
        return _drop(weights, keep_mask(rows[..., None], columns, probability), probability)

    def dropout(
        self,
        tensor: Tensor,
        site: Site,
        probability: float,
        *,
        layer: int | None = None,
        first_position: int = 0,
        first_channel: int = 0,
    ) -> Tensor:
        """Dropout on [B, M, D], consecutive positions of the block and channels from `first_position` and
        `first_channel` on; kept values are divided by the keep rate.

        layer: its index, at sites that every layer has.
        """
        if probability == 0.0:
            return tensor
        device = tensor.device
        positions = torch.arange(first_position, first_position + tensor.shape[1], dtype=torch.int32, device=device)
        place = () if layer is None else (layer,)
        rows = row_keys(self.seed, site, self.step, *place, self.streams[:, None], positions)
        columns = torch.arange(first_channel, first_channel + tensor.shape[2], dtype=torch.int32, device=device)
        return _drop(tensor, keep_mask(rows[:, :, None], columns, probability), probability)


def _drop(tensor: Tensor, keep: Tensor, probability: float) -> Tensor:
    zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    return torch.where(keep, tensor * keep_scale(probability), zero)
