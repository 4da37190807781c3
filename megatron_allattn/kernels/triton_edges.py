"""A Triton kernel for the end of the span mask, where m = 0 has a gradient: see `LARGEST_HIDDEN` of interface.py.

Only one distance of a head can be there, R + 1 + z·L where z·L is whole, so it is a scalar product for each row.
"""

import math

import triton
import triton.language as tl

from megatron_allattn.kernels import interface
from megatron_allattn.kernels.triton_tiles import column_factor, head_of, kv_offsets, load_rows

LARGEST = tl.constexpr(interface.LARGEST_HIDDEN / math.log(2.0))  # scores are in units of log 2


@triton.jit(do_not_specialize=["batch", "length", "heads", "width", "cached", "ramp", "threshold"])
def edge_gradient(
    q,
    kv,
    positions,
    keys,
    lse,
    delta,
    dy,
    dmask,
    reaches,
    table,
    batch,
    length,
    heads,
    width,
    cached,
    scale,
    ramp,
    threshold,
    keep_scale,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    DROPOUT: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Adds to dmask [B, M, H] what `backward_rows` leaves out: the gradient of m where it is 0.

    positions: as in triton_positions.py; cached: how many positions before the block may be looked at; the rest as in
    `backward_rows`. Grid: row tiles, heads, streams.
    """
    head, span, before, exact = head_of(table, tl.program_id(1))
    stream = tl.program_id(2)
    reach = tl.load(reaches + head)
    distance = reach.to(tl.int32) + ramp + 1
    if (reach == tl.floor(reach)) & (distance <= exact):
        t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        row = stream.to(tl.int64) * length * heads + head
        seen = (t < length) & (distance - t <= cached)
        queries = load_rows(q + row * K, t, seen, heads * K, K).to(tl.float32)
        gradients = load_rows(dy + row * K, t, seen, heads * K, K).to(tl.float32)
        places = kv_offsets(t - distance, head, span, before, stream, batch, length, heads, K)
        keys_seen = load_rows(kv, places, seen, 1, K).to(tl.float32)
        values = load_rows(kv + K, places, seen, 1, K).to(tl.float32)
        u = tl.load(positions + (width - distance) * K + tl.arange(0, K)).to(tl.float32)[None, :]
        if SHARED:
            values += u
        score = tl.sum(queries * (keys_seen + u), 1) * scale
        da = tl.sum(gradients * values, 1)
        if DROPOUT:
            row_keys = tl.load(keys + row + t * heads, mask=seen, other=0)
            da *= column_factor(row_keys, tl.zeros_like(t) - distance, threshold, keep_scale)
        norm = tl.load(lse + row + t * heads, mask=seen, other=float("inf"))
        mean = tl.load(delta + row + t * heads, mask=seen, other=0.0)
        hidden = tl.exp2(tl.minimum(score - norm, LARGEST))
        moved = tl.load(dmask + row + t * heads, mask=seen, other=0.0)
        tl.store(dmask + row + t * heads, moved + hidden * (da - mean), mask=seen)
