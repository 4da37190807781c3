"""The language model: embedding, a list of layers that share one position table, output.

`Network.forward` maps a block of tokens [B, M] and the caches before it to the negative log-likelihood of each target,
or to the log-probabilities of the whole vocabulary. All communication inside is over the tensor group; between the
three steps below hidden states lie over it as parallel/residual.py says.

A pipeline stage is a network that holds a part of it: `embed`, `run_layers` and `read_out` are the three steps of
`forward`, of which a stage takes those that it has. The position table is on every stage; a table of the vocabulary
that embedding and output share is on the first and the last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_allattn.config import ModelConfig, Recompute
from megatron_allattn.kernels import eager
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.block import Block
from megatron_allattn.model.persistent import PersistentMemory
from megatron_allattn.model.position import PositionEmbedding
from megatron_allattn.model.variants import build_block
from megatron_allattn.parallel.adaptive import AdaptiveEmbedding, AdaptiveOutput, Clusters
from megatron_allattn.parallel.groups import ALONE, Group
from megatron_allattn.parallel.logical import Init, LogicalTensor, Placement, in_order, logical_of
from megatron_allattn.parallel.random import Site
from megatron_allattn.parallel.residual import Residual
from megatron_allattn.parallel.vocabulary import VocabularyParallelEmbedding, VocabularyParallelOutput


@dataclass(frozen=True)
class Part:
    """What a pipeline stage holds: some consecutive layers, and with the first of all the embedding, with the last the
    output."""

    layers: range
    num_layers: int

    @property
    def first(self) -> bool:
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        return self.layers.stop == self.num_layers


class Network(nn.Module):
    """An all-attention language model over `vocab_size` tokens; this rank's shard of it, and of a pipeline its part."""

    embedding: VocabularyParallelEmbedding | AdaptiveEmbedding | None
    output: VocabularyParallelOutput | AdaptiveOutput | None

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        group: Group,
        fused: FusedOps,
        attend: Attend = eager.attend,
        recompute: Recompute = "none",
        part: Part | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        """recompute: `--recompute-granularity`, what is computed again in backward instead of being kept; part: the
        whole network if left out."""
        super().__init__()
        self.config, self.vocab_size, self.group = config, vocab_size, group
        self.part = part or Part(range(config.num_layers), config.num_layers)
        self.residual = Residual(group, sequence_parallel and group.size > 1)
        embedding, output = build_vocabulary(config, vocab_size, group)
        shared = self.part.last and not config.untie_embeddings_and_output_weights
        self.embedding = embedding if self.part.first or shared else None
        self.position = PositionEmbedding("position", config.head_size, config.max_attention_span, group)
        self.layers = nn.ModuleList(
            build_block(config, layer, self.residual, fused, attend, recompute) for layer in self.part.layers
        )
        self.output = output if self.part.last else None
        self.place([in_order(config.num_context_heads, group.size)] * config.num_layers)

    def forward(
        self, tokens: Tensor, context: BlockContext, targets: Tensor | None = None, *, last_only: bool = False
    ) -> Tensor:
        """Global ids [B, M] → nats per target [B, M].

        Without targets the log-probabilities [B, M, V] of every position, in float32 at least, on every rank, without
        gradient; with `last_only` those after the last one, [B, 1, V].
        """
        hidden = self.run_layers(self.embed(tokens, context), context)
        return self.read_out(hidden, context, targets, last_only=last_only)

    def embed(self, tokens: Tensor, context: BlockContext) -> Tensor:
        """Global ids [B, M] → hidden states."""
        assert self.embedding is not None
        return self._dropout(self.residual.leave(self.embedding(tokens)), Site.EMBEDDING, context)

    def run_layers(self, hidden: Tensor, context: BlockContext) -> Tensor:
        """Hidden states before this part's layers → those after them."""
        position_key = self.position()
        for layer in self.layers:
            hidden = layer(hidden, position_key, context)
        return hidden

    def read_out(
        self, hidden: Tensor, context: BlockContext, targets: Tensor | None, *, last_only: bool = False
    ) -> Tensor:
        """Hidden states after the last layer → what `forward` returns."""
        assert self.output is not None
        hidden = self.residual.enter(self._dropout(hidden, Site.REPRESENTATION, context))
        return self.output(hidden[:, -1:] if last_only else hidden, targets)

    def _dropout(self, hidden: Tensor, site: Site, context: BlockContext) -> Tensor:
        if context.dropout_keys is None:
            return hidden
        first = self.residual.first_position(hidden)
        return context.dropout_keys.dropout(hidden, site, self.config.embedding_dropout, first_position=first)

    def span_parameters(self) -> list[nn.Parameter]:
        """z of every layer of this part, local heads; empty with a fixed span."""
        if not self.config.adaptive_span:
            return []
        return [block.attention.span.z for block in self.layers if isinstance(block, Block) and block.attention.span]

    def fold_scales(self) -> None:
        """Put what scales persistent vectors into the vectors: for inference alone, see `PersistentMemory`."""
        for module in self.modules():
            if isinstance(module, PersistentMemory):
                module.fold_scales()

    def place(self, placements: Sequence[Placement]) -> None:
        """From now on every rank's weights are those of these heads; at first each rank has consecutive ones.

        It moves nothing (`Engine.place_heads` does). placements: of the heads that attend to the context, for every
        layer of the whole network. `head_order`, int64 [layers, heads], has them side by side.
        """
        self.placements = tuple(placements)
        self.head_order = torch.tensor(self.placements, device="cpu").flatten(1)
        for block in self.layers:
            assert isinstance(block, Block)
            block.attention.hold(self.placements[block.attention.layer][self.group.rank])

    def shard(self, logical: LogicalTensor, full: Tensor) -> Tensor:
        """This rank's part of a logical tensor."""
        return logical.shard(full, self.group.rank, self.group.size, self._placement_of(logical))

    def join(self, logical: LogicalTensor, shards: list[Tensor]) -> Tensor:
        """A logical tensor from every rank's part, in rank order."""
        return logical.join(shards, self._placement_of(logical))

    def _placement_of(self, logical: LogicalTensor) -> Placement | None:
        return None if logical.heads is None else self.placements[logical.heads.layer]

    def logical_parameters(self) -> list[tuple[LogicalTensor, nn.Parameter]]:
        """Every parameter of this part with what it is, in a fixed order."""
        return [(logical_of(parameter), parameter) for parameter in self.parameters()]


def logical_tensors(config: ModelConfig, vocab_size: int) -> list[LogicalTensor]:
    """What a whole network's parameters are, in its order; nothing is allocated."""
    with torch.device("meta"):
        network = Network(config, vocab_size, ALONE, FusedOps("torch"))
    return [logical for logical, _ in network.logical_parameters()]


def build_vocabulary(
    config: ModelConfig, vocab_size: int, group: Group
) -> tuple[VocabularyParallelEmbedding | AdaptiveEmbedding, VocabularyParallelOutput | AdaptiveOutput]:
    """The embedding and the output layer, plain or adaptive, with weights of their own or shared.

    A plain weight that is shared starts ~ N(0, 1/D) and is multiplied by √D as an embedding (Vaswani et al. 2017,
    section 3.4), so that both vectors and logits start with unit variance; the paper has no such model.
    """
    size, tied = config.hidden_size, not config.untie_embeddings_and_output_weights
    if config.cutoffs:
        clusters = Clusters(vocab_size, config.cutoffs, size, config.adaptive_div_value)
        adaptive = AdaptiveEmbedding("embedding", clusters, group)
        return adaptive, AdaptiveOutput("output", clusters, group, adaptive if tied else None)
    scale = math.sqrt(size) if tied else 1.0
    embedding = VocabularyParallelEmbedding("embedding", vocab_size, size, group, Init("normal", 1.0 / scale), scale)
    init = Init("uniform", 1.0 / math.sqrt(size))
    return embedding, VocabularyParallelOutput("output", size, vocab_size, group, init, embedding if tied else None)
