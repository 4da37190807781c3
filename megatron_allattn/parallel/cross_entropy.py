"""Softmax cross-entropy over sharded logits, of several softmaxes at once, with one copy of the logits in memory.

Logits are made inside the function that takes their softmax, so that nothing else holds them: they become
log-probabilities of their own columns in place, and in backward, in place again, the gradients of the logits. (In half
precision the products see a half-precision copy, half as large.) What a block of columns does not know is a number per
row, the log-sum-exp over the other blocks and ranks: two small all-reduces for all softmaxes together.

Shapes: n rows, d width of what is projected, V_l rows of a table on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.parallel.collectives import all_gather, all_reduce, all_reduce_max
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.layout import padded_share
from megatron_allattn.parallel.products import linear, product_type, widen

PIECE = 1 << 18  # logits that stay in a core's cache


def vocabulary_range(vocab_size: int, group: Group) -> tuple[int, int]:
    """The ids [start, stop) whose rows this rank owns, padding excluded."""
    rows = padded_share(vocab_size, group.size)
    return min(group.rank * rows, vocab_size), min((group.rank + 1) * rows, vocab_size)


def sharded_logits(hidden: Tensor, weight: Tensor, bias: Tensor, size: int, group: Group) -> Tensor:
    """This rank's logits [..., V_l] of a table of `size` rows, in float32 at least; no gradient.

    Padding has the lowest finite number, so that a shard of nothing else has a softmax too.
    """
    logits = linear(hidden.detach(), weight.detach(), bias.detach())
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    start, stop = vocabulary_range(size, group)
    logits[..., stop - start :] = torch.finfo(logits.dtype).min
    return logits


def gather_logits(logits: Tensor, size: int, group: Group) -> Tensor:
    """The full logits [..., size] on every rank, without padding, from every rank's `sharded_logits`; no gradient."""
    return torch.cat(all_gather(logits, group), dim=-1)[..., :size]


@dataclass(frozen=True)
class LogitBlock:
    """Some columns of a softmax over n rows: logits hidden · weightᵀ + bias, of which each rank holds a shard.

    hidden: [n, d]; weight [V_l, d] and bias [V_l]: this rank's rows of a table of `size`; index [n]: the column of each
    row's target in the shard; own [n]: whether it is there at all (it is in one block of the softmax, on one rank).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    size: int
    index: Tensor
    own: Tensor


def vocabulary_parallel_cross_entropy(softmaxes: Sequence[Sequence[LogitBlock]], group: Group) -> list[Tensor]:
    """Negative log-likelihood in nats of the targets of several softmaxes, each one [n], replicated.

    A softmax is the blocks that its columns come in. Two all-reduces forward for all of them together, none backward.
    Backward works once.
    """
    blocks = [block for softmax in softmaxes for block in softmax]
    structure = [(len(softmax), len(softmax[0].own)) for softmax in softmaxes]
    targets = [(block.size, block.index[:, None], block.own) for block in blocks]
    tensors = [tensor for block in blocks for tensor in (block.hidden, block.weight, block.bias)]
    nats = _CrossEntropy.apply(group, structure, targets, *tensors)
    return list(nats.split([num_rows for _, num_rows in structure]))


class _CrossEntropy(torch.autograd.Function):
    """log Σ exp(logits) − logits[target] of the rows of all softmaxes, one after the other, [Σ n].

    structure: the number of blocks and of rows of each softmax, whose blocks follow each other in `targets` (size,
    index, own) and in `tensors` (hidden, weight, bias).
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        structure: list[tuple[int, int]],
        targets: list[tuple[int, Tensor, Tensor]],
        *tensors: Tensor,
    ) -> Tensor:
        softmaxes = _Softmaxes(structure)
        inputs, blocks, sums = _parts(tensors, 3), [], []
        for place, (hidden, weight, bias) in enumerate(inputs):
            block = sharded_logits(hidden, weight, bias, targets[place][0], group)
            sums.append(_normalize_(block, whole=group.size == 1 and softmaxes.is_whole(place)))
            blocks.append(block)
        tops = all_reduce_max(softmaxes.combine(torch.maximum, sums), group)
        shares = [own - top for own, top in zip(sums, softmaxes.spread(tops), strict=True)]
        scores = [
            (block.gather(-1, index)[:, 0] + share).masked_fill_(~own, 0.0)
            for block, share, (_, index, own) in zip(blocks, shares, targets, strict=True)
        ]
        parts = ([share.exp() for share in shares], scores)
        total, score = all_reduce(torch.stack([softmaxes.combine(torch.add, part) for part in parts]), group)
        total.log_()
        shifts = [share - whole for share, whole in zip(shares, softmaxes.spread(total), strict=True)]
        ctx.softmaxes = softmaxes
        per_block = zip(inputs, blocks, shifts, targets, strict=True)
        ctx.save_for_backward(*[t for three, *two, (_, *pair) in per_block for t in (*three, *two, *pair)])
        return total - score

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        results: list[Tensor] = []
        saved = _parts(ctx.saved_tensors, 7)
        for (hidden, weight, bias, block, *rest), rows in zip(saved, ctx.softmaxes.spread(grads[0]), strict=True):
            shift, index, own = rest
            _to_gradients_(block, shift, index, own, rows)
            factor = block.to(product_type(weight))
            products = factor @ widen(weight), factor.t() @ widen(hidden), block.sum(dim=0)
            results += (product.to(bias.dtype) for product in products)
        return None, None, None, *results


def _parts(tensors: Sequence[Tensor], size: int) -> list[Sequence[Tensor]]:
    """Consecutive parts of `size`."""
    return [tensors[first : first + size] for first in range(0, len(tensors), size)]


class _Softmaxes:
    """Which softmax each block belongs to, and how many rows it has."""

    def __init__(self, structure: list[tuple[int, int]]) -> None:
        self._owners = [number for number, (num_blocks, _) in enumerate(structure) for _ in range(num_blocks)]
        self._rows = [num_rows for _, num_rows in structure]

    def is_whole(self, place: int) -> bool:
        """Whether a block is all of its softmax, as far as this rank knows."""
        return self._owners.count(self._owners[place]) == 1

    def combine(self, operation: Callable[[Tensor, Tensor], Tensor], values: list[Tensor]) -> Tensor:
        """The blocks' `values` [n] combined within each softmax, one softmax after the other, [Σ n]."""
        combined: dict[int, Tensor] = {}
        for value, owner in zip(values, self._owners, strict=True):
            combined[owner] = operation(combined[owner], value) if owner in combined else value
        return torch.cat(list(combined.values()))

    def spread(self, values: Tensor) -> list[Tensor]:
        """The inverse: of [Σ n] the rows of every block's softmax."""
        parts = values.split(self._rows)
        return [parts[owner] for owner in self._owners]


def _normalize_(logits: Tensor, *, whole: bool) -> Tensor:
    """Make logits [n, V_l] the log-probabilities of their own columns; returns the columns' log-sum-exp [n].

    whole: there are no other columns, and what is returned is zero instead.
    """
    if whole or not len(logits):
        torch.log_softmax(logits, -1, out=logits)
        return logits.new_zeros(len(logits))
    tops, places = logits.max(dim=-1)
    torch.log_softmax(logits, -1, out=logits)
    return tops - logits.gather(-1, places[:, None])[:, 0]


def _to_gradients_(block: Tensor, shift: Tensor, index: Tensor, own: Tensor, grad: Tensor) -> None:
    """From log-probabilities to (probability − 1 at the target) · gradient of the row's loss.

    shift [n] takes log-probabilities from the block's own columns to the whole softmax.
    """
    for piece in range(0, len(block), step := max(1, PIECE // block.shape[1])):
        rows = slice(piece, piece + step)
        block[rows].add_(shift[rows, None]).exp_().mul_(grad[rows, None])
    block.scatter_add_(-1, index, -grad.masked_fill(~own, 0.0)[:, None])
