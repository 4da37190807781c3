"""The Triton kernels of one call: their tiles, grids and arguments, and the memory between them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.kernels.interface import AttentionSettings
from megatron_allattn.kernels.triton_columns import context_gradient, persistent_gradient
from megatron_allattn.kernels.triton_edges import edge_gradient
from megatron_allattn.kernels.triton_layout import Packing, round_up
from megatron_allattn.kernels.triton_positions import add_positions, position_gradient, position_products
from megatron_allattn.kernels.triton_rows import backward_rows, forward_rows
from megatron_allattn.parallel.random import drop_threshold, keep_scale

PROGRAMS = 512  # the persistent gradient is cut into at least so many, a few for each processor of a large GPU


@dataclass(frozen=True)
class Tile:
    """Rows and columns that a program works on at a time, and how its kernel is compiled."""

    rows: int
    columns: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """As a launch takes them."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "num_warps": self.warps, "num_stages": self.stages}


EDGES = Tile(32, 1, 4, 1)  # a program holds five matrices of its rows: few, so that heads of 128 spill no register


@dataclass(frozen=True)
class Tiles:
    """One for each kind of kernel. In `forward` and `backward` a tile of persistent vectors is columns pairs."""

    forward: Tile
    backward: Tile
    context: Tile
    persistent: Tile
    position: Tile


def choose_tiles(size: int, dtype: torch.dtype) -> Tiles:
    """Tiles for heads of `size`, chosen by what the compiler makes of them.

    In half precision all take less than 99 KB of shared memory, and up to heads of 64 no register is spilled. float32
    is for checks: its products are three of tensor cores each, and registers are spilled.
    """
    wide = size == 128
    if dtype == torch.float32:
        rows, low = Tile(16 if wide else 64, 16, 4, 1), Tile(64, 16, 4, 1)
        persistent = Tile(16, 16 if wide else 64, 4, 1)
        return Tiles(forward=rows, backward=rows, context=Tile(16, 64, 4, 1), persistent=persistent, position=low)
    return Tiles(
        forward=Tile(128, 32 if wide else 64, 8, 2),
        backward=Tile(64, 32, 4, 2),
        context=Tile(32, 64, 8 if wide else 4, 2),
        persistent=Tile(32, 64, 4, 2),
        position=Tile(64, 32, 4, 2),
    )


@dataclass(frozen=True)
class Between:
    """What lives during one direction of a call. positions: u as rows; persistent: [H, N, 2K], of no rows without
    vectors; logits and weights: the same packed memory, weights in the type of the operands."""

    positions: Tensor
    persistent: Tensor
    logits: Tensor
    weights: Tensor


@dataclass(frozen=True)
class AttentionGradients:
    """Of q [B·M, H·K], kv, persistent [H, N, 2K], z [H] (None where spans are fixed) and u as rows [W, K]."""

    q: Tensor
    kv: Tensor
    persistent: Tensor
    span: Tensor | None
    positions: Tensor


@dataclass(frozen=True)
class Launch:
    """Launches kernels for one call. reach: z·L of each head, float32 [H], or None where spans are fixed; cached: how
    many positions before the block may be looked at; keys: of dropout's rows [B, M, H], or None."""

    tiles: Tiles
    settings: AttentionSettings
    packing: Packing
    size: int
    reach: Tensor | None
    cached: int
    keys: Tensor | None

    @property
    def root(self) -> float:
        """1 / √K."""
        return 1.0 / math.sqrt(self.size)

    @property
    def scale(self) -> float:
        """Of scores, in units of log 2."""
        return self.root / math.log(2.0)

    @property
    def shared(self) -> bool:
        """Whether positions are on the value side too."""
        return self.settings.position_values == "shared"

    def _grid(self, tile: Tile) -> tuple[int, int, int]:
        """Row tiles, heads, streams."""
        return -(-self.packing.length // tile.rows), self.packing.heads, self.packing.batch

    def _shape(self, like: Tensor) -> dict[str, Any]:
        """What most kernels take."""
        exact = like.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        return {
            "table": self.packing.table,
            "batch": self.packing.batch,
            "length": self.packing.length,
            "heads": self.packing.heads,
            "K": self.size,
            "PRECISION": "tf32x3" if exact else "tf32",  # of float32: the first is as exact as float32, nearly
        }

    def _dropout(self) -> dict[str, Any]:
        probability = 0.0 if self.keys is None else self.settings.dropout
        return {
            "keys": self.packing.table if self.keys is None else self.keys,  # without dropout it is not read
            "threshold": drop_threshold(probability),
            "keep_scale": keep_scale(probability),
            "DROPOUT": self.keys is not None,
        }

    def _mask(self) -> dict[str, Any]:
        return {
            "reaches": self.packing.table if self.reach is None else self.reach,  # with fixed spans it is not read
            "ramp": self.settings.ramp,
            "ADAPTIVE": self.reach is not None,
        }

    def between(self, q: Tensor, positions: Tensor, persistent: Tensor) -> Between:
        """Start either direction: compute the position logits."""
        weights = q.new_empty(self.packing.elements)
        logits = weights if q.dtype == torch.float32 else weights.view(torch.float16)
        self._products(q, positions, logits, self.scale, logits=True)
        return Between(positions, persistent, logits, weights)

    def _products(self, rows: Tensor, positions: Tensor, out: Tensor, scale: float, *, logits: bool) -> None:
        tile = self.tiles.position
        position_products[self._grid(tile)](
            rows=rows,
            positions=positions,
            out=out,
            width=self.packing.longest,
            cached=self.cached,
            scale=scale,
            LOGITS=logits,
            **self._mask(),
            **self._shape(rows),
            **tile.options(),
        )

    def _add(self, packed: Tensor, positions: Tensor, source: Tensor, scale: float) -> Tensor:
        """source + scale · packed · u, in the type of `packed`."""
        tile, out = self.tiles.position, torch.empty_like(source, dtype=packed.dtype)
        add_positions[self._grid(tile)](
            packed=packed,
            positions=positions,
            source=source,
            out=out,
            width=self.packing.longest,
            scale=scale,
            **self._shape(packed),
            **tile.options(),
        )
        return out

    def _position_gradient(self, packed: Tensor, rows: Tensor, scale: float) -> Tensor:
        """scale · packedᵀ · rows over all heads and rows, float32 [W, K]."""
        tile, width = self.tiles.position, self.packing.longest
        out = rows.new_empty(self.packing.batch, width, self.size, dtype=torch.float32)
        position_gradient[-(-width // tile.columns), self.packing.batch](
            packed=packed,
            rows=rows,
            out=out,
            width=width,
            scale=scale,
            **self._shape(rows),
            **tile.options(),
        )
        return out.sum(0)

    def forward(self, q: Tensor, kv: Tensor, between: Between) -> tuple[Tensor, Tensor]:
        """y [B·M, H·K] and lse [B·M, H]."""
        tile, rows = self.tiles.forward, len(q)
        y = torch.empty_like(q, dtype=torch.float32 if self.shared else q.dtype)
        lse = q.new_empty(rows, self.packing.heads, dtype=torch.float32)
        forward_rows[self._grid(tile)](
            q=q,
            kv=kv,
            persistent=between.persistent,
            logits=between.logits,
            y=y,
            lse=lse,
            weights=between.weights,
            vectors=between.persistent.shape[1],
            scale=self.scale,
            PAIRS=tile.columns,
            STORE=self.shared,
            **self._dropout(),
            **self._shape(q),
            **tile.options(),
        )
        if self.shared:
            y = self._add(between.weights, between.positions, y, 1.0)
        return y, lse

    def backward(
        self, q: Tensor, kv: Tensor, y: Tensor, lse: Tensor, dy: Tensor, between: Between
    ) -> AttentionGradients:
        """From q, y and dy [B·M, H·K] and what `forward` gave."""
        tile, heads = self.tiles.backward, self.packing.heads
        dscores = torch.empty_like(between.weights)
        if self.shared:
            self._products(dy, between.positions, dscores, 1.0, logits=False)
        dq, delta, dmask = torch.empty_like(q, dtype=torch.float32), torch.empty_like(lse), torch.empty_like(lse)
        backward_rows[self._grid(tile)](
            q=q,
            kv=kv,
            persistent=between.persistent,
            logits=between.logits,
            y=y,
            lse=lse,
            dy=dy,
            weights=between.weights,
            dscores=dscores,
            dq=dq,
            delta=delta,
            dmask=dmask,
            vectors=between.persistent.shape[1],
            scale=self.scale,
            root=self.root,
            PAIRS=tile.columns,
            SHARED=self.shared,
            **self._mask(),
            **self._dropout(),
            **self._shape(q),
            **tile.options(),
        )
        if self.reach is not None:
            self._add_edges(q, kv, lse, delta, dy, dmask, between.positions)
        positions = self._position_gradient(dscores, q, self.root)
        if self.shared:
            positions += self._position_gradient(between.weights, dy, 1.0)
        rise = self.settings.max_span / self.settings.ramp  # of m, per unit of z
        return AttentionGradients(
            q=self._add(dscores, between.positions, dq, self.root),
            kv=self._context_gradient(q, kv, dy, between.weights, dscores),
            persistent=self._persistent_gradient(q, lse, delta, dy, between.persistent),
            span=None if self.reach is None else dmask.view(-1, heads).sum(0) * rise,
            positions=positions,
        )

    def _add_edges(
        self, q: Tensor, kv: Tensor, lse: Tensor, delta: Tensor, dy: Tensor, dmask: Tensor, positions: Tensor
    ) -> None:
        """To dmask, the gradient of the masks that are 0."""
        shape = self._shape(q)
        edge_gradient[self._grid(EDGES)](
            q=q,
            kv=kv,
            positions=positions,
            lse=lse,
            delta=delta,
            dy=dy,
            dmask=dmask,
            reaches=self.reach,
            width=self.packing.longest,
            cached=self.cached,
            scale=self.scale,
            ramp=self.settings.ramp,
            SHARED=self.shared,
            ROWS=EDGES.rows,
            num_warps=EDGES.warps,
            num_stages=EDGES.stages,
            **{name: shape[name] for name in ("table", "batch", "length", "heads", "K")},
            **self._dropout(),
        )

    def _context_gradient(self, q: Tensor, kv: Tensor, dy: Tensor, weights: Tensor, dscores: Tensor) -> Tensor:
        tile, dkv = self.tiles.context, torch.empty_like(kv)
        tiles = -(-(self.packing.longest + self.packing.length) // tile.columns)
        context_gradient[tiles, self.packing.heads, self.packing.batch](
            q=q,
            dy=dy,
            weights=weights,
            dscores=dscores,
            dkv=dkv,
            root=self.root,
            **self._shape(q),
            **tile.options(),
        )
        return dkv

    def _persistent_gradient(self, q: Tensor, lse: Tensor, delta: Tensor, dy: Tensor, persistent: Tensor) -> Tensor:
        """[H, N, 2K], float32."""
        tile, (heads, vectors, width), rows = self.tiles.persistent, persistent.shape, len(q)
        if not vectors:
            return persistent
        tiles = -(-vectors // tile.columns)
        parts = min(-(-PROGRAMS // (tiles * heads)), -(-rows // tile.rows))
        part = round_up(-(-rows // parts), tile.rows)
        parts = -(-rows // part)
        out = q.new_empty(parts, heads, vectors, width, dtype=torch.float32)
        shape = self._shape(q)
        persistent_gradient[tiles, heads, parts](
            q=q,
            persistent=persistent,
            lse=lse,
            delta=delta,
            dy=dy,
            out=out,
            rows=rows,
            vectors=vectors,
            part=part,
            scale=self.scale,
            root=self.root,
            **self._dropout(),
            **{name: shape[name] for name in ("heads", "K", "PRECISION")},
            **tile.options(),
        )
        return out.sum(0)
