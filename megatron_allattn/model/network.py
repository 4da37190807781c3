"""The language model: embedding, a list of layers that share one position table, output.

`Network.forward` maps a block of tokens [B, M] and the caches before it to the negative log-likelihood of each target
(or to this rank's logits). All communication inside is over the tensor group.
"""

import math

from torch import Tensor, nn

from megatron_allattn.config import ModelConfig
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.block import Block
from megatron_allattn.model.position import PositionEmbedding
from megatron_allattn.model.variants import build_block
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_of
from megatron_allattn.parallel.random import Site
from megatron_allattn.parallel.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelOutput,
    vocabulary_parallel_cross_entropy,
)


class Network(nn.Module):
    """An all-attention language model over `vocab_size` tokens; this rank's shard of it."""

    def __init__(self, config: ModelConfig, vocab_size: int, group: Group, fused: FusedOps) -> None:
        super().__init__()
        self.config, self.vocab_size, self.group = config, vocab_size, group
        size = config.hidden_size
        self.embedding = VocabularyParallelEmbedding("embedding", vocab_size, size, group, Init("normal", 1.0))
        self.position = PositionEmbedding(
            "position", size // config.num_attention_heads, config.max_attention_span, group
        )
        self.layers = nn.ModuleList(build_block(config, layer, group, fused) for layer in range(config.num_layers))
        output_init = Init("uniform", 1.0 / math.sqrt(size))
        self.output = VocabularyParallelOutput("output", size, vocab_size, group, output_init)

    def forward(self, tokens: Tensor, context: BlockContext, targets: Tensor | None = None) -> Tensor:
        """Global ids [B, M] → nats per target [B, M], or this rank's logits [B, M, V_l] without targets."""
        keys, dropout = context.dropout_keys, self.config.embedding_dropout
        hidden = self.embedding(tokens)
        if keys is not None:
            hidden = keys.dropout(hidden, Site.EMBEDDING, dropout)
        position_key = self.position()
        for layer in self.layers:
            hidden = layer(hidden, position_key, context)
        if keys is not None:
            hidden = keys.dropout(hidden, Site.REPRESENTATION, dropout)
        logits = self.output(hidden)
        if targets is None:
            return logits
        return vocabulary_parallel_cross_entropy(logits, targets, self.vocab_size, self.group)

    def span_parameters(self) -> list[nn.Parameter]:
        """z of every layer, local heads; empty with a fixed span."""
        if not self.config.adaptive_span:
            return []
        return [block.attention.span.z for block in self.layers if isinstance(block, Block) and block.attention.span]

    def logical_parameters(self) -> list[tuple[LogicalTensor, nn.Parameter]]:
        """Every parameter with what it is, in a fixed order."""
        return [(logical_of(parameter), parameter) for parameter in self.parameters()]
