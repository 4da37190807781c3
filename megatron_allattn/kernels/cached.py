"""Attention over keys and values that are kept, for evaluation and generation: weights are fixed, nothing is trained.

Called like any backend, and the same function of the tokens; but what came before the block it keeps itself, as K and V
of every head, each as far back as that head looks. The hidden-state cache that it is given is not looked at. A position
that was never seen has K = V = 0, what a zero hidden state would give.

A block of one token, the step of generation, is computed for all heads of a layer together, in some twenty operations
whose cost depends on the spans alone. Longer blocks go head by head through the tiles of the `blocked` backend.

Shape letters as in interface.py (H local heads), and: S_h distances of head h, S the longest of them, R rows of all
heads together.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_allattn.kernels.blocked import Blocked, project, whole_tiles
from megatron_allattn.kernels.blocked_call import BlockedCall, Kept
from megatron_allattn.kernels.interface import (
    AttentionSettings,
    BlockState,
    LayerWeights,
    check_shapes,
    distances_seen,
    span_mask,
    wide_type,
)
from megatron_allattn.parallel.products import widen

_PER_STREAM = ("keys", "values", "ahead")  # of a layer
SLACK = 64  # tokens that are written behind a head's rows before they move back to the front


class CachedAttention:
    """The backend of all layers of one network over B streams, which are read block after block.

    Streams start empty; a new object starts new ones. Every call takes a layer's block and keeps what the next needs.

    blocked: computes blocks of more than one token.
    """

    def __init__(self, blocked: Blocked) -> None:
        self._blocked = blocked
        self._layers: dict[int, _Layer] = {}

    @torch.no_grad()
    def __call__(
        self,
        block_BMD: Tensor,
        cache_BCD: Tensor,
        weights: LayerWeights,
        settings: AttentionSettings,
        state: BlockState,
    ) -> Tensor:
        check_shapes(block_BMD, cache_BCD, weights, state)
        assert state.dropout_keys is None, "keys and values are kept for evaluation, which has no dropout"
        weights = weights.widened()
        if state.layer not in self._layers:
            self._layers[state.layer] = _Layer(widen(block_BMD), weights, settings, state)
        layer = self._layers[state.layer]
        assert layer.length == state.cached, f"{state.cached} tokens have passed, {layer.length} of them through here"
        own, length, whole = block_BMD.dtype, block_BMD.shape[1], whole_tiles(widen(block_BMD))
        assert length == 1 or not layer.uneven, "streams of unequal length go on one token at a time"
        projected = project(whole, weights)
        if length == 1:
            y = layer.attend_to_one(projected.q, weights)
        else:
            blocked, nothing = self._blocked, whole[:, :0]
            shared = blocked.workspace, layer.kept(), blocked.scored
            call = BlockedCall(whole, nothing, weights, settings, state, *shared)
            y = blocked.heads(call).forward(projected)
        layer.append(*(rows.unflatten(0, whole.shape[:2])[:, :length] for rows in (projected.k, projected.v)))
        return y.unflatten(0, whole.shape[:2])[:, :length].to(own)

    def repeat(self, count: int) -> None:
        """Go on with `count` copies of every stream, side by side: several continuations of one beginning."""
        for layer in self._layers.values():
            layer.repeat(count)

    def join(self, others: Sequence["CachedAttention"]) -> None:
        """Go on with the others' streams behind these, of whatever lengths, one token at a time. All have started."""
        for number, layer in self._layers.items():
            layer.join([other._layers[number] for other in others])


class _Layer:
    """K and V before a layer's next token, and attention of one token to them.

    keys, values [B, R + SLACK, K]: the heads' rows one after the other, S_h + SLACK from the start of one head to the
    start of the next. Of these, S_h from `first` on are in use, oldest first; a new position is written behind them. So
    in a view of R rows from `first` on, every head's rows, and with them its distances, stay at the same place.

    Streams of unequal length lie side by side, since positions that one has not had are zeros. Only where an empty
    cache is masked must they be told apart: a stream has had `length` tokens, and `ahead` [B, 1, 1] more.
    """

    def __init__(self, block: Tensor, weights: LayerWeights, settings: AttentionSettings, state: BlockState) -> None:
        self.spans = distances_seen(weights.span is not None, settings, state)
        self.size, self.longest = weights.position_key.shape[1], max(self.spans)
        self.starts = [0, *accumulate(span + SLACK for span in self.spans)][:-1]
        self.rows = self.starts[-1] + self.spans[-1]
        self.keys, self.values = block.new_zeros(2, block.shape[0], self.rows + SLACK, self.size)
        self.first = self.length = 0
        self.ahead = torch.zeros(len(block), 1, 1, dtype=torch.int64, device=block.device)
        self.uneven = False
        self.settings = settings
        self._make_tables(weights, block)

    def _make_tables(self, weights: LayerWeights, block: Tensor) -> None:
        """What the span masks and the places of a head's rows say, for all heads: [H, S] by distance S … 1."""
        distances = torch.arange(self.longest, 0, -1, device=block.device)
        spans = torch.tensor(self.spans, device=block.device)
        self._distances, beyond = distances, distances > spans[:, None]
        wide = wide_type(block.dtype)
        masks = torch.ones(beyond.shape, dtype=wide, device=block.device)
        if weights.span is not None:
            z, settings = weights.span.to(wide), self.settings
            masks = span_mask(z, distances.to(wide), settings.max_span, settings.ramp).squeeze(1)
        self.masks = masks if weights.span is not None and self.settings.normalization == "window" else None
        self.bias = (masks.log() if self.masks is None else torch.zeros_like(masks)).masked_fill(beyond, -torch.inf)
        # Of every element of the heads' own scores: its place in [H, R] by row, and in [H, S + N] by distance.
        head, column = (~beyond).nonzero(as_tuple=True)
        starts = torch.tensor(self.starts, device=block.device)
        count = weights.num_vectors
        self._by_row = (head * self.rows + starts[head] + column - (self.longest - spans[head]))[None]
        self._by_distance = (head * (self.longest + count) + column)[None]
        self._ends = starts + spans  # the row behind each head's, when first is 0

    def attend_to_one(self, q: Tensor, weights: LayerWeights) -> Tensor:
        """Outputs [B, H·K] for one token of every stream; q [B, H·K], divided by √K."""
        q_BHK = q.unflatten(1, (-1, self.size))
        if self.settings.empty_cache == "mask" and self.length == 0 and not weights.num_vectors:
            return torch.zeros_like(q)  # there is nothing to look at
        positions_KS = weights.position_key[0, :, -self.longest :]
        a = self._weights_of(q_BHK, positions_KS, weights)
        y = torch.bmm(self._context_by_row(a), self._own(self.values))
        if self.settings.position_values == "shared":
            y += a[..., : self.longest] @ positions_KS.t()
        if weights.persistent_value is not None:
            y += torch.bmm(a[..., self.longest :].transpose(0, 1), weights.persistent_value).transpose(0, 1)
        return y.flatten(1)

    def _weights_of(self, q_BHK: Tensor, positions_KS: Tensor, weights: LayerWeights) -> Tensor:
        """The weights on context and persistent vectors, [B, H, S + N]."""
        scores = q_BHK @ positions_KS
        scores += self.bias
        if weights.persistent_key is not None:
            persistent = torch.bmm(q_BHK.transpose(0, 1), weights.persistent_key)
            scores = torch.cat([scores, persistent.transpose(0, 1)], dim=-1)
        # One product scores every head's query with the rows of all heads: a head's own are picked out of it. That is
        # H times the arithmetic, but the rows are read once, and reading them is what takes the time.
        products = torch.bmm(q_BHK, self._own(self.keys).transpose(1, 2)).flatten(1)
        by_row, by_distance = self._places(len(q_BHK))
        scores.flatten(1).scatter_add_(1, by_distance, products.gather(1, by_row))
        if self.settings.empty_cache == "mask" and self.length < self.longest:
            scores[..., : self.longest].masked_fill_(self._distances > self.length + self.ahead, -torch.inf)
        a = scores.softmax(dim=-1)
        if self.masks is not None:
            a[..., : self.longest] *= self.masks
            a /= a.sum(dim=-1, keepdim=True) + 1e-8
        return a

    def _context_by_row(self, a: Tensor) -> Tensor:
        """The weights on the context [B, H, S + N] as [B, H, R], zero on other heads' rows."""
        by_row, by_distance = self._places(len(a))
        spread = a.new_zeros(len(a), len(self.spans) * self.rows)
        return spread.scatter_(1, by_row, a.flatten(1).gather(1, by_distance)).view(len(a), len(self.spans), self.rows)

    def _places(self, batch: int) -> tuple[Tensor, Tensor]:
        return self._by_row.expand(batch, -1), self._by_distance.expand(batch, -1)

    def _own(self, memory: Tensor) -> Tensor:
        return memory[:, self.first : self.first + self.rows]

    def kept(self) -> Kept:
        """k and v of the S_h positions before the next token."""
        return Kept(self.keys[:, self.first :], self.values[:, self.first :], self.starts, self.spans)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Keep k and v [B, M, H·K] of the tokens that come next."""
        length = keys.shape[1]
        if length == 1 and self.first < SLACK:
            rows = self._ends + self.first
            for memory, new in ((self.keys, keys), (self.values, values)):
                memory.index_copy_(1, rows, new.view(len(new), -1, self.size))
            self.first += 1
        else:
            for name, new in (("keys", keys), ("values", values)):
                self._restart(name, new)
            self.first = 0
        self.length += length

    def _restart(self, name: str, new: Tensor) -> None:
        """Put what stays of every head's rows, and the new ones [B, M, H·K] behind them, to the front."""
        memory: Tensor = getattr(self, name)
        for head, (start, span) in enumerate(zip(self.starts, self.spans, strict=True)):
            kept = memory[:, start + self.first : start + self.first + span][:, min(new.shape[1], span) :]
            own = new[:, max(0, new.shape[1] - span) :, head * self.size : (head + 1) * self.size]
            memory[:, start : start + span] = torch.cat([kept, own], dim=1)

    def repeat(self, count: int) -> None:
        for name in _PER_STREAM:
            setattr(self, name, getattr(self, name).repeat_interleave(count, dim=0))

    def join(self, others: Sequence["_Layer"]) -> None:
        layers = (self, *others)
        for layer in layers:
            layer.ahead += layer.length
            nothing = layer.keys.new_zeros(len(layer.keys), 0, len(layer.spans) * layer.size)
            for name in ("keys", "values"):
                layer._restart(name, nothing)
        for name in _PER_STREAM:
            setattr(self, name, torch.cat([getattr(layer, name) for layer in layers]))
        self.first, self.length = 0, int(self.ahead.min())
        assert self.length > 0, "a stream that is joined has read something"
        self.ahead -= self.length
        self.uneven = bool(self.ahead.any())
