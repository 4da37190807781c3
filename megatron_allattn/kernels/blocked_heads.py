"""One head at a time of the `blocked` backend: tiles of scores and weights, forward and backward.

Shape letters as in interface.py, and: S distances of a head, even; T rows of a tile, G tiles of a stream, R rows of a
unit: some tiles of a stream, or all tiles of some streams, whose buffers [R, S + N] are meant to stay in cache memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.kernels.band import add_windows_, by_distance, tiling, windows
from megatron_allattn.kernels.dropout import TileMask, tile_columns
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights, distances_seen, span_slope
from megatron_allattn.kernels.workspace import Workspace
from megatron_allattn.parallel.random import keep_scale

ROWS = 1024  # of a unit, where a stream's tiles allow: 5 MB in float32 with S + N = 1200


@dataclass(frozen=True)
class Gradients:
    """What the heads add to; those of span and position in float32 at least."""

    query: Tensor
    key: Tensor
    value: Tensor
    persistent_key: Tensor | None
    persistent_value: Tensor | None
    span: Tensor | None
    position_key: Tensor

    @classmethod
    def of(cls, weights: LayerWeights) -> "Gradients":
        def zeros(name: str, dtype: torch.dtype | None = None) -> Any:
            tensor = getattr(weights, name)
            return None if tensor is None else torch.zeros_like(tensor, dtype=dtype)

        summed = {name: _wide(weights.query.dtype) for name in ("span", "position_key")}
        return cls(**{name: zeros(name, summed.get(name)) for name in cls.__dataclass_fields__})

    def cast(self, weights: LayerWeights) -> tuple[Tensor | None, ...]:
        """In the order and the types of the weights."""
        pairs = ((getattr(self, name), getattr(weights, name)) for name in self.__dataclass_fields__)
        return tuple(None if gradient is None else gradient.to(weight.dtype) for gradient, weight in pairs)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Unit:
    """Some streams and some of their tiles: all tiles, or those of one stream. rows: their number."""

    streams: range
    tiles: slice
    rows: int


class Heads:
    """The heads of one call; `select` one, then go forward or backward with it."""

    def __init__(
        self,
        block: Tensor,
        cache: Tensor,
        weights: LayerWeights,
        workspace: Workspace,
        settings: AttentionSettings,
        state: BlockState,
    ) -> None:
        self.batch, self.length = block.shape[:2]
        self.cache, self.weights = cache, weights
        self.workspace, self.settings, self.state = workspace, settings, state
        self.dtype, self.device = block.dtype, block.device
        self.size = weights.position_key.shape[1]
        self.tiles, self.tile = tiling(self.length)
        self.padded = self.tiles * self.tile
        self.persistent = 0 if weights.persistent_key is None else weights.persistent_key.shape[2]
        masked = settings.empty_cache == "mask"
        self._cached = min(state.cached, cache.shape[1]) if masked else cache.shape[1] + state.window
        self._renormalize = settings.normalization == "window" and weights.span is not None
        self._seen = distances_seen(weights.span is not None, settings, state)
        self._slopes = self._all_slopes()
        self._rows: Tensor | None = None
        self._mask = TileMask(workspace, settings.dropout)
        if state.dropout_keys is not None and settings.dropout > 0:
            queries = torch.arange(self.padded, dtype=torch.int32, device=self.device)
            self._rows = state.dropout_keys.attention_rows(state.layer, state.heads, queries)

    def _all_slopes(self) -> Tensor | None:
        """The span mask before its clamp, [H, longest S], for the distances longest S … 1."""
        if self.weights.span is None:
            return None
        distances = torch.arange(_even(max(self._seen)), 0, -1, device=self.device)
        z, wide = self.weights.span, _wide(self.dtype)
        return span_slope(z.to(wide), distances.to(wide), self.settings.max_span, self.settings.ramp).squeeze(1)

    def columns(self) -> Iterator[tuple[int, slice]]:
        """Every head's index and its columns of q, k, v and y."""
        for index in range(len(self._seen)):
            yield index, slice(index * self.size, (index + 1) * self.size)

    def _units(self) -> Iterator[_Unit]:
        if self.padded < ROWS:
            step = ROWS // self.padded
            for first in range(0, self.batch, step):
                streams = range(first, min(first + step, self.batch))
                yield _Unit(streams, slice(0, self.tiles), len(streams) * self.padded)
            return
        step = max(1, ROWS // self.tile)
        for stream in range(self.batch):
            for first in range(0, self.tiles, step):
                tiles = slice(first, min(first + step, self.tiles))
                yield _Unit(range(stream, stream + 1), tiles, (tiles.stop - tiles.start) * self.tile)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self.workspace.take(name, shape, self.dtype, self.device)

    def select(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Prepare a head. q (divided by √K), k and v of the block: [B·M, K]."""
        self.index, seen = index, self._seen[index]
        self.span = span = _even(seen)
        self.width = span + self.persistent
        self.q = self._take("q", self.batch, self.tiles, self.tile, self.size)
        self._pad(q, self.q.view(self.batch, self.padded, self.size))
        self.keys, self.values = (
            self._memory("keys", k, self.weights.key),
            self._memory("values", v, self.weights.value),
        )
        self._tables(seen)
        self._bias(seen)
        if self._rows is not None:
            self._pairs = tile_columns(span, self.persistent, self.device)
        self.skewed = (self.tiles, self.tile, span + self.tile - 1)

    def _pad(self, rows: Tensor, out: Tensor) -> None:
        """[B·M, K] into [B, G·T, K], zeros behind."""
        out[:, : self.length] = rows.unflatten(0, (self.batch, self.length))
        out[:, self.length :] = 0

    def _head_rows(self, weight: Tensor) -> Tensor:
        return weight[self.index * self.size : (self.index + 1) * self.size]

    def _memory(self, name: str, rows: Tensor, weight: Tensor) -> Tensor:
        """k or v of the S positions before the block and of the block, [B, S + G·T, K]."""
        memory = self._take(name, self.batch, self.span + self.padded, self.size)
        self._remember(name, self._head_rows(weight), memory[:, : self.span])
        self._pad(rows, memory[:, self.span :])
        return memory

    def _remember(self, name: str, weight: Tensor, out: Tensor) -> None:
        """Put k or v of the S positions before the block into `out` [B, S, K]; zeros where nothing was cached."""
        known = min(self.span, self.cache.shape[1])
        out[:, : self.span - known] = 0
        for stream in range(self.batch if known else 0):
            cached = self.cache[stream, self.cache.shape[1] - known :]
            torch.mm(cached, weight.t(), out=out[stream, self.span - known :])

    def _tables(self, seen: int) -> None:
        """What scores and outputs multiply besides k and v: positions and persistent vectors side by side, [K, S + N].

        The table of the outputs has the columns from `first_value` on, which are those of the persistent vectors only
        unless positions are on the value side too.
        """
        positions = self.weights.position_key[0]
        self.key_table = self._take("key table", self.size, self.width)
        self.key_table[:, : self.span - seen] = 0
        self.key_table[:, self.span - seen : self.span] = positions[:, positions.shape[1] - seen :]
        shared = self.settings.position_values == "shared"
        self.first_value = 0 if shared else self.span
        self.value_table = self._take("value table", self.size, self.width - self.first_value)
        if shared:
            self.value_table[:, : self.span] = self.key_table[:, : self.span]
        if self.weights.persistent_key is not None and self.weights.persistent_value is not None:
            self.key_table[:, self.span :] = self.weights.persistent_key[self.index]
            self.value_table[:, self.span - self.first_value :] = self.weights.persistent_value[self.index].t()

    def _bias(self, seen: int) -> None:
        """The columns where m may be below 1: m, whether it passes gradient, and what is added to scores (log m)."""
        self.bias: Tensor | None = None
        if self._slopes is not None:
            whole = self._renormalize or self.state.spans is None  # the mask may end anywhere before the window
            ramp = self.span if whole else min(self.span, self.settings.ramp + 2)
            slope = self._slopes[self.index, self._slopes.shape[1] - self.span :][:ramp]
            self.passes = (slope >= 0) & (slope <= 1)
            self.masks = slope.clamp(0, 1)
            if not self._renormalize:
                # At the mask's end m = 0 has a gradient: a number too small to be seen in the output stands for it.
                self.masks = self.masks.clamp_(_tiny(slope.dtype))
                self.bias = self.masks.log().masked_fill(slope < 0, -torch.inf)
        if seen < self.span:  # the column that makes S even
            self.bias = self.key_table.new_zeros(1) if self.bias is None else self.bias
            self.bias[0] = -torch.inf
            if self._slopes is not None:
                self.passes[0] = False

    def _rows_of(self, tensor: Tensor, unit: _Unit) -> Tensor:
        """[B, G, T, K] → the unit's rows [R, K]."""
        return tensor[unit.streams.start : unit.streams.stop, unit.tiles].view(unit.rows, self.size)

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
        for place, product in self._context_products(q, self.keys, unit):
            context[place] += product
        if self.bias is not None:
            a[:, : len(self.bias)] += self.bias
        empty = self._empty(unit) if self._cached < self.span else None
        if empty is not None:
            context.masked_fill_(empty, -torch.inf)
        torch.softmax(a, -1, out=a)
        if empty is not None and self.persistent == 0 and self._cached == 0 and unit.tiles.start == 0:
            a.view(len(unit.streams), -1, self.width)[:, 0] = 0  # the first token has nothing to look at
        return a

    def _masked(self, a: Tensor, out: Tensor) -> Tensor:
        """The softmax times the span mask in `out`, made to sum to 1 with the 1e-8. Returns the sums [R, 1]."""
        torch.mul(a[:, : self.span], self.masks, out=out[:, : self.span])
        out[:, self.span :] = a[:, self.span :]
        total = out.sum(-1, keepdim=True) + 1e-8
        out /= total
        return total

    def _empty(self, unit: _Unit) -> Tensor:
        """True where a distance leads before the first token, [tiles, T, S]."""
        queries = torch.arange(self.padded, device=self.device).view(self.tiles, self.tile, 1)[unit.tiles]
        distances = torch.arange(self.span, 0, -1, device=self.device)
        return (distances > queries + self._cached).repeat(len(unit.streams), 1, 1)

    def _draw(self, unit: _Unit) -> None:
        assert self._rows is not None
        rows = self._rows[unit.streams.start : unit.streams.stop, self.index].view(-1, self.tiles, self.tile)
        self._mask.draw(rows[:, unit.tiles].reshape(-1), self._pairs, self.width, self.dtype)

    def forward(self, out: Tensor) -> None:
        """The head's output [B·M, K]."""
        y = self._take("y", self.batch, self.tiles, self.tile, self.size)
        for unit in self._units():
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
                y_tiles[place].baddbmm_(band[place], self._windows(self.values, stream, unit))
        self._unpad(y, out)

    def _unpad(self, rows: Tensor, out: Tensor) -> None:
        """[B, G, T, K] into [B·M, K]; with dropout, scaled by what is kept."""
        found = rows.view(self.batch, self.padded, self.size)[:, : self.length]
        out.unflatten(0, (self.batch, self.length)).copy_(found)
        if self._rows is not None:
            out *= keep_scale(self.settings.dropout)

    def backward(self, dy: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, grads: Gradients) -> None:
        """From the head's dy [B·M, K] to its dq (of the divided q), dk and dv [B·M, K], and to `grads`."""
        dy_padded = self._take("dy", self.batch, self.tiles, self.tile, self.size)
        self._pad(dy, dy_padded.view(self.batch, self.padded, self.size))
        if self._rows is not None:
            dy_padded *= keep_scale(self.settings.dropout)
        dq_padded = self._take("dq", *dy_padded.shape)
        shape = (self.batch, self.span + self.padded, self.size)
        dkeys, dvalues = (self.workspace.zeros(name, shape, self.dtype, self.device) for name in ("dkeys", "dvalues"))
        self._dkey_table = self.workspace.zeros("dkey table", self.key_table.shape, self.dtype, self.device)
        self._dvalue_table = self.workspace.zeros("dvalue table", self.value_table.shape, self.dtype, self.device)
        for unit in self._units():
            q_rows, dy_rows, dq_rows = (self._rows_of(tensor, unit) for tensor in (self.q, dy_padded, dq_padded))
            self._unit_backward(unit, q_rows, dy_rows, dq_rows, dkeys, dvalues, grads)
        self._table_gradients(grads)
        for memory, weight, out in ((dkeys, grads.key, dk), (dvalues, grads.value, dv)):
            self._memory_gradients(memory, self._head_rows(weight), out)
        dq.unflatten(0, (self.batch, self.length)).copy_(
            dq_padded.view(self.batch, self.padded, self.size)[:, : self.length]
        )

    def _unit_backward(
        self, unit: _Unit, q: Tensor, dy: Tensor, dq: Tensor, dkeys: Tensor, dvalues: Tensor, grads: Gradients
    ) -> None:
        p, da = self._weights_of(q, unit), self._take("dweights", unit.rows, self.width)
        a, total = p, None
        if self._renormalize:
            a = self._take("masked weights", unit.rows, self.width)
            total = self._masked(p, out=a)
        dropped = a
        if self._rows is not None:
            self._draw(unit)
            dropped = self._mask.apply_(a, out=da)
        self._dvalue_table.addmm_(dy.t(), dropped[:, self.first_value :])
        self._add_to_memory(self._skew(dropped), dy, dvalues, unit)

        torch.mm(dy, self.value_table, out=da[:, self.first_value :])
        context = self._context(da)
        for place, product in self._context_products(dy, self.values, unit):
            if self.first_value:
                context[place] = product
            else:  # positions are on the value side: their part is there
                context[place] += product
        if self._rows is not None:
            self._mask.apply_(da)
        if total is not None:
            da -= (a * da).sum(-1, keepdim=True)
            da /= total
            self._add_span_gradient((da[:, : self.span] * p[:, : self.span]).sum(0), grads)
            da[:, : self.span] *= self.masks
        ds = torch.ops.aten._softmax_backward_data.out(da, p, -1, self.dtype, grad_input=da)
        if self._slopes is not None and total is None:
            self._add_span_gradient(ds[:, : len(self.masks)].sum(0, dtype=self.masks.dtype) / self.masks, grads)
        self._dkey_table.addmm_(q.t(), ds)
        torch.mm(ds, self.key_table.t(), out=dq)
        band, dq_tiles = self._skew(ds), dq.view(-1, self.tile, self.size)
        for stream, place in self._streams_of(unit):
            dq_tiles[place].baddbmm_(band[place], self._windows(self.keys, stream, unit))
        self._add_to_memory(band, q, dkeys, unit)

    def _add_span_gradient(self, dmasks: Tensor, grads: Gradients) -> None:
        """From the gradients of m by column to that of z: m rises by L / R where it passes gradient."""
        assert grads.span is not None
        grads.span[self.index] += (dmasks * self.passes).sum() * (self.settings.max_span / self.settings.ramp)

    def _add_to_memory(self, band: Tensor, rows: Tensor, memory: Tensor, unit: _Unit) -> None:
        """Add bandᵀ · rows to a memory [B, S + G·T, K]."""
        tiles = rows.view(-1, self.tile, self.size)
        for stream, place in self._streams_of(unit):
            part = band[place]
            parts = self._take("memory parts", len(part), part.shape[2], self.size)
            torch.bmm(part.transpose(1, 2), tiles[place], out=parts)
            add_windows_(memory[stream, unit.tiles.start * self.tile :], parts, self.tile)

    def _table_gradients(self, grads: Gradients) -> None:
        seen = self._seen[self.index]
        position = grads.position_key[0]
        position = position[:, position.shape[1] - seen :]
        position += self._dkey_table[:, self.span - seen : self.span]
        if grads.persistent_key is not None and grads.persistent_value is not None:
            grads.persistent_key[self.index] = self._dkey_table[:, self.span :]
            grads.persistent_value[self.index] = self._dvalue_table[:, self.span - self.first_value :].t()
        if self.first_value == 0:
            position += self._dvalue_table[:, self.span - seen : self.span]

    def _memory_gradients(self, memory: Tensor, weight: Tensor, out: Tensor) -> None:
        """From the gradients of a memory to those of the block's rows [B·M, K] and, for cached rows, of the weight."""
        known = min(self.span, self.cache.shape[1])
        for stream in range(self.batch if known else 0):
            cached = self.cache[stream, self.cache.shape[1] - known :]
            weight.addmm_(memory[stream, self.span - known : self.span].t(), cached)
        out.unflatten(0, (self.batch, self.length)).copy_(memory[:, self.span : self.span + self.length])


def _even(length: int) -> int:
    return length + length % 2


def _tiny(dtype: torch.dtype) -> float:
    """A mask that no output shows, and whose gradient is still exact."""
    return 2.0**-100 if dtype == torch.float64 else 2.0**-40
