"""Vocabulary-parallel embedding and output layer.

The V rows of a table are dealt in equal blocks of ⌈V / parts⌉ to the tensor group; a vocabulary that does not divide
leaves padding rows on the last ranks. They hold zeros, are never looked up, and their logits are the lowest finite
number before the softmax, so they get neither probability nor gradient.

An output layer has one forward with two results: the negative log-likelihood of given targets, which needs two small
all-reduces, or all log-probabilities on every rank. (One forward, because DeepSpeed's ZeRO 3 gathers a module's weights
around it.) Softmaxes are taken in float32 at least.

Shapes: B streams, M positions, D hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_allattn.parallel.cross_entropy import (
    LogitBlock,
    gather_logits,
    sharded_logits,
    vocabulary_parallel_cross_entropy,
    vocabulary_range,
)
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_parameter


def locate(ids: Tensor, vocab_size: int, group: Group) -> tuple[Tensor, Tensor]:
    """Where ids of a table lie in this rank's shard: their row (0 for those elsewhere) and whether they are here.

    Ids outside 0 … vocab_size − 1 are nowhere.
    """
    start, stop = vocabulary_range(vocab_size, group)
    own = (ids >= start) & (ids < stop)
    return (ids - start).masked_fill(~own, 0), own


class VocabularyParallelEmbedding(nn.Module):
    """Token ids [B, M] → vectors [B, M, D], the weight's rows times `scale`: of this rank's ids, and zeros for others'.

    The sum over the group is the embedding (`Residual.leave`).
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
            vectors = F.embedding(rows, self.weight).masked_fill(~own[..., None], 0.0)
        return vectors if self.scale == 1.0 else vectors * self.scale


class VocabularyParallelOutput(nn.Module):
    """Hidden states [B, M, D] (`Residual.enter`) → nats per target [B, M], or log-probabilities [B, M, V] without any.

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
        flat = hidden.flatten(0, 1)
        place = locate(targets.flatten(), self.vocab_size, self.group)
        block = LogitBlock(flat, self.weight, self.bias, self.vocab_size, *place)
        return vocabulary_parallel_cross_entropy([[block]], self.group)[0].view_as(targets)
