"""Vocabulary-parallel embedding, output layer and cross-entropy.

The V rows of a table are dealt in equal blocks of ⌈V / parts⌉ to the tensor group; a vocabulary that does not divide
leaves padding rows on the last ranks. They hold zeros, are never looked up, and their logits are −∞ before the softmax,
so they get neither probability nor gradient.

Shapes: B streams, M positions, D hidden, V vocabulary, V_l rows of this rank.
"""

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


class VocabularyParallelEmbedding(nn.Module):
    """Token ids [B, M] → vectors [B, M, D], replicated. Each rank looks up its own ids; one all-reduce adds them up."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, group: Group, init: Init) -> None:
        super().__init__()
        self.group = group
        self.start, self.stop = vocabulary_range(vocab_size, group)
        self.weight = logical_parameter(LogicalTensor(f"{name}.weight", (vocab_size, hidden_size), 0, init), group)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        foreign = (tokens < self.start) | (tokens >= self.stop)
        local = F.embedding((tokens - self.start).masked_fill(foreign, 0), self.weight)
        return sum_over_shards(local.masked_fill(foreign[..., None], 0.0), self.group)


class VocabularyParallelOutput(nn.Module):
    """Hidden states [B, M, D], replicated → this rank's logits [B, M, V_l], padding at −∞."""

    def __init__(self, name: str, hidden_size: int, vocab_size: int, group: Group, init: Init) -> None:
        super().__init__()
        self.group = group
        start, stop = vocabulary_range(vocab_size, group)
        self.num_own = stop - start
        self.weight = logical_parameter(LogicalTensor(f"{name}.weight", (vocab_size, hidden_size), 0, init), group)
        self.bias = logical_parameter(LogicalTensor(f"{name}.bias", (vocab_size,), 0, init), group)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = F.linear(copy_to_shards(hidden, self.group), self.weight, self.bias)
        if self.num_own == logits.shape[-1]:
            return logits
        padding = torch.arange(logits.shape[-1], device=logits.device) >= self.num_own
        return logits.masked_fill(padding, float("-inf"))


class _CrossEntropy(torch.autograd.Function):
    """−log softmax(logits)[target] over sharded logits. Two all-reduces forward, none backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, stop: int, group: Group) -> Tensor:
        maximum = all_reduce_max(logits.amax(dim=-1), group)
        shifted = logits - maximum[..., None]
        foreign = (targets < start) | (targets >= stop)
        local = (targets - start).masked_fill(foreign, 0)
        chosen = shifted.gather(-1, local[..., None])[..., 0].masked_fill(foreign, 0.0)
        exponentials = shifted.exp_()
        sums, chosen = all_reduce(torch.stack([exponentials.sum(dim=-1), chosen]), group)
        ctx.save_for_backward(exponentials.div_(sums[..., None]), local, foreign)
        return sums.log() - chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, local, foreign = ctx.saved_tensors
        grad = probabilities.clone()
        grad.scatter_add_(-1, local[..., None], (~foreign)[..., None].to(grad.dtype).neg())
        return grad * grads[0][..., None], None, None, None, None


def vocabulary_parallel_cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int, group: Group) -> Tensor:
    """Negative log-likelihood in nats of each target, [B, M], replicated.

    logits: this rank's [B, M, V_l], padding at −∞; targets: global ids [B, M]. bfloat16 and float16 logits are taken in
    float32. Targets lie inside the vocabulary: ids are checked when the data is opened.
    """
    start, stop = vocabulary_range(vocab_size, group)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return _CrossEntropy.apply(logits, targets, start, stop, group)


def gather_logits(logits: Tensor, vocab_size: int, group: Group) -> Tensor:
    """The full logits [B, M, V] on every rank, without padding; no gradient passes."""
    return torch.cat(all_gather(logits.detach(), group), dim=-1)[..., :vocab_size]
