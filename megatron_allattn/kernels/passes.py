"""What happens to scores between matrix products in the `blocked` backend: passes over rows, in PyTorch.

rows.h does the same in one pass over a row instead of ten over a tile. Shape letters as in blocked_heads.py: R rows in
tiles of T, S distances, N persistent vectors. The band [R / T, T, S + T − 1] holds a row's distances at their positions
(band.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_allattn.kernels.band import by_distance
from megatron_allattn.kernels.dropout import DropoutRows, TileMask
from megatron_allattn.kernels.interface import LARGEST_HIDDEN, wide_type
from megatron_allattn.kernels.workspace import Workspace


@dataclass(frozen=True)
class Rows:
    """What a pass must know of its rows.

    bias: added to the first of the distances, [≤ S], or None; factors: the span mask where it multiplies
    (normalization `window`), [S], or None; edge: int64 [1], of the distances the one whose mask needs a gradient at 0,
    or None. Row r is query (first + r) mod length of a stream, before whose first query `known` positions exist.
    """

    span: int
    tile: int
    bias: Tensor | None
    factors: Tensor | None
    dropout: DropoutRows | None
    first: int
    length: int
    known: int
    edge: Tensor | None = None


class TorchPasses:
    """On any device, for both normalizations. Between two passes the tensors of a tile are the caller's."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._mask: TileMask | None = None
        self._masked: Tensor | None = None  # the softmax after `factors`, and its sums before the division
        self._total: Tensor | None = None
        self._hidden: Tensor | None = None  # e^score over the row's sum at the edge

    def weights(self, rows: Rows, scores: Tensor, band: Tensor, out: Tensor) -> None:
        """scores [R, S + N], the context's lacking `band` → the softmax in `scores`, and in `out` what becomes of it by
        `factors` and dropout, unscaled, also in `band`. `out` may be `scores`: then the softmax is lost."""
        context = scores.view(*band.shape[:2], -1)[:, :, : rows.span]
        context += by_distance(band, rows.span)
        at_edge = None if rows.edge is None else _column(scores, rows.edge).to(wide_type(scores.dtype))
        if rows.bias is not None:
            scores[:, : len(rows.bias)] += rows.bias
        empty = _empty(rows, scores)
        if empty is not None:
            context.masked_fill_(empty, -torch.inf)
        if at_edge is not None and rows.edge is not None:
            self._hidden = (at_edge - scores.to(at_edge.dtype).logsumexp(-1)).clamp_(max=LARGEST_HIDDEN).exp_()
            if empty is not None:
                self._hidden.masked_fill_(_column(empty.flatten(0, 1), rows.edge), 0)
        torch.softmax(scores, -1, out=scores)
        if empty is not None and scores.shape[1] == rows.span:
            context.masked_fill_(empty.all(-1, keepdim=True), 0)  # the first token has nothing to look at
        kept = scores
        if rows.factors is not None:
            kept = self._multiply(rows, scores, in_place=out is scores)
        self._mask = None
        if rows.dropout is not None:
            self._mask = TileMask(self._workspace, rows.dropout.probability)
            self._mask.draw(rows.dropout.rows, rows.dropout.pairs, scores.shape[1], scores.dtype)
            self._mask.apply_(kept, out=out)
        elif kept is not out:
            out.copy_(kept)
        _skew(rows, out, band)

    def _multiply(self, rows: Rows, softmax: Tensor, in_place: bool) -> Tensor:
        """The softmax times the span mask, made to sum to 1 with the 1e-8."""
        assert rows.factors is not None
        masked = softmax if in_place else self._take("masked weights", softmax)
        torch.mul(softmax[:, : rows.span], rows.factors, out=masked[:, : rows.span])
        masked[:, rows.span :] = softmax[:, rows.span :]
        total = masked.sum(-1, keepdim=True) + 1e-8
        masked /= total
        self._masked, self._total = masked, total
        return masked

    def gradients(
        self, rows: Rows, softmax: Tensor, grads: Tensor, band: Tensor, both: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Back through `weights`, the last call of which had these rows.

        grads [R, S + N]: gradient of `out`, where the context's is in `band`, plus `grads` if `both` → that of the
        scores in `grads`, and the context's in `band`. Returns that of bias or factors, summed over rows, or None, and
        of the mask at the edge, or None.
        """
        context = grads.view(*band.shape[:2], -1)[:, :, : rows.span]
        if both:
            context += by_distance(band, rows.span)
        else:
            context.copy_(by_distance(band, rows.span))
        if self._mask is not None:
            self._mask.apply_(grads)
        through = None if rows.factors is None else self._back_through_factors(rows, softmax, grads)
        of_edge = None if rows.edge is None else self._back_to_edge(rows.edge, softmax, grads)
        torch.ops.aten._softmax_backward_data.out(grads, softmax, -1, grads.dtype, grad_input=grads)
        _skew(rows, grads, band)
        if through is None and rows.bias is not None:
            through = grads[:, : len(rows.bias)].sum(0, dtype=rows.bias.dtype)
        return through, of_edge

    def _back_to_edge(self, edge: Tensor, softmax: Tensor, grads: Tensor) -> Tensor:
        """The gradient of the mask at the edge, which is 0: of a weight there, at the expense of the others."""
        assert self._hidden is not None
        mean = (softmax * grads).sum(-1, dtype=self._hidden.dtype)
        return (self._hidden * (_column(grads, edge) - mean)).sum()

    def add_windows(self, memory: Tensor, parts: Tensor, tile: int) -> None:
        """Add [G, S + T − 1, K], one vector per tile and position, to `memory` [≥ S + G·T − 1, K]."""
        for start in range(0, parts.shape[1], tile):
            part = parts[:, start : start + tile]
            strides = (tile * memory.stride(0), memory.stride(0), memory.stride(1))
            memory.as_strided(part.shape, strides, memory.storage_offset() + start * memory.stride(0)).add_(part)

    def _back_through_factors(self, rows: Rows, softmax: Tensor, grads: Tensor) -> Tensor:
        """`_multiply` backward, in place on `grads`; returns the gradient of `factors`."""
        assert rows.factors is not None and self._masked is not None and self._total is not None
        grads -= (self._masked * grads).sum(-1, keepdim=True)
        grads /= self._total
        context = grads[:, : rows.span]
        through = (context * softmax[:, : rows.span]).sum(0)
        context *= rows.factors
        return through

    def _take(self, name: str, like: Tensor) -> Tensor:
        return self._workspace.take(name, like.shape, like.dtype, like.device)


def _column(rows: Tensor, index: Tensor) -> Tensor:
    """A copy of one column of [R, S + N], [R], without the host's knowing which."""
    return rows.index_select(1, index).squeeze(1)


def _skew(rows: Rows, weights: Tensor, band: Tensor) -> None:
    """The distances of [R, S + N] by position, zero off the band."""
    band.zero_()
    by_distance(band, rows.span).copy_(weights.view(*band.shape[:2], -1)[:, :, : rows.span])


def _empty(rows: Rows, scores: Tensor) -> Tensor | None:
    """True where a distance leads before the first token, [R / T, T, S]; None where none does."""
    if rows.known >= rows.span:
        return None
    queries = torch.arange(rows.first, rows.first + len(scores), device=scores.device) % rows.length
    distances = torch.arange(rows.span, 0, -1, device=scores.device)
    return (distances > queries[:, None] + rows.known).view(-1, rows.tile, rows.span)
