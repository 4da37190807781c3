"""One head at a time of the `blocked` backend: tiles of scores and weights, forward and backward.

Shape letters as in interface.py, and: M a whole number of tiles; S distances of a head (`columns_of`); T rows of a
tile, G tiles of a stream, R rows of a unit: some tiles of a stream, or all tiles of some streams, whose buffers
[R, S + N] are meant to stay in cache memory. k and v of a position stand side by side, [2·K].
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_allattn.kernels.band import columns_of, tiling, windows
from megatron_allattn.kernels.dropout import tile_columns
from megatron_allattn.kernels.interface import (
    AttentionSettings,
    BlockState,
    LayerWeights,
    distances_seen,
    smallest_mask,
    span_slope,
    wide_type,
)
from megatron_allattn.kernels.memory import project_cache
from megatron_allattn.kernels.passes import Dropout, Passes, Rows
from megatron_allattn.kernels.workspace import Workspace

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


class Heads:
    """The heads of one call; `select` one, then go forward or backward with it.

    block: [B, M, D] · memory_weight [H, 2·K, D]: W_k and W_v of every head.
    """

    def __init__(
        self,
        block: Tensor,
        cache: Tensor,
        weights: LayerWeights,
        memory_weight: Tensor,
        workspace: Workspace,
        passes: Passes,
        settings: AttentionSettings,
        state: BlockState,
    ) -> None:
        self.batch, self.length = block.shape[:2]
        self.cache, self.weights, self.memory_weight = cache, weights, memory_weight
        self.workspace, self.settings, self.state = workspace, settings, state
        self.dtype, self.device = block.dtype, block.device
        self.size = weights.position_key.shape[1]
        self.tiles, self.tile = tiling(self.length)
        self.persistent = 0 if weights.persistent_key is None else weights.persistent_key.shape[2]
        masked = settings.empty_cache == "mask"
        self._shared = settings.position_values == "shared"
        self._renormalize = settings.normalization == "window" and weights.span is not None
        self._seen = distances_seen(weights.span is not None, settings, state)
        self.count = len(self._seen)
        self._longest = columns_of(max(self._seen))
        self._cached = min(state.cached, cache.shape[1]) if masked else cache.shape[1] + self._longest
        self._units = list(self._all_units())
        self._make_masks()
        self._rows: Tensor | None = None
        self._passes = passes
        if state.dropout_keys is not None and settings.dropout > 0:
            queries = torch.arange(self.length, dtype=torch.int32, device=self.device)
            keys = state.dropout_keys.attention_rows(state.layer, state.heads, queries)
            self._rows = keys.transpose(0, 1).contiguous().flatten(1)  # [H, B·M]
            self._pairs = tile_columns(self._longest, self.persistent, self.device)

    def _all_units(self) -> Iterator[_Unit]:
        if self.length < ROWS:
            step = ROWS // self.length
            for first in range(0, self.batch, step):
                streams = range(first, min(first + step, self.batch))
                rows = slice(streams.start * self.length, streams.stop * self.length)
                yield _Unit(streams, slice(0, self.tiles), rows)
            return
        step = max(1, ROWS // self.tile)
        for stream in range(self.batch):
            for first in range(0, self.tiles, step):
                tiles = slice(first, min(first + step, self.tiles))
                start = stream * self.length
                rows = slice(start + tiles.start * self.tile, start + tiles.stop * self.tile)
                yield _Unit(range(stream, stream + 1), tiles, rows)

    def _make_masks(self) -> None:
        """For all heads by distance, the longest S … 1: m, whether it passes gradient, and what is added to scores."""
        padded = any(columns_of(seen) != seen for seen in self._seen)
        self._bias = self._masks = self._dmasks = None
        if self.weights.span is None and not padded:
            return
        distances = torch.arange(self._longest, 0, -1, device=self.device)
        beyond = distances > torch.tensor(self._seen, device=self.device)[:, None]  # S is more than is seen
        wide = wide_type(self.dtype)
        bias = torch.zeros(beyond.shape, dtype=wide, device=self.device)
        if self.weights.span is not None:
            z, settings = self.weights.span.to(wide), self.settings
            slope = span_slope(z, distances.to(wide), settings.max_span, settings.ramp).squeeze(1)
            self._through = (slope >= 0) & (slope <= 1) & ~beyond
            self._masks = slope.clamp(0, 1)
            self._dmasks = torch.zeros_like(slope)
            if not self._renormalize:
                self._masks.clamp_(smallest_mask(wide))
                bias = self._masks.log().masked_fill_(slope < 0, -torch.inf)
        self._bias = bias.masked_fill_(beyond, -torch.inf)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self.workspace.take(name, shape, self.dtype, self.device)

    def select(self, index: int, q: Tensor, kv: Tensor) -> None:
        """Prepare a head. q (of all heads, divided by √K) [B·M, H·K]; kv [B·M, H·2·K]."""
        self.index, seen = index, self._seen[index]
        self.span = columns_of(seen)
        self.width = self.span + self.persistent
        self._columns = slice(self._longest - self.span, self._longest)  # of what all heads have by distance
        ramp = self.span  # the columns that are hidden or in the mask's ramp, where the host knows its end
        if self.weights.span is None:
            ramp = self.span - seen
        elif not self._renormalize and self.state.spans is not None:
            ramp = min(self.span, self.span - seen + self.settings.ramp + 2)
        self._ramp = slice(self._columns.start, self._columns.start + ramp)
        table = self.weights.position_key[0]
        self._positions = table[:, max(0, table.shape[1] - self.span) :]
        self._distances = slice(self.span - self._positions.shape[1], self.span)
        self.q = self._own(q, self.size)
        self.memory = self._take("memory", self.batch, self.span + self.length, 2 * self.size)
        self._remember(self.memory[:, : self.span])
        self.memory[:, self.span :] = self._own(kv, 2 * self.size).unflatten(0, (self.batch, -1))

    def _own(self, rows: Tensor, width: int) -> Tensor:
        """The head's columns of rows of all heads [B·M, H·width]."""
        return rows[:, self.index * width : (self.index + 1) * width]

    def _remember(self, out: Tensor) -> None:
        """Put k and v of the S positions before the block into `out` [B, S, 2·K]; zeros where nothing was cached."""
        project_cache(self.cache, self.memory_weight[self.index], out)

    def _windows(self, memory: Tensor, stream: int, unit: _Unit) -> Tensor:
        first = memory[stream, unit.tiles.start * self.tile :]
        return windows(first, unit.tiles.stop - unit.tiles.start, self.tile, self.span)

    def _keys(self) -> Tensor:
        return self.memory[:, :, : self.size]

    def _values(self) -> Tensor:
        return self.memory[:, :, self.size :]

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

    def _describe(self, unit: _Unit) -> Rows:
        """A unit's rows as a pass sees them."""
        dropout = None
        if self._rows is not None:
            pairs = self._pairs[(self._longest - self.span) // 2 :]
            dropout = Dropout(self._rows[self.index, unit.rows], pairs, self.settings.dropout)
        return Rows(
            span=self.span,
            tile=self.tile,
            bias=None if self._bias is None else self._bias[self.index, self._ramp],
            factors=self._masks[self.index, self._columns] if self._renormalize and self._masks is not None else None,
            dropout=dropout,
            first=unit.tiles.start * self.tile,
            length=self.length,
            known=self._cached,
        )

    def _scores(self, q: Tensor, unit: _Unit) -> tuple[Tensor, Tensor]:
        """Of a unit's rows: [R, S + N], the context's without k, and those by position."""
        scores = self._take("weights", unit.count, self.width)
        torch.mm(q, self._positions, out=scores[:, self._distances])
        scores[:, : self._distances.start] = 0
        if self.weights.persistent_key is not None:
            torch.mm(q, self.weights.persistent_key[self.index], out=scores[:, self.span :])
        return scores, self._context_products(q, self._keys(), unit)

    def forward(self, out: Tensor) -> None:
        """The head's output before the scale of dropout, into its columns of `out` [B·M, H·K]."""
        y = self._take("y", len(out), self.size)
        for unit in self._units:
            weights, band = self._scores(self.q[unit.rows], unit)
            self._passes.weights(self._describe(unit), weights, band, out=weights)
            own = y[unit.rows]
            if self.weights.persistent_value is not None:
                torch.mm(weights[:, self.span :], self.weights.persistent_value[self.index], out=own)
            else:
                own.zero_()
            if self._shared:
                own.addmm_(weights[:, self._distances], self._positions.t())
            self._add_context(own, band, self._values(), unit)
        self._own(out, self.size).copy_(y)

    def backward(self, dy: Tensor, dq: Tensor, dkv: Tensor, grads: "Gradients") -> None:
        """From dy of all heads, with the scale of dropout, to the head's columns of dq (of the divided q) [B·M, H·K]
        and dkv [B·M, H·2·K], and to `grads`."""
        own_dy, own_dq = self._own(dy, self.size), self._take("dq", len(dq), self.size)
        shape = (self.batch, self.span + self.length, 2 * self.size)
        dmemory = self.workspace.zeros("dmemory", shape, self.dtype, self.device)
        for unit in self._units:
            self._unit_backward(unit, own_dy[unit.rows], own_dq[unit.rows], dmemory, grads)
        known = min(self.span, self.cache.shape[1])
        for stream in range(self.batch if known else 0):
            cached = self.cache[stream, self.cache.shape[1] - known :]
            grads.memory[self.index].addmm_(dmemory[stream, self.span - known : self.span].t(), cached)
        self._own(dkv, 2 * self.size).unflatten(0, (self.batch, -1)).copy_(dmemory[:, self.span :])
        self._own(dq, self.size).copy_(own_dq)

    def _unit_backward(self, unit: _Unit, dy: Tensor, dq: Tensor, dmemory: Tensor, grads: "Gradients") -> None:
        q, rows, persistent = self.q[unit.rows], self._describe(unit), slice(self.span, self.width)
        softmax, band = self._scores(q, unit)
        ds = self._take("dweights", unit.count, self.width)
        weights = softmax if rows.dropout is None and rows.factors is None else ds
        self._passes.weights(rows, softmax, band, out=weights)
        if grads.persistent_value is not None:
            grads.persistent_value[self.index].addmm_(weights[:, persistent].t(), dy)
        self._add_to_memory(band, dy, dmemory[:, :, self.size :], unit)
        if self._shared:
            self._add_to_positions(grads, dy, weights)

        band = self._context_products(dy, self._values(), unit)
        if self.weights.persistent_value is not None:
            torch.mm(dy, self.weights.persistent_value[self.index].t(), out=ds[:, persistent])
        if self._shared:
            torch.mm(dy, self._positions, out=ds[:, self._distances])
            ds[:, : self._distances.start] = 0
        through = self._passes.gradients(rows, softmax, ds, band, both=self._shared)
        if self._dmasks is not None and through is not None:
            columns = self._columns if self._renormalize else self._ramp
            self._dmasks[self.index, columns] += through
        torch.mm(ds[:, self._distances], self._positions.t(), out=dq)
        if self.weights.persistent_key is not None and grads.persistent_key is not None:
            grads.persistent_key[self.index].addmm_(q.t(), ds[:, persistent])
            dq.addmm_(ds[:, persistent], self.weights.persistent_key[self.index].t())
        self._add_to_positions(grads, q, ds)
        self._add_context(dq, band, self._keys(), unit)
        self._add_to_memory(band, q, dmemory[:, :, : self.size], unit)

    def _add_to_positions(self, grads: "Gradients", rows: Tensor, by_distance: Tensor) -> None:
        """Add rowsᵀ · by_distance, [K, S], to the gradient of the position table, which may be of a wider type."""
        own, product = grads.position_key[0], (rows.t(), by_distance[:, self._distances])
        own = own[:, own.shape[1] - self._positions.shape[1] :]
        if own.dtype == self.dtype:
            own.addmm_(*product)
        else:
            own += torch.mm(*product)

    def _add_to_memory(self, band: Tensor, rows: Tensor, memory: Tensor, unit: _Unit) -> None:
        """Add bandᵀ · rows to k's or v's part of a memory, [B, S + M, K]."""
        tiles = rows.unflatten(0, (-1, self.tile))
        for stream, place in unit.places:
            part = band[place]
            parts = self._take("memory parts", len(part), part.shape[2], self.size)
            torch.bmm(part.transpose(1, 2), tiles[place], out=parts)
            self._passes.add_windows(memory[stream, unit.tiles.start * self.tile :], parts, self.tile)

    def span_gradient(self) -> Tensor | None:
        """dz [H, 1, 1] of the heads that went backward: m rises by L / R where it passes gradient."""
        if self._dmasks is None or self._masks is None:
            return None
        dmasks = self._dmasks if self._renormalize else self._dmasks / self._masks
        dz = (dmasks * self._through).sum(-1) * (self.settings.max_span / self.settings.ramp)
        return dz[:, None, None].to(self.dtype)


@dataclass(frozen=True)
class Gradients:
    """What the heads add to: `memory` [H, 2·K, D] and, in float32 at least, the position table's."""

    memory: Tensor
    persistent_key: Tensor | None
    persistent_value: Tensor | None
    position_key: Tensor

    @classmethod
    def of(cls, weights: LayerWeights, memory_weight: Tensor) -> "Gradients":
        key, value, position = weights.persistent_key, weights.persistent_value, weights.position_key
        return cls(
            torch.zeros_like(memory_weight),
            None if key is None else torch.zeros_like(key),
            None if value is None else torch.zeros_like(value),
            torch.zeros_like(position, dtype=wide_type(position.dtype)),
        )
