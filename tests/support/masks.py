"""The dropout masks that a training step really uses, by global identity.

`watched()` looks at what drops: at `random._drop`, through which eager attention, embedding and output pass, and at the
tiles of the blocked backend's PyTorch operators. What is found is dense: an element is 1 where it is kept, 0 where it
is dropped, and UNSEEN where nothing asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from megatron_allattn.kernels import dropout
from megatron_allattn.parallel import random
from megatron_allattn.parallel.random import DropoutKeys, Site

UNSEEN = 255
Masks = dict[tuple[Any, ...], np.ndarray]


class Watch:
    """Masks of attention, ("ATTENTION", step, layer, stream, head) → uint8 [queries, span + vectors], and of the other
    sites, (site, step, stream) → uint8 [positions, channels]. One that is asked for again must be the same."""

    def __init__(self, queries: int, span: int, vectors: int, channels: int) -> None:
        self.queries, self.span, self.vectors, self.channels = queries, span, vectors, channels
        self.masks: Masks = {}
        self.calls = 0
        self._keep: Tensor | None = None
        self._rows: dict[int, tuple[tuple[Any, ...], int]] = {}
        pairs = torch.arange(-(span // 2) - 1, vectors // 2 + 1)
        self._pairs = dict(zip(random.pair_keys(pairs).tolist(), pairs.tolist(), strict=True))

    def put(self, key: tuple[Any, ...], row: int, first: int, kept: np.ndarray) -> None:
        """kept [rows, columns] of `key` from this row and column on."""
        width = self.span + self.vectors if key[0] == "ATTENTION" else self.channels
        mask = self.masks.setdefault(key, np.full((self.queries, width), UNSEEN, dtype=np.uint8))
        place = mask[row : row + kept.shape[0], first : first + kept.shape[1]]
        assert place.shape == kept.shape, (key, row, first, kept.shape)
        assert np.all((place == UNSEEN) | (place == kept)), f"{key}: asked for again, and another"
        place[:] = kept
        self.calls += 1

    def attention(self, keys: DropoutKeys, layer: int, heads: Tensor, columns: Tensor, keep: Tensor) -> None:
        first = int(columns[0]) + self.span
        assert torch.equal(columns, torch.arange(int(columns[0]), int(columns[-1]) + 1, dtype=columns.dtype))
        for b, stream in enumerate(keys.streams.tolist()):
            for h, head in enumerate(heads.tolist()):
                self.put(("ATTENTION", keys.step, layer, stream, head), 0, first, keep[b, h].numpy())

    def rows(self, keys: DropoutKeys, layer: int, heads: Tensor, found: Tensor) -> None:
        """Row keys [B, H, M], which tell a tile's rows apart."""
        for b, stream in enumerate(keys.streams.tolist()):
            for h, head in enumerate(heads.tolist()):
                for query, key in enumerate(found[b, h].flatten().tolist()):
                    place = (("ATTENTION", keys.step, layer, stream, head), query)
                    assert self._rows.setdefault(key, place) == place, "two rows with one key"

    def tile(self, rows: Tensor, pairs: Tensor, keep: Tensor) -> None:
        """keep [R, C] of row keys [R] and the first C columns of pair keys [⌈C / 2⌉]."""
        numbers = [self._pairs[key] for key in pairs.tolist()]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for key, kept in zip(rows.tolist(), keep, strict=True):
            place, query = self._rows[key]
            self.put(place, query, 2 * numbers[0] + self.span, kept[None].numpy())

    @contextmanager
    def watching(self) -> Iterator[None]:
        drop, attention, rows = random._drop, DropoutKeys.attention_dropout, DropoutKeys.attention_rows
        other, draw = DropoutKeys.dropout, dropout.TileMask.draw

        def watched_drop(tensor: Tensor, keep: Tensor, probability: float) -> Tensor:
            self._keep = keep.expand(tensor.shape)
            return drop(tensor, keep, probability)

        def watched_attention(keys: DropoutKeys, weights: Tensor, layer: int, heads: Tensor, *rest: Any) -> Tensor:
            result = attention(keys, weights, layer, heads, *rest)
            assert self._keep is not None
            self.attention(keys, layer, heads, rest[0], self._keep)
            return result

        def watched_rows(keys: DropoutKeys, layer: int, heads: Tensor, queries: Tensor) -> Tensor:
            found = rows(keys, layer, heads, queries)
            self.rows(keys, layer, heads, found)
            return found

        def watched_other(keys: DropoutKeys, tensor: Tensor, site: Site, *rest: Any, **more: Any) -> Tensor:
            result = other(keys, tensor, site, *rest, **more)
            assert self._keep is not None
            for b, stream in enumerate(keys.streams.tolist()):
                first = (more.get("first_position", 0), more.get("first_channel", 0))
                self.put((site.name, keys.step, stream), *first, self._keep[b].numpy())
            return result

        def watched_draw(mask: dropout.TileMask, keys: Tensor, pairs: Tensor, columns: int, dtype: torch.dtype) -> None:
            draw(mask, keys, pairs, columns, dtype)
            ones = torch.ones(len(keys), columns, dtype=dtype)
            self.tile(keys, pairs, mask.apply_(ones, out=torch.empty_like(ones)) > 0)

        with (
            patch.object(random, "_drop", watched_drop),
            patch.object(DropoutKeys, "attention_dropout", watched_attention),
            patch.object(DropoutKeys, "attention_rows", watched_rows),
            patch.object(DropoutKeys, "dropout", watched_other),
            patch.object(dropout.TileMask, "draw", watched_draw),
        ):
            yield


def joined(ranks: list[Masks]) -> Masks:
    """What all ranks have seen; those that have seen the same must have seen it alike."""
    whole: Masks = {}
    for masks in ranks:
        for key, mask in masks.items():
            if key not in whole:
                whole[key] = mask.copy()
                continue
            both = (whole[key] != UNSEEN) & (mask != UNSEEN)
            assert np.array_equal(whole[key][both], mask[both]), f"{key}: ranks differ"
            whole[key][mask != UNSEEN] = mask[mask != UNSEEN]
    return whole
