"""The heads of the `blocked` backend in PyTorch's operators, on any device: one head at a time, in tiles.

Shape letters as in interface.py, and: M a whole number of tiles; S distances of a head (columns.py); T rows of a tile,
G tiles of a stream, R rows of a unit: some tiles of a stream, or all tiles of some streams, whose buffers [R, S + N]
are meant to stay in cache memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_allattn.kernels.band import windows
from megatron_allattn.kernels.blocked_call import BlockedCall, Gradients, Projected
from megatron_allattn.kernels.dropout import DropoutRows
from megatron_allattn.kernels.passes import Rows, TorchPasses

ROWS = 1024  # of a unit, where a stream's tiles allow: 5 MB in float32 with S + N = 1200


@dataclass(frozen=True)
class _Unit:
    """Some streams and some of their tiles: all tiles, or those of one stream. rows: among the B·M of the block."""

    streams: range
    tiles: slice
    rows: slice

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def places(self) -> Iterator[tuple[int, slice]]:
        """Every stream and its tiles' place among the unit's tiles."""
        count = self.tiles.stop - self.tiles.start
        for place, stream in enumerate(self.streams):
            yield stream, slice(place * count, (place + 1) * count)


def _units(batch: int, length: int, tile: int) -> Iterator[_Unit]:
    tiles, streams, step = length // tile, max(1, ROWS // length), max(1, ROWS // tile)
    for stream in range(0, batch, streams):
        for first in range(0, tiles, step):
            own, of_stream = range(stream, min(stream + streams, batch)), slice(first, min(first + step, tiles))
            start = stream * length + first * tile
            count = len(own) * (of_stream.stop - first) * tile
            yield _Unit(own, of_stream, slice(start, start + count))


class TorchHeads:
    """`Heads` of any call."""

    def __init__(self, call: BlockedCall) -> None:
        self._call, self._passes = call, TorchPasses(call.workspace)

    def forward(self, projected: Projected) -> Tensor:
        y = torch.empty_like(projected.q)
        for index in range(self._call.heads):
            _Head(self._call, self._passes, index, projected).forward(y)
        return y

    def backward(self, projected: Projected, dy: Tensor, grads: Gradients) -> Projected:
        of = Projected(*(torch.empty_like(one) for one in (projected.q, projected.k, projected.v)))
        for index in range(self._call.heads):
            _Head(self._call, self._passes, index, projected).backward(dy, of, grads)
        return of


class _Head:
    """One head, with k and v of all that it sees, [B, S + M, K]."""

    def __init__(self, call: BlockedCall, passes: TorchPasses, index: int, projected: Projected) -> None:
        self.call, self._passes, self.index = call, passes, index
        self.tile, self.span = call.tile, call.columns.spans[index]
        self.width = self.span + call.persistent
        self._units = list(_units(call.batch, call.length, call.tile))
        self._columns = call.columns.of(index)  # of what all heads have by distance
        self._biased = slice(self._columns.start, self._columns.start + call.columns.biased[index])
        table = call.weights.position_key[0]
        self._positions = table[:, max(0, table.shape[1] - self.span) :]
        self._distances = slice(self.span - self._positions.shape[1], self.span)
        self.q = self._own(projected.q)
        weights, kept = call.weights, call.kept
        self.keys = self._memory("k", projected.k, weights.key, None if kept is None else kept.keys)
        self.values = self._memory("v", projected.v, weights.value, None if kept is None else kept.values)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self.call.workspace.take(name, shape, self.call.block.dtype, self.call.block.device)

    def _own(self, rows: Tensor) -> Tensor:
        """The head's columns of rows of all heads [B·M, H·K], or its rows of a weight [H·K, D] when transposed."""
        return rows[:, self.index * self.call.size : (self.index + 1) * self.call.size]

    def _memory(self, name: str, rows: Tensor, weight: Tensor, kept: Tensor | None) -> Tensor:
        """k or v of the S positions before the block, zeros where nothing was cached, and of its own."""
        call = self.call
        memory = self._take(name, call.batch, self.span + call.length, call.size)
        known = min(self.span, call.cache.shape[1] if call.kept is None else call.kept.spans[self.index])
        memory[:, : self.span - known] = 0
        before = memory[:, self.span - known : self.span]
        if kept is not None and call.kept is not None:
            end = call.kept.starts[self.index] + call.kept.spans[self.index]
            before.copy_(kept[:, end - known : end])
        elif known:
            seen = call.cache[:, call.cache.shape[1] - known :]
            torch.bmm(seen, self._own(weight.t()).expand(call.batch, -1, -1), out=before)
        memory[:, self.span :] = self._own(rows).unflatten(0, (call.batch, -1))
        return memory

    def _windows(self, memory: Tensor, stream: int, unit: _Unit) -> Tensor:
        first = memory[stream, unit.tiles.start * self.tile :]
        return windows(first, unit.tiles.stop - unit.tiles.start, self.tile, self.span)

    def _context_products(self, rows: Tensor, memory: Tensor, unit: _Unit) -> Tensor:
        """rows [R, K] · memory by position, [tiles, T, S + T − 1]; lost at the next call."""
        tiles = rows.unflatten(0, (-1, self.tile))
        band = self._take("band", len(tiles), self.tile, self.span + self.tile - 1)
        for stream, place in unit.places:
            torch.bmm(tiles[place], self._windows(memory, stream, unit).transpose(1, 2), out=band[place])
        return band

    def _add_context(self, out: Tensor, band: Tensor, memory: Tensor, unit: _Unit) -> None:
        """Add band · memory to a unit's rows [R, K]."""
        tiles = out.unflatten(0, (-1, self.tile))
        for stream, place in unit.places:
            tiles[place].baddbmm_(band[place], self._windows(memory, stream, unit))

    def _describe(self, unit: _Unit, *, backward: bool) -> Rows:
        """A unit's rows as a pass sees them."""
        columns, dropout = self.call.columns, None
        if (keys := self.call.dropout) is not None:
            pairs = keys.pairs[(columns.longest - self.span) // 2 :]
            dropout = DropoutRows(keys.rows[self.index, unit.rows], pairs, keys.probability)
        return Rows(
            span=self.span,
            tile=self.tile,
            bias=None if columns.bias is None else columns.bias[self.index, self._biased],
            factors=None if columns.factors is None else columns.factors[self.index, self._columns],
            dropout=dropout,
            first=unit.tiles.start * self.tile,
            length=self.call.length,
            known=self.call.known,
            edge=self._edge() if backward else None,
        )

    def _edge(self) -> Tensor | None:
        """The column of the mask's end; any where there is none, of which nothing is used."""
        edges = self.call.columns.edges
        return None if edges is None else (self.span - edges[self.index, None]).clamp(max=self.span - 1)

    def _scores(self, q: Tensor, unit: _Unit) -> tuple[Tensor, Tensor]:
        """Of a unit's rows: [R, S + N], the context's without k, and those by position."""
        scores, persistent_key = self._take("weights", unit.count, self.width), self.call.weights.persistent_key
        torch.mm(q, self._positions, out=scores[:, self._distances])
        scores[:, : self._distances.start] = 0
        if persistent_key is not None:
            torch.mm(q, persistent_key[self.index], out=scores[:, self.span :])
        return scores, self._context_products(q, self.keys, unit)

    def forward(self, out: Tensor) -> None:
        """The head's output before the scale of dropout, into its columns of `out` [B·M, H·K]."""
        y, persistent_value = self._take("y", len(out), self.call.size), self.call.weights.persistent_value
        for unit in self._units:
            weights, band = self._scores(self.q[unit.rows], unit)
            self._passes.weights(self._describe(unit, backward=False), weights, band, out=weights)
            own = y[unit.rows]
            if persistent_value is not None:
                torch.mm(weights[:, self.span :], persistent_value[self.index], out=own)
            else:
                own.zero_()
            if self.call.shared:
                own.addmm_(weights[:, self._distances], self._positions.t())
            self._add_context(own, band, self.values, unit)
        self._own(out).copy_(y)

    def backward(self, dy: Tensor, of: Projected, grads: Gradients) -> None:
        """From dy of all heads to the head's columns of `of`, and to `grads`."""
        call = self.call
        own_dy, dq = self._own(dy), self._take("dq", len(dy), call.size)
        shape, block = self.keys.shape, call.block
        dk, dv = (call.workspace.zeros(name, shape, block.dtype, block.device) for name in ("dk", "dv"))
        for unit in self._units:
            self._unit_backward(unit, own_dy[unit.rows], dq[unit.rows], dk, dv, grads)
        self._own(of.q).copy_(dq)
        known = min(self.span, call.cache.shape[1])
        for dmemory, rows, dweight in ((dk, of.k, grads.key), (dv, of.v, grads.value)):
            for stream in range(call.batch if known else 0):
                cached = call.cache[stream, call.cache.shape[1] - known :]
                through = dmemory[stream, self.span - known : self.span]
                self._own(dweight.t()).addmm_(cached.t(), through)
            self._own(rows).unflatten(0, (call.batch, -1)).copy_(dmemory[:, self.span :])

    def _unit_backward(self, unit: _Unit, dy: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, grads: Gradients) -> None:
        q, rows, persistent = self.q[unit.rows], self._describe(unit, backward=True), slice(self.span, self.width)
        own_key, own_value = self.call.weights.persistent_key, self.call.weights.persistent_value
        softmax, band = self._scores(q, unit)
        ds = self._take("dweights", unit.count, self.width)
        weights = softmax if rows.dropout is None and rows.factors is None else ds
        self._passes.weights(rows, softmax, band, out=weights)
        if grads.persistent_value is not None:
            grads.persistent_value[self.index].addmm_(weights[:, persistent].t(), dy)
        self._add_to_memory(band, dy, dv, unit)
        if self.call.shared:
            self._add_to_positions(grads, dy, weights)

        band = self._context_products(dy, self.values, unit)
        if own_value is not None:
            torch.mm(dy, own_value[self.index].t(), out=ds[:, persistent])
        if self.call.shared:
            torch.mm(dy, self._positions, out=ds[:, self._distances])
            ds[:, : self._distances.start] = 0
        through, of_edge = self._passes.gradients(rows, softmax, ds, band, both=self.call.shared)
        if grads.edges is not None and of_edge is not None:
            grads.edges[self.index] += of_edge
        if grads.columns is not None and through is not None:
            columns = self._biased if rows.factors is None else self._columns
            grads.columns[self.index, columns] += through
        torch.mm(ds[:, self._distances], self._positions.t(), out=dq)
        if own_key is not None and grads.persistent_key is not None:
            grads.persistent_key[self.index].addmm_(q.t(), ds[:, persistent])
            dq.addmm_(ds[:, persistent], own_key[self.index].t())
        self._add_to_positions(grads, q, ds)
        self._add_context(dq, band, self.keys, unit)
        self._add_to_memory(band, q, dk, unit)

    def _add_to_positions(self, grads: Gradients, rows: Tensor, by_distance: Tensor) -> None:
        """Add rowsᵀ · by_distance, [K, S], to the gradient of the position table, which may be of a wider type."""
        own, product = grads.position_key[0], (rows.t(), by_distance[:, self._distances])
        own = own[:, own.shape[1] - self._positions.shape[1] :]
        if own.dtype == rows.dtype:
            own.addmm_(*product)
        else:
            own += torch.mm(*product)

    def _add_to_memory(self, band: Tensor, rows: Tensor, memory: Tensor, unit: _Unit) -> None:
        """Add bandᵀ · rows to gradients of k or v, [B, S + M, K]."""
        tiles = rows.unflatten(0, (-1, self.tile))
        for stream, place in unit.places:
            part = band[place]
            parts = self._take("memory parts", len(part), part.shape[2], self.call.size)
            torch.bmm(part.transpose(1, 2), tiles[place], out=parts)
            self._passes.add_windows(memory[stream, unit.tiles.start * self.tile :], parts, self.tile)
