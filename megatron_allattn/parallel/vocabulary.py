"""Vocabulary-parallel embedding, output layer and cross-entropy.

The V rows of a table are dealt in equal blocks of ⌈V / parts⌉ to the tensor group; a vocabulary that does not divide
leaves padding rows on the last ranks. They hold zeros, are never looked up, and their logits are −∞ before the softmax,
so they get neither probability nor gradient.

An output layer has one forward with two results: the negative log-likelihood of given targets, which needs two small
all-reduces, or all log-probabilities on every rank. (One forward, because DeepSpeed's ZeRO 3 gathers a module's weights
around it.) Softmaxes are taken in float32 at least.

Shapes: B streams, M positions, D hidden, V vocabulary, V_l rows of this rank; n any number of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_allattn.parallel.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    copy_to_shards,
    sum_over_shards,
)
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.layout import padded_share
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_parameter


def vocabulary_range(vocab_size: int, group: Group) -> tuple[int, int]:
    """The ids [start, stop) whose rows this rank owns, padding excluded."""
    rows = padded_share(vocab_size, group.size)
    return min(group.rank * rows, vocab_size), min((group.rank + 1) * rows, vocab_size)


def locate(ids: Tensor, vocab_size: int, group: Group) -> tuple[Tensor, Tensor]:
    """Where ids of a table lie in this rank's shard: their row (0 for those elsewhere) and whether they are here.

    Ids outside 0 … vocab_size − 1 are nowhere.
    """
    start, stop = vocabulary_range(vocab_size, group)
    own = (ids >= start) & (ids < stop)
    return (ids - start).masked_fill(~own, 0), own


class VocabularyParallelEmbedding(nn.Module):
    """Token ids [B, M] → vectors [B, M, D], replicated: the weight's rows times `scale`.

    Each rank looks up its own ids; one all-reduce adds them up.
    """

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, group: Group, init: Init, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.group, self.vocab_size, self.scale = group, vocab_size, scale
        self.weight = logical_parameter(LogicalTensor(f"{name}.weight", (vocab_size, hidden_size), 0, init), group)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            vectors = F.embedding(tokens, self.weight)
        else:
            rows, own = locate(tokens, self.vocab_size, self.group)
            vectors = sum_over_shards(F.embedding(rows, self.weight).masked_fill(~own[..., None], 0.0), self.group)
        return vectors if self.scale == 1.0 else vectors * self.scale


class VocabularyParallelOutput(nn.Module):
    """Hidden states [B, M, D], replicated → nats per target [B, M], or log-probabilities [B, M, V] without targets.

    tied: the embedding whose weight it uses instead of one of its own; the bias is always its own.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        vocab_size: int,
        group: Group,
        init: Init,
        tied: VocabularyParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.group, self.vocab_size = group, vocab_size
        self.weight = (
            logical_parameter(LogicalTensor(f"{name}.weight", (vocab_size, hidden_size), 0, init), group)
            if tied is None
            else tied.weight
        )
        self.bias = logical_parameter(LogicalTensor(f"{name}.bias", (vocab_size,), 0, init), group)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            with torch.no_grad():
                logits = sharded_logits(hidden, self.weight, self.bias, self.vocab_size, self.group)
                return gather_logits(logits, self.vocab_size, self.group).log_softmax(dim=-1)
        flat = copy_to_shards(hidden, self.group).flatten(0, 1)
        logits = sharded_logits(flat, self.weight, self.bias, self.vocab_size, self.group)
        block = LogitBlock(logits, *locate(targets.flatten(), self.vocab_size, self.group))
        return vocabulary_parallel_cross_entropy([[block]], self.group)[0].view_as(targets)


def sharded_logits(hidden: Tensor, weight: Tensor, bias: Tensor, size: int, group: Group) -> Tensor:
    """This rank's logits [..., V_l] of a table of `size` rows, padding at −∞, in float32 at least."""
    logits = F.linear(hidden, weight, bias)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    start, stop = vocabulary_range(size, group)
    if stop - start == logits.shape[-1]:
        return logits
    padding = torch.arange(logits.shape[-1], device=logits.device) >= stop - start
    return logits.masked_fill(padding, float("-inf"))


def gather_logits(logits: Tensor, size: int, group: Group) -> Tensor:
    """The full logits [..., size] on every rank, without padding, from every rank's `sharded_logits`; no gradient."""
    return torch.cat(all_gather(logits.detach(), group), dim=-1)[..., :size]


@dataclass(frozen=True)
class LogitBlock:
    """Some columns of a softmax over n rows, of which each rank holds a shard.

    logits: this rank's [n, V_l], padding at −∞; index [n]: the column of each row's target in the shard; own [n]:
    whether it is there at all (it is in one block of the softmax, on one rank).
    """

    logits: Tensor
    index: Tensor
    own: Tensor


def vocabulary_parallel_cross_entropy(softmaxes: Sequence[Sequence[LogitBlock]], group: Group) -> list[Tensor]:
    """Negative log-likelihood in nats of the targets of several softmaxes, each one [n], replicated.

    A softmax is the blocks that its columns come in. Two all-reduces forward for all of them together, none backward.
    """
    blocks = [block for softmax in softmaxes for block in softmax]
    structure = [(len(softmax), len(softmax[0].own)) for softmax in softmaxes]
    targets = [(block.index[:, None], block.own) for block in blocks]
    nats = _CrossEntropy.apply(group, structure, targets, *[block.logits for block in blocks])
    return list(nats.split([num_rows for _, num_rows in structure]))


class _CrossEntropy(torch.autograd.Function):
    """log Σ exp(logits) − logits[target] of the rows of all softmaxes, one after the other, [Σ n].

    structure: the number of blocks and of rows of each softmax, whose blocks follow each other in `logits`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        structure: list[tuple[int, int]],
        targets: list[tuple[Tensor, Tensor]],
        *logits: Tensor,
    ) -> Tensor:
        ctx.owners = [number for number, (num_blocks, _) in enumerate(structure) for _ in range(num_blocks)]
        ctx.rows = [num_rows for _, num_rows in structure]
        maxima = [block.amax(dim=-1) for block in logits]
        tops = all_reduce_max(_combine(torch.maximum, maxima, ctx.owners), group).split(ctx.rows)
        shifted = [block - tops[owner][:, None] for block, owner in zip(logits, ctx.owners, strict=True)]
        scores = [
            block.gather(-1, index)[:, 0].masked_fill(~own, 0.0)
            for block, (index, own) in zip(shifted, targets, strict=True)
        ]
        sums = [block.exp_().sum(dim=-1) for block in shifted]
        partial = torch.stack([_combine(torch.add, values, ctx.owners) for values in (sums, scores)])
        total, score = all_reduce(partial, group)
        for block, owner in zip(shifted, ctx.owners, strict=True):
            block.div_(total.split(ctx.rows)[owner][:, None])
        ctx.save_for_backward(*shifted, *[tensor for pair in targets for tensor in pair])
        return total.log() - score

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of a block: (probability − 1 at the target) times the gradient of the row's loss."""
        count, rows = len(ctx.owners), grads[0].split(ctx.rows)
        probabilities, targets = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        results = []
        for block, owner, index, own in zip(probabilities, ctx.owners, targets[::2], targets[1::2], strict=True):
            grad = rows[owner][:, None]
            results.append((block * grad).scatter_add_(-1, index, -grad.masked_fill(~own[:, None], 0.0)))
        return None, None, None, *results


def _combine(operation: Callable[[Tensor, Tensor], Tensor], values: list[Tensor], owners: list[int]) -> Tensor:
    """The blocks' `values` [n] combined within each softmax, one softmax after the other."""
    combined: dict[int, Tensor] = {}
    for value, owner in zip(values, owners, strict=True):
        combined[owner] = operation(combined[owner], value) if owner in combined else value
    return torch.cat(list(combined.values()))
