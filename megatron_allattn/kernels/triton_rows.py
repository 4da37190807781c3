"""Triton kernels over rows: the output, and the gradient of the queries, of one tile of a head's rows.

Both walk over the head's own positions, then over its persistent vectors; forward in one online softmax for the two.
Scores are kept in units of log 2, so that a weight is 2^(s − lse). Persistent vectors are taken in pairs, the even and
then the odd ones, because the two share the bits of their dropout mask.
"""

import triton
import triton.language as tl

from megatron_allattn.kernels.triton_tiles import (
    column_factor,
    head_of,
    keep_factor,
    kv_offsets,
    load_rows,
    packed_offset,
    pair_bits,
)


@triton.jit
def context_tile(first, t, span, length, COLUMNS: tl.constexpr):
    """Positions from `first` on: c [columns]; and for every row t minus its distance from c, the place of that distance
    in what is packed, and whether it is seen, each [rows, columns]."""
    c = first + tl.arange(0, COLUMNS)
    column = c[None, :] - t[:, None]
    place = (t * (span - 1) + span)[:, None] + c[None, :]
    return c, column, place, (column < 0) & (column >= -span) & (t < length)[:, None]


@triton.jit
def context_scores(
    queries,
    kv,
    logits,
    c,
    place,
    seen,
    head,
    span,
    before,
    stream,
    batch,
    length,
    heads,
    scale,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Where the keys of a tile of positions lie in `kv`, the keys, and their scores."""
    bias = tl.load(logits + place, mask=seen, other=float("-inf")).to(tl.float32)
    places = kv_offsets(c, head, span, before, stream, batch, length, heads, K)
    k = load_rows(kv, places, c < length, 1, K)
    return places, k, tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale + bias


@triton.jit
def attend_to(scores, values, factor, high, total, y, DROPOUT: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of the online softmax: the new maximum, sum and output of the rows."""
    higher = tl.maximum(high, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    rescale = tl.exp2(high - higher)
    total = total * rescale + tl.sum(weights, 1)
    if DROPOUT:
        weights *= factor
    y = tl.dot(weights.to(values.dtype), values, y * rescale[:, None], input_precision=PRECISION)
    return higher, total, y


@triton.jit(do_not_specialize=["batch", "length", "heads", "vectors", "threshold"])
def forward_rows(
    q,
    kv,
    persistent,
    logits,
    keys,
    y,
    lse,
    weights,
    table,
    batch,
    length,
    heads,
    vectors,
    scale,
    threshold,
    keep_scale,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    DROPOUT: tl.constexpr,
    STORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y [B, M, H, K] and lse [B, M, H] from q [B, M, H, K], `kv`, `persistent`, packed logits and row keys [B, M, H].

    STORE: the context's weights after dropout replace the logits (`weights` is the same memory in its own type).
    Grid: row tiles, heads, streams.
    """
    head, span, before, _ = head_of(table, tl.program_id(1))
    stream = tl.program_id(2)
    start = tl.program_id(0) * ROWS
    t = start + tl.arange(0, ROWS)
    valid = t < length
    row = stream.to(tl.int64) * length * heads + head
    queries = load_rows(q + row * K, t, valid, heads * K, K)
    packed = packed_offset(span, before, stream, batch, length)
    logits += packed
    weights += packed
    row_keys = tl.zeros((ROWS,), tl.int32)
    if DROPOUT:
        row_keys = tl.load(keys + row + t * heads, mask=valid, other=0)
    high = tl.full((ROWS,), -1e30, tl.float32)  # finite: rows that see nothing stay free of NaN
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, K), tl.float32)
    stop = tl.minimum(start + ROWS, length) - 1

    for first in range(start - span, stop, COLUMNS):
        c, column, place, seen = context_tile(first, t, span, length, COLUMNS)
        places, k, scores = context_scores(
            queries, kv, logits, c, place, seen, head, span, before, stream, batch, length, heads, scale, K, PRECISION
        )
        v = load_rows(kv + K, places, c < length, 1, K)
        factor = 1.0
        if DROPOUT:
            factor = column_factor(row_keys[:, None], column, threshold, keep_scale)
        high, total, output = attend_to(scores, v, factor, high, total, output, DROPOUT, PRECISION)

    persistent += head.to(tl.int64) * vectors * (2 * K)
    for first in range(0, (vectors + 1) // 2, PAIRS):
        pairs = first + tl.arange(0, PAIRS)
        bits = tl.zeros((ROWS, PAIRS), tl.int32)
        if DROPOUT:
            bits = pair_bits(row_keys[:, None], pairs[None, :])
        for odd in tl.static_range(2):
            i = 2 * pairs + odd
            k = load_rows(persistent, i, i < vectors, 2 * K, K)
            v = load_rows(persistent + K, i, i < vectors, 2 * K, K)
            scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where((i < vectors)[None, :], scores, float("-inf"))
            factor = 1.0
            if DROPOUT:
                factor = keep_factor(bits, odd, threshold, keep_scale)
            high, total, output = attend_to(scores, v, factor, high, total, output, DROPOUT, PRECISION)

    total = tl.where(total > 0, total, 1.0)
    high += tl.log2(total)
    output /= total[:, None]
    tl.store(lse + row + t * heads, high, mask=valid)
    address = y + row * K + t[:, None] * (heads * K) + tl.arange(0, K)[None, :]
    tl.store(address, output.to(y.dtype.element_ty), mask=valid[:, None])

    if STORE:
        for first in range(start - span, stop, COLUMNS):
            c, column, place, seen = context_tile(first, t, span, length, COLUMNS)
            _, _, scores = context_scores(
                queries,
                kv,
                logits,
                c,
                place,
                seen,
                head,
                span,
                before,
                stream,
                batch,
                length,
                heads,
                scale,
                K,
                PRECISION,
            )
            a = tl.exp2(scores - high[:, None])
            if DROPOUT:
                a *= column_factor(row_keys[:, None], column, threshold, keep_scale)
            tl.store(weights + place, a.to(weights.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=["batch", "length", "heads", "vectors", "ramp", "threshold"])
def backward_rows(
    q,
    kv,
    persistent,
    logits,
    keys,
    y,
    lse,
    dy,
    weights,
    dscores,
    dq,
    delta,
    dmask,
    reaches,
    table,
    batch,
    length,
    heads,
    vectors,
    scale,
    root,
    ramp,
    threshold,
    keep_scale,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    DROPOUT: tl.constexpr,
    SHARED: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a tile of rows gives in the backward pass.

    dq (float32 [B, M, H, K], without the part of the positions), delta = Σ dy·y [B, M, H], and dmask [B, M, H]: the sum
    of the gradients of m over the distances where z moves it and m is not 0 (for 0: triton_edges.py). The context's
    weights after dropout replace the logits (`weights` is the same memory); the gradients of scores go to `dscores`,
    packed, where SHARED has left dy · u. root: 1 / √K. Grid: row tiles, heads, streams.
    """
    head, span, before, _ = head_of(table, tl.program_id(1))
    stream = tl.program_id(2)
    start = tl.program_id(0) * ROWS
    t = start + tl.arange(0, ROWS)
    valid = t < length
    row = stream.to(tl.int64) * length * heads + head
    queries = load_rows(q + row * K, t, valid, heads * K, K)
    gradients = load_rows(dy + row * K, t, valid, heads * K, K)
    outputs = load_rows(y + row * K, t, valid, heads * K, K)
    mean = tl.sum(gradients.to(tl.float32) * outputs.to(tl.float32), 1)
    tl.store(delta + row + t * heads, mean, mask=valid)
    norm = tl.load(lse + row + t * heads, mask=valid, other=float("inf"))
    packed = packed_offset(span, before, stream, batch, length)
    logits += packed
    weights += packed
    dscores += packed
    row_keys = tl.zeros((ROWS,), tl.int32)
    if DROPOUT:
        row_keys = tl.load(keys + row + t * heads, mask=valid, other=0)
    total = tl.zeros((ROWS, K), tl.float32)
    moved = tl.zeros((ROWS,), tl.float32)
    reach = 0.0
    if ADAPTIVE:
        reach = tl.load(reaches + head)

    for first in range(start - span, tl.minimum(start + ROWS, length) - 1, COLUMNS):
        c, column, place, seen = context_tile(first, t, span, length, COLUMNS)
        places, k, scores = context_scores(
            queries, kv, logits, c, place, seen, head, span, before, stream, batch, length, heads, scale, K, PRECISION
        )
        v = load_rows(kv + K, places, c < length, 1, K)
        p = tl.exp2(scores - norm[:, None])
        da = tl.dot(gradients, tl.trans(v), input_precision=PRECISION)
        if SHARED:
            da += tl.load(dscores + place, mask=seen, other=0.0).to(tl.float32)
        a = p
        if DROPOUT:
            factor = column_factor(row_keys[:, None], column, threshold, keep_scale)
            a = p * factor
            da *= factor
        ds = p * (da - mean[:, None])
        if ADAPTIVE:
            nearest = start - first - COLUMNS + 1
            if start + ROWS - 1 - first > reach and nearest <= reach + ramp + 1:
                rise = ramp + 1 + column + reach
                inside = (rise > 0) & (rise <= ramp)
                mask = tl.where(inside, rise / ramp, 1.0)
                moved += tl.sum(tl.where(inside, ds / mask, 0.0), 1)
        narrow = ds.to(k.dtype)
        tl.store(weights + place, a.to(weights.dtype.element_ty), mask=seen)
        tl.store(dscores + place, narrow, mask=seen)
        total = tl.dot(narrow, k, total, input_precision=PRECISION)

    persistent += head.to(tl.int64) * vectors * (2 * K)
    for first in range(0, (vectors + 1) // 2, PAIRS):
        pairs = first + tl.arange(0, PAIRS)
        bits = tl.zeros((ROWS, PAIRS), tl.int32)
        if DROPOUT:
            bits = pair_bits(row_keys[:, None], pairs[None, :])
        for odd in tl.static_range(2):
            i = 2 * pairs + odd
            k = load_rows(persistent, i, i < vectors, 2 * K, K)
            v = load_rows(persistent + K, i, i < vectors, 2 * K, K)
            scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where((i < vectors)[None, :], scores, float("-inf"))  # 0 may be far above a row's scores
            p = tl.exp2(scores - norm[:, None])
            da = tl.dot(gradients, tl.trans(v), input_precision=PRECISION)
            if DROPOUT:
                da *= keep_factor(bits, odd, threshold, keep_scale)
            ds = p * (da - mean[:, None])
            total = tl.dot(ds.to(k.dtype), k, total, input_precision=PRECISION)

    if ADAPTIVE:
        tl.store(dmask + row + t * heads, moved, mask=valid)
    address = dq + row * K + t[:, None] * (heads * K) + tl.arange(0, K)[None, :]
    tl.store(address, total * root, mask=valid[:, None])
