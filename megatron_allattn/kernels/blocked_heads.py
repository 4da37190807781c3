"""One head at a time of the `blocked` backend: tiles of scores and weights, forward and backward.

Shape letters as in interface.py, and: M a whole number of tiles; S distances of a head, even; T rows of a tile, G tiles
of a stream, R rows of a unit: some tiles of a stream, or all tiles of some streams, whose buffers [R, S + N] are meant
to stay in cache memory. k and v of a position stand side by side, [2·K].
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_allattn.kernels.band import add_windows_, by_distance, tiling, windows
from megatron_allattn.kernels.dropout import TileMask, tile_columns
from megatron_allattn.kernels.interface import (
    AttentionSettings,
    BlockState,
    LayerWeights,
    distances_seen,
    smallest_mask,
    span_slope,
)
from megatron_allattn.kernels.memory import project_cache
from megatron_allattn.kernels.workspace import Workspace

ROWS = 1024  # of a unit, where a stream's tiles allow: 5 MB in float32 with S + N = 1200


@dataclass(frozen=True)
class _Unit:
    """Some streams and some of their tiles: all tiles, or those of one stream. rows: their number."""

    streams: range
    tiles: slice
    rows: int
    first: bool


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
        self._cached = min(state.cached, cache.shape[1]) if masked else cache.shape[1] + state.window
        self._renormalize = settings.normalization == "window" and weights.span is not None
        self._seen = distances_seen(weights.span is not None, settings, state)
        self.count = len(self._seen)
        self._longest = _even(max(self._seen))
        self._units = list(self._all_units())
        self._make_masks()
        self._rows: Tensor | None = None
        self._mask = TileMask(workspace, settings.dropout)
        if state.dropout_keys is not None and settings.dropout > 0:
            queries = torch.arange(self.length, dtype=torch.int32, device=self.device)
            self._rows = state.dropout_keys.attention_rows(state.layer, state.heads, queries)
            self._pairs = tile_columns(self._longest, self.persistent, self.device)

    def _all_units(self) -> Iterator[_Unit]:
        if self.length < ROWS:
            step = ROWS // self.length
            for first in range(0, self.batch, step):
                streams = range(first, min(first + step, self.batch))
                yield _Unit(streams, slice(0, self.tiles), len(streams) * self.length, first == 0)
            return
        step = max(1, ROWS // self.tile)
        for stream in range(self.batch):
            for first in range(0, self.tiles, step):
                tiles = slice(first, min(first + step, self.tiles))
                rows = (tiles.stop - tiles.start) * self.tile
                yield _Unit(range(stream, stream + 1), tiles, rows, stream == first == 0)

    def _make_masks(self) -> None:
        """For all heads by distance, the longest S … 1: m, whether it passes gradient, and what is added to scores."""
        odd = any(seen % 2 for seen in self._seen)
        self._bias = self._masks = self._dmasks = None
        if self.weights.span is None and not odd:
            return
        distances = torch.arange(self._longest, 0, -1, device=self.device)
        beyond = distances > torch.tensor(self._seen, device=self.device)[:, None]  # where S is one more than is seen
        wide = wide_type(self.dtype)
        bias = torch.zeros(beyond.shape, dtype=wide, device=self.device)
        if self.weights.span is not None:
            z, settings = self.weights.span.to(wide), self.settings
            slope = span_slope(z, distances.to(wide), settings.max_span, settings.ramp).squeeze(1)
            self._passes = (slope >= 0) & (slope <= 1) & ~beyond
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
        self.span = _even(seen)
        self.width = self.span + self.persistent
        self._columns = slice(self._longest - self.span, self._longest)  # of what all heads have by distance
        known = self._renormalize or self.state.spans is None  # the mask may end anywhere before the window
        ramp = self.span if known else min(self.span, self.settings.ramp + 2)
        self._ramp = slice(self._columns.start, self._columns.start + (ramp if self.weights.span is not None else 1))
        self.q = self._own(q, self.size)
        self.memory = self._take("memory", self.batch, self.span + self.length, 2 * self.size)
        self._remember(self.memory[:, : self.span])
        self.memory[:, self.span :] = self._own(kv, 2 * self.size).flatten(1, 2)
        self._tables(seen)

    def _own(self, rows: Tensor, width: int) -> Tensor:
        """The head's columns of rows of all heads [B·M, H·width], as [B, G, T, width]."""
        own = rows[:, self.index * width : (self.index + 1) * width]
        return own.unflatten(0, (self.batch, self.tiles, self.tile))

    def _remember(self, out: Tensor) -> None:
        """Put k and v of the S positions before the block into `out` [B, S, 2·K]; zeros where nothing was cached."""
        project_cache(self.cache, self.memory_weight[self.index], out)

    def _tables(self, seen: int) -> None:
        """What scores and outputs multiply besides k and v: positions and persistent vectors side by side, [K, S + N].

        The table of the outputs has the columns from `first_value` on, which are those of the persistent vectors only
        unless positions are on the value side too.
        """
        positions = self.weights.position_key[0]
        self.key_table = self._take("key table", self.size, self.width)
        if seen < self.span:
            self.key_table[:, 0] = 0
        self.key_table[:, self.span - seen : self.span] = positions[:, positions.shape[1] - seen :]
        shared = self.settings.position_values == "shared"
        self.first_value = 0 if shared else self.span
        self.value_table = self._take("value table", self.size, self.width - self.first_value)
        if shared:
            self.value_table[:, : self.span] = self.key_table[:, : self.span]
        if self.weights.persistent_key is not None and self.weights.persistent_value is not None:
            self.key_table[:, self.span :] = self.weights.persistent_key[self.index]
            self.value_table[:, self.span - self.first_value :] = self.weights.persistent_value[self.index].t()

    def _rows_of(self, tensor: Tensor, unit: _Unit) -> Tensor:
        """[B, G, T, K] → the unit's rows [R, K]."""
        return tensor[unit.streams.start : unit.streams.stop, unit.tiles].view(unit.rows, tensor.shape[-1])

    def _streams_of(self, unit: _Unit) -> Iterator[tuple[int, slice]]:
        """Every stream of a unit and its tiles' place among the unit's tiles."""
        count = unit.tiles.stop - unit.tiles.start
        for place, stream in enumerate(unit.streams):
            yield stream, slice(place * count, (place + 1) * count)

    def _windows(self, memory: Tensor, stream: int, unit: _Unit) -> Tensor:
        first = memory[stream, unit.tiles.start * self.tile :]
        return windows(first, unit.tiles.stop - unit.tiles.start, self.tile, self.span)

    def _context(self, buffer: Tensor) -> Tensor:
        """The columns of distances of a row buffer, [tiles, T, S]."""
        return buffer.view(-1, self.tile, self.width)[:, :, : self.span]

    def _keys(self) -> Tensor:
        return self.memory[:, :, : self.size]

    def _values(self) -> Tensor:
        return self.memory[:, :, self.size :]

    def _context_products(self, rows: Tensor, memory: Tensor, unit: _Unit) -> Iterator[tuple[slice, Tensor]]:
        """rows · memory of a stream after the other, [its tiles, T, S], with their place; lost at the next one."""
        tiles = rows.view(-1, self.tile, self.size)
        for stream, place in self._streams_of(unit):
            seen = self._windows(memory, stream, unit)
            skewed = self._take("products", len(seen), self.tile, seen.shape[1])
            torch.bmm(tiles[place], seen.transpose(1, 2), out=skewed)
            yield place, by_distance(skewed, self.span)

    def _skew(self, buffer: Tensor) -> Tensor:
        """The distances of a row buffer by position, [tiles, T, S + T − 1], zero off the band."""
        count = buffer.shape[0] // self.tile
        skewed = self.workspace.zeros("band", (count, self.tile, self.span + self.tile - 1), self.dtype, self.device)
        by_distance(skewed, self.span).copy_(self._context(buffer))
        return skewed

    def _weights_of(self, q: Tensor, unit: _Unit) -> Tensor:
        """The softmax over context and persistent vectors of a unit's rows, [R, S + N], before dropout."""
        a = self._take("weights", unit.rows, self.width)
        torch.mm(q, self.key_table, out=a)
        context = self._context(a)
        for place, product in self._context_products(q, self._keys(), unit):
            context[place] += product
        if self._bias is not None:
            bias = self._bias[self.index, self._ramp]
            a[:, : len(bias)] += bias
        empty = self._empty(unit) if self._cached < self.span else None
        if empty is not None:
            context.masked_fill_(empty, -torch.inf)
        torch.softmax(a, -1, out=a)
        if empty is not None and self.persistent == 0 and self._cached == 0 and unit.tiles.start == 0:
            a.view(len(unit.streams), -1, self.width)[:, 0] = 0  # the first token has nothing to look at
        return a

    def _masked(self, a: Tensor, out: Tensor) -> Tensor:
        """The softmax times the span mask in `out`, made to sum to 1 with the 1e-8. Returns the sums [R, 1]."""
        assert self._masks is not None
        torch.mul(a[:, : self.span], self._masks[self.index, self._columns], out=out[:, : self.span])
        out[:, self.span :] = a[:, self.span :]
        total = out.sum(-1, keepdim=True) + 1e-8
        out /= total
        return total

    def _empty(self, unit: _Unit) -> Tensor:
        """True where a distance leads before the first token, [tiles, T, S]."""
        queries = torch.arange(self.length, device=self.device).view(self.tiles, self.tile, 1)[unit.tiles]
        distances = torch.arange(self.span, 0, -1, device=self.device)
        return (distances > queries + self._cached).repeat(len(unit.streams), 1, 1)

    def _draw(self, unit: _Unit) -> None:
        assert self._rows is not None
        rows = self._rows[unit.streams.start : unit.streams.stop, self.index].view(-1, self.tiles, self.tile)
        pairs = self._pairs[(self._longest - self.span) // 2 :]
        self._mask.draw(rows[:, unit.tiles].reshape(-1), pairs, self.width, self.dtype)

    def forward(self, out: Tensor) -> None:
        """The head's output before the scale of dropout, into its columns of `out` [B·M, H·K]."""
        y = self._take("y", self.batch, self.tiles, self.tile, self.size)
        for unit in self._units:
            a = self._weights_of(self._rows_of(self.q, unit), unit)
            if self._renormalize:
                self._masked(a, out=a)
            if self._rows is not None:
                self._draw(unit)
                self._mask.apply_(a)
            y_rows = self._rows_of(y, unit)
            torch.mm(a[:, self.first_value :], self.value_table.t(), out=y_rows)
            band, y_tiles = self._skew(a), y_rows.view(-1, self.tile, self.size)
            for stream, place in self._streams_of(unit):
                y_tiles[place].baddbmm_(band[place], self._windows(self._values(), stream, unit))
        self._own(out, self.size).copy_(y)

    def backward(self, dy: Tensor, dq: Tensor, dkv: Tensor, grads: "Gradients") -> None:
        """From dy of all heads, with the scale of dropout, to the head's columns of dq (of the divided q) [B·M, H·K]
        and dkv [B·M, H·2·K], and to `grads`."""
        own_dy, own_dq = self._own(dy, self.size), self._take("dq", *self.q.shape)
        shape = (self.batch, self.span + self.length, 2 * self.size)
        dmemory = self.workspace.zeros("dmemory", shape, self.dtype, self.device)
        self._dkey_table = self._take("dkey table", *self.key_table.shape)
        self._dvalue_table = self._take("dvalue table", *self.value_table.shape)
        for unit in self._units:
            q_rows, dy_rows, dq_rows = (self._rows_of(tensor, unit) for tensor in (self.q, own_dy, own_dq))
            self._unit_backward(unit, q_rows, dy_rows, dq_rows, dmemory)
        self._table_gradients(grads)
        known = min(self.span, self.cache.shape[1])
        for stream in range(self.batch if known else 0):
            cached = self.cache[stream, self.cache.shape[1] - known :]
            grads.memory[self.index].addmm_(dmemory[stream, self.span - known : self.span].t(), cached)
        self._own(dkv, 2 * self.size).flatten(1, 2).copy_(dmemory[:, self.span :])
        self._own(dq, self.size).copy_(own_dq)

    def _unit_backward(self, unit: _Unit, q: Tensor, dy: Tensor, dq: Tensor, dmemory: Tensor) -> None:
        p, da = self._weights_of(q, unit), self._take("dweights", unit.rows, self.width)
        a, total = p, None
        if self._renormalize:
            a = self._take("masked weights", unit.rows, self.width)
            total = self._masked(p, out=a)
        dropped = a
        if self._rows is not None:
            self._draw(unit)
            dropped = self._mask.apply_(a, out=da)
        new = 0.0 if unit.first else 1.0
        self._dvalue_table.addmm_(dy.t(), dropped[:, self.first_value :], beta=new)
        self._add_to_memory(self._skew(dropped), dy, dmemory[:, :, self.size :], unit)

        torch.mm(dy, self.value_table, out=da[:, self.first_value :])
        context = self._context(da)
        for place, product in self._context_products(dy, self._values(), unit):
            if self.first_value:
                context[place] = product
            else:  # positions are on the value side: their part is there
                context[place] += product
        if self._rows is not None:
            self._mask.apply_(da)
        if total is not None:
            self._through_mask(p, a, da, total)
        ds = torch.ops.aten._softmax_backward_data.out(da, p, -1, self.dtype, grad_input=da)
        if self._dmasks is not None and total is None:
            dmasks = self._dmasks[self.index, self._ramp]
            dmasks += ds[:, : len(dmasks)].sum(0, dtype=dmasks.dtype)
        self._dkey_table.addmm_(q.t(), ds, beta=new)
        torch.mm(ds, self.key_table.t(), out=dq)
        band, dq_tiles = self._skew(ds), dq.view(-1, self.tile, self.size)
        for stream, place in self._streams_of(unit):
            dq_tiles[place].baddbmm_(band[place], self._windows(self._keys(), stream, unit))
        self._add_to_memory(band, q, dmemory[:, :, : self.size], unit)

    def _through_mask(self, p: Tensor, a: Tensor, da: Tensor, total: Tensor) -> None:
        """`_masked` backward: from da of the masked weights a to that of the softmax p, in place."""
        assert self._masks is not None and self._dmasks is not None
        da -= (a * da).sum(-1, keepdim=True)
        da /= total
        self._dmasks[self.index, self._columns] += (da[:, : self.span] * p[:, : self.span]).sum(0)
        da[:, : self.span] *= self._masks[self.index, self._columns]

    def _add_to_memory(self, band: Tensor, rows: Tensor, memory: Tensor, unit: _Unit) -> None:
        """Add bandᵀ · rows to k's or v's part of a memory, [B, S + M, K]."""
        tiles = rows.view(-1, self.tile, self.size)
        for stream, place in self._streams_of(unit):
            part = band[place]
            parts = self._take("memory parts", len(part), part.shape[2], self.size)
            torch.bmm(part.transpose(1, 2), tiles[place], out=parts)
            add_windows_(memory[stream, unit.tiles.start * self.tile :], parts, self.tile)

    def _table_gradients(self, grads: "Gradients") -> None:
        seen = self._seen[self.index]
        position = grads.position_key[0]
        position = position[:, position.shape[1] - seen :]
        position += self._dkey_table[:, self.span - seen : self.span]
        if grads.persistent_key is not None and grads.persistent_value is not None:
            grads.persistent_key[self.index] = self._dkey_table[:, self.span :]
            grads.persistent_value[self.index] = self._dvalue_table[:, self.span - self.first_value :].t()
        if self.first_value == 0:
            position += self._dvalue_table[:, self.span - seen : self.span]

    def span_gradient(self) -> Tensor | None:
        """dz [H, 1, 1] of the heads that went backward: m rises by L / R where it passes gradient."""
        if self._dmasks is None or self._masks is None:
            return None
        dmasks = self._dmasks if self._renormalize else self._dmasks / self._masks
        dz = (dmasks * self._passes).sum(-1) * (self.settings.max_span / self.settings.ramp)
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
            None if key is None else torch.empty_like(key),
            None if value is None else torch.empty_like(value),
            torch.zeros_like(position, dtype=wide_type(position.dtype)),
        )


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """float32, or what is wider."""
    return dtype if dtype == torch.float64 else torch.float32


def _even(length: int) -> int:
    return length + length % 2
