"""Triton kernels on what is packed by distance (triton_tiles.py): products with the position vectors u.

`positions` is u as [W, K], row w for the distance W − w, W the longest padded span. None of these kernels needs a
skewed load, and each is a plain product: logits and their gradients pass between them and the row kernels in memory.
"""

import triton
import triton.language as tl

from megatron_allattn.kernels.triton_tiles import head_of, load_rows, packed_offset


@triton.jit
def log_mask(distances, reach, span, ramp):
    """log₂ m_z(x), −∞ where m = 0 and beyond the head's span; reach: z·L."""
    rise = ramp + 1 - distances + reach
    hidden = (rise <= 0) | (distances > span)
    return tl.where(hidden, float("-inf"), tl.log2(tl.where(hidden, 1.0, tl.minimum(rise / ramp, 1.0))))


@triton.jit(do_not_specialize=["batch", "length", "heads", "width", "cached", "ramp"])
def position_products(
    rows,
    positions,
    reaches,
    out,
    table,
    batch,
    length,
    heads,
    width,
    cached,
    ramp,
    scale,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOGITS: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[t, x] = scale · rows_t · u_x, packed, for rows [B, M, H, K]; LOGITS: plus the logarithm of the span mask.

    cached: a distance that leads further back than the first so many positions before the block gets −∞.
    Grid: row tiles, heads, streams.
    """
    head, span, before, exact = head_of(table, tl.program_id(1))
    stream = tl.program_id(2)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = t < length
    rows += (stream.to(tl.int64) * length * heads + head) * K
    x = load_rows(rows, t, valid, heads * K, K)
    out += packed_offset(span, before, stream, batch, length)
    for first in range(0, span, COLUMNS):
        j = first + tl.arange(0, COLUMNS)
        u = load_rows(positions, width - span + j, j < span, K, K)
        product = tl.dot(x, tl.trans(u), input_precision=PRECISION) * scale
        if LOGITS:
            distances = span - j
            if ADAPTIVE:
                mask = log_mask(distances, tl.load(reaches + head), exact, ramp)
            else:
                mask = tl.where(distances > exact, float("-inf"), 0.0)
            seen = distances[None, :] - t[:, None] <= cached
            product = tl.where(seen, product + mask[None, :], float("-inf"))
        address = out + t[:, None] * span + j[None, :]
        tl.store(address, product.to(out.dtype.element_ty), mask=valid[:, None] & (j < span)[None, :])


@triton.jit(do_not_specialize=["batch", "length", "heads", "width"])
def add_positions(
    packed,
    positions,
    source,
    out,
    table,
    batch,
    length,
    heads,
    width,
    scale,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out_t = source_t + scale · Σ_x packed[t, x] u_x, for source (float32) and out [B, M, H, K].

    Grid: row tiles, heads, streams.
    """
    head, span, before, _ = head_of(table, tl.program_id(1))
    stream = tl.program_id(2)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = t < length
    packed += packed_offset(span, before, stream, batch, length)
    total = tl.zeros((ROWS, K), tl.float32)
    for first in range(0, span, COLUMNS):
        j = first + tl.arange(0, COLUMNS)
        u = load_rows(positions, width - span + j, j < span, K, K)
        address = packed + t[:, None] * span + j[None, :]
        factors = tl.load(address, mask=valid[:, None] & (j < span)[None, :], other=0.0)
        total = tl.dot(factors, u, total, input_precision=PRECISION)
    begin = (stream.to(tl.int64) * length * heads + head) * K
    total = load_rows(source + begin, t, valid, heads * K, K) + scale * total
    address = out + begin + t[:, None] * (heads * K) + tl.arange(0, K)[None, :]
    tl.store(address, total.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["batch", "length", "heads", "width"])
def position_gradient(
    packed,
    rows,
    out,
    table,
    batch,
    length,
    heads,
    width,
    scale,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out_x = scale · Σ packed[t, x] rows_t over heads and the rows [B, M, H, K] of a stream; out float32 [B, W, K].

    Grid: tiles of W, streams.
    """
    stream = tl.program_id(1)
    w = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, K), tl.float32)
    for slot in range(heads):
        head, span, before, _ = head_of(table, slot)
        j = w - (width - span)
        if (tl.program_id(0) + 1) * COLUMNS > width - span:
            weights = packed + packed_offset(span, before, stream, batch, length)
            begin = (stream.to(tl.int64) * length * heads + head) * K
            for first in range(0, length, ROWS):
                t = first + tl.arange(0, ROWS)
                valid = t < length
                address = weights + t[None, :] * span + j[:, None]
                seen = ((j >= 0) & (j < span))[:, None] & valid[None, :]
                x = load_rows(rows + begin, t, valid, heads * K, K)
                total = tl.dot(tl.load(address, mask=seen, other=0.0), x, total, input_precision=PRECISION)
    address = out + (stream.to(tl.int64) * width + w[:, None]) * K + tl.arange(0, K)[None, :]
    tl.store(address, total * scale, mask=(w < width)[:, None])
