"""Triton kernels over columns: the gradients of keys and values, of positions and of persistent vectors."""

import triton
import triton.language as tl

from megatron_allattn.kernels.triton_tiles import column_factor, head_of, kv_offsets, load_rows, packed_offset


@triton.jit(do_not_specialize=["batch", "length", "heads"])
def context_gradient(
    q,
    dy,
    weights,
    dscores,
    dkv,
    table,
    batch,
    length,
    heads,
    root,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dkv, as `kv`, from q and dy [B, M, H, K] and the packed weights after dropout and gradients of scores.

    root: 1 / √K. Grid: tiles of positions of the longest head (others end early), heads, streams.
    """
    head, span, before, _ = head_of(table, tl.program_id(1))
    stream = tl.program_id(2)
    start = tl.program_id(0) * COLUMNS - span
    if start < length:
        c = start + tl.arange(0, COLUMNS)
        row = (stream.to(tl.int64) * length * heads + head) * K
        packed = packed_offset(span, before, stream, batch, length)
        weights += packed
        dscores += packed
        dk = tl.zeros((COLUMNS, K), tl.float32)
        dv = tl.zeros((COLUMNS, K), tl.float32)
        for first in range(tl.maximum(start + 1, 0), tl.minimum(start + COLUMNS + span, length), ROWS):
            t = first + tl.arange(0, ROWS)
            column = c[:, None] - t[None, :]
            seen = (column < 0) & (column >= -span) & (t < length)[None, :]
            place = (t * (span - 1) + span)[None, :] + c[:, None]
            queries = load_rows(q + row, t, t < length, heads * K, K)
            gradients = load_rows(dy + row, t, t < length, heads * K, K)
            a = tl.load(weights + place, mask=seen, other=0.0)
            dv = tl.dot(a, gradients, dv, input_precision=PRECISION)
            ds = tl.load(dscores + place, mask=seen, other=0.0)
            dk = tl.dot(ds, queries, dk, input_precision=PRECISION)
        places = kv_offsets(c, head, span, before, stream, batch, length, heads, K)
        address = dkv + places[:, None] + tl.arange(0, K)[None, :]
        tl.store(address, (dk * root).to(dkv.dtype.element_ty), mask=(c < length)[:, None])
        tl.store(address + K, dv.to(dkv.dtype.element_ty), mask=(c < length)[:, None])


@triton.jit(do_not_specialize=["heads", "vectors", "rows", "part", "threshold"])
def persistent_gradient(
    q,
    persistent,
    keys,
    lse,
    delta,
    dy,
    out,
    rows,
    heads,
    vectors,
    part,
    scale,
    root,
    threshold,
    keep_scale,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of persistent vectors, float32 [parts, H, N, 2K], each part over `part` of the `rows` = B·M rows.

    Grid: tiles of vectors, heads, parts.
    """
    head, number = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    persistent += head.to(tl.int64) * vectors * (2 * K)
    k = load_rows(persistent, i, i < vectors, 2 * K, K)
    v = load_rows(persistent + K, i, i < vectors, 2 * K, K)
    dk = tl.zeros((COLUMNS, K), tl.float32)
    dv = tl.zeros((COLUMNS, K), tl.float32)
    row = number * part * heads + head
    left = tl.minimum(part, rows - number * part).to(tl.int32)
    for first in range(0, left, ROWS):
        r = first + tl.arange(0, ROWS)
        queries = load_rows(q + row * K, r, r < left, heads * K, K)
        gradients = load_rows(dy + row * K, r, r < left, heads * K, K)
        norm = tl.load(lse + row + r * heads, mask=r < left, other=float("inf"))
        mean = tl.load(delta + row + r * heads, mask=r < left, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(queries), input_precision=PRECISION) * scale - norm[None, :])
        da = tl.dot(v, tl.trans(gradients), input_precision=PRECISION)
        a = p
        if DROPOUT:
            row_keys = tl.load(keys + row + r * heads, mask=r < left, other=0)
            factor = column_factor(row_keys[None, :], i[:, None], threshold, keep_scale)
            a = p * factor
            da *= factor
        dv = tl.dot(a.to(k.dtype), gradients, dv, input_precision=PRECISION)
        ds = p * (da - mean[None, :])
        dk = tl.dot(ds.to(k.dtype), queries, dk, input_precision=PRECISION)
    address = out + ((number * heads + head) * vectors + i[:, None]) * (2 * K) + tl.arange(0, K)[None, :]
    tl.store(address, dk * root, mask=(i < vectors)[:, None])
    tl.store(address + K, dv, mask=(i < vectors)[:, None])
