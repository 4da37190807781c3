"""Networks to measure: random weights, the spans of a profile, full caches, tokens like those of a text."""

import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig, Recompute
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.kernels.fused import choose_fused
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.model.span import cache_length
from megatron_allattn.parallel.groups import ALONE

SEED = 1234
Z = tuple[tuple[float, ...], ...]  # of every layer's context heads


def random_network(
    model: ModelConfig,
    vocab_size: int,
    z: Z | None,
    device: torch.device,
    dtype: torch.dtype,
    attend: Attend,
    recompute: Recompute = "none",
) -> Network:
    """A network at its initial weights but for the spans z, None where they are fixed."""
    fused = choose_fused("auto", device.type == "cuda")
    network = Network(model, vocab_size, ALONE, fused, attend, recompute)
    initialize(network, SEED)
    with torch.no_grad():
        for parameter, layer in zip(network.span_parameters(), z or (), strict=True):
            parameter.copy_(torch.tensor(layer).view_as(parameter))
    return network.to(device, dtype)


def full_cache(network: Network, windows: tuple[int, ...], batch: int) -> CacheSlot:
    """Caches as long as they get at these windows, of random hidden states like those that a LayerNorm gives."""
    model, weight = network.config, next(network.parameters())
    generator = torch.Generator().manual_seed(SEED)
    lengths = [cache_length(window, model.max_attention_span) for window in windows]
    states = [torch.randn(batch, length, model.hidden_size, generator=generator) for length in lengths]
    slot = CacheSlot(range(model.num_layers), batch, model.hidden_size, weight.dtype, weight.device)
    slot.restore([state.to(weight.device, weight.dtype) for state in states], max(lengths))
    return slot


def zipf_tokens(vocab_size: int, batch: int, length: int, seed: int = SEED) -> Tensor:
    """Random ids [batch, length], int64 on the CPU, with a probability of about 1 / (id + 1): ids of words are ordered
    by frequency, and that is how often words occur; for characters it hardly matters."""
    uniform = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((vocab_size + 1.0) ** uniform).long().sub(1).clamp(0, vocab_size - 1)
