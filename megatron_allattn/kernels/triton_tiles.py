"""What the Triton kernels share: which columns a head sees and where they lie, and the dropout mask of an element.

A head with padded span S sees S + M positions: c = −S … −1 in the cache and 0 … M − 1 in the block; row t of the block
looks at the distances t − c in 1 … S. Keys and values lie side by side in rows of 2K numbers: `kv` holds those of the
block [B, M, H, 2K], and behind them those of the cache, packed head after head [B, S, 2K]; `persistent` is [H, N, 2K].

What belongs to a row and a distance (position logits, weights, their gradients) is "packed": head after head [B, M, S],
element j for the distance S − j. A tile over positions reads it skewed: row t finds position c at j = c − t + S.

Heads are taken in the order of `table` (int32 [H, 4]; triton_layout.py), longest spans first: a head's index, its
padded span, the sum of the padded spans before it, its span. Block sizes are capitals; K is the head size.
"""

import triton
import triton.language as tl

from megatron_allattn.parallel import random

STEP = tl.constexpr(random.COLUMN_STEP)
FIRST, SECOND = tl.constexpr(random.FIRST_FACTOR), tl.constexpr(random.SECOND_FACTOR)
FIELD = tl.constexpr(random.FIELD)


@triton.jit
def mix(bits):
    """`parallel.random.mix` of int32 numbers."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= FIRST
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= SECOND
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def pair_bits(keys, pairs):
    """The bits that the columns 2p and 2p + 1 share, from row keys and pairs p that broadcast."""
    bits = keys ^ mix(pairs * STEP + 1)
    bits *= FIRST
    bits ^= bits >> 15
    return bits * SECOND


@triton.jit
def keep_factor(bits, odd, threshold, scale):
    """0 where an element is dropped, `scale` where it is kept; odd: 1 for a pair's second column, 0 for its first."""
    field = (bits >> (16 * odd)) & FIELD
    return tl.where(field >= threshold, scale, 0.0)


@triton.jit
def column_factor(keys, columns, threshold, scale):
    """`keep_factor` from row keys and columns (minus a distance, or the number of a vector) that broadcast."""
    return keep_factor(pair_bits(keys, columns >> 1), columns & 1, threshold, scale)


@triton.jit
def head_of(table, slot):
    """A head's index, padded span, the spans before it, and its span."""
    entry = table + 4 * slot
    span = tl.multiple_of(tl.load(entry + 1), 16)
    return tl.load(entry), span, tl.load(entry + 2).to(tl.int64), tl.load(entry + 3)


@triton.jit
def load_rows(pointer, rows, valid, stride, K: tl.constexpr):
    """Rows of K numbers, [rows, K]; zeros where not valid."""
    d = tl.arange(0, K)
    return tl.load(pointer + rows[:, None] * stride + d[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def kv_offsets(c, head, span, before, stream, batch, length, heads, K: tl.constexpr):
    """Where the keys of positions c of a head lie in `kv`; the values follow K numbers later."""
    block = (stream.to(tl.int64) * length * heads + head) * (2 * K)
    cached = (batch.to(tl.int64) * length * heads + before * batch + (stream.to(tl.int64) + 1) * span) * (2 * K)
    return tl.where(c < 0, cached + c * (2 * K), block + c * (heads * 2 * K))


@triton.jit
def packed_offset(span, before, stream, batch, length):
    """Where a head's packed [M, S] of a stream begins."""
    return before * batch * length + stream.to(tl.int64) * length * span
