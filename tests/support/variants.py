"""The variants at a size for tests, and two blocks through a network of any of them."""

import numpy as np
import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.kernels.registry import BACKENDS
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.collectives import all_gather
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.random import DropoutKeys

VARIANTS = ("all-attn", "attn-split", "head-split", "single-head", "ff-attn", "transformer", "no-persistent")
VOCABULARY, STREAMS, BLOCK, SEED = 13, [5, 2], 4, 2**33 + 77


def model_of(name: str, **changes) -> ModelConfig:
    """A small model that divides over four ranks. changes: fields of it. "no-persistent" is all-attn with N = 0."""
    feed_forward = name in ("ff-attn", "transformer")
    fields = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "persistent_memory_size": 0 if feed_forward or name == "no-persistent" else 4,
        "max_attention_span": 6,
        "span_ramp": 3,
        "span_loss": 0.0,
        "feed_forward_size": 12 if feed_forward else 0,
        **changes,
    }
    return ModelConfig(variant="all-attn" if name == "no-persistent" else name, **fields)


def dropout_of(name: str) -> dict[str, float]:
    """Every kind of dropout that a variant has, as fields of its configuration."""
    rates = {"attention_dropout": 0.3, "embedding_dropout": 0.2}
    return rates | ({"feed_forward_dropout": 0.4} if name in ("ff-attn", "transformer") else {})


def build(config: ModelConfig, group: Group, backend: str = "eager") -> Network:
    """This rank's network in float64, with spans inside the ramp and biases that are not zero."""
    network = Network(config, VOCABULARY, group, FusedOps("torch"), BACKENDS[backend](torch.device("cpu")))
    initialize(network, 4)
    network = network.double()
    for layer, z in enumerate(network.span_parameters()):
        spans = torch.linspace(0.05, 0.6, config.num_context_heads, dtype=torch.float64) + 0.03 * layer
        z.data.copy_(z.logical.shard(spans.view(-1, 1, 1), group.rank, group.size))
    return network


def blocks() -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets [B, M] of two consecutive blocks."""
    text = torch.from_numpy(np.random.default_rng(2).integers(VOCABULARY, size=(len(STREAMS), 2 * BLOCK + 1)))
    return [(text[:, at : at + BLOCK], text[:, at + 1 : at + BLOCK + 1]) for at in (0, BLOCK)]


def two_blocks(network: Network, dropout: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses [2, B, M] of both blocks, the second with the first's cache; gradients of their weighted sum, joined."""
    config, group = network.config, network.group
    slot = CacheSlot(range(config.num_layers), len(STREAMS), config.hidden_size, torch.float64, torch.device("cpu"))
    windows = (config.max_attention_span,) * config.num_layers
    losses = []
    for step, (inputs, targets) in enumerate(blocks(), start=1):
        keys = DropoutKeys(SEED, step, torch.tensor(STREAMS, dtype=torch.int32)) if dropout else None
        losses.append(network(inputs, BlockContext(windows=windows, cache=slot, dropout_keys=keys), targets))
        slot.commit(BLOCK)
    found = torch.stack(losses)
    weighted(found).backward()
    gradients = {}
    for logical, parameter in network.logical_parameters():
        assert parameter.grad is not None, logical.name
        shards = all_gather(parameter.grad, group) if logical.shard_dim is not None else [parameter.grad]
        gradients[logical.name] = logical.join(shards)
    return found.detach(), gradients


def weighted(losses: Tensor) -> Tensor:
    """A sum in which every token counts differently."""
    return (losses * torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype).view_as(losses)).sum()
