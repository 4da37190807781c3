"""The whole network: against loops over tokens, and that caches make segments equal to one long pass."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.kernels.registry import BACKENDS
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE
from megatron_allattn.parallel.random import DropoutKeys
from tests.support.slow_attention import EMBEDDING_SITE, REPRESENTATION_SITE, Problem, keep_factor, slow_attend

VOCABULARY, BATCH = 13, 2
CPU = torch.device("cpu")
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    persistent_memory_size=3,
    max_attention_span=6,
    span_ramp=2,
    adaptive_span=True,
)


def build(config: ModelConfig, dtype: torch.dtype = torch.float64, backend: str = "eager") -> Network:
    network = Network(config, VOCABULARY, ALONE, FusedOps("torch"), BACKENDS[backend](torch.device("cpu")))
    initialize(network, 4)
    generator = torch.Generator().manual_seed(9)
    for parameter in network.span_parameters():
        parameter.data.uniform_(0, 0.6, generator=generator)
    return network.to(dtype)


def tokens(length: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(2).integers(VOCABULARY, size=(BATCH, length)))


def slot_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> CacheSlot:
    return CacheSlot(range(config.num_layers), BATCH, config.hidden_size, dtype, CPU)


def log_probs_of(network: Network, segments: list[Tensor], slot: CacheSlot, window: int) -> Tensor:
    """Log-probabilities of all segments, one after the other, the cache committed after each."""
    windows = (window,) * network.config.num_layers
    outputs = []
    for segment in segments:
        outputs.append(network(segment, BlockContext(windows=windows, cache=slot, dropout_keys=None)))
        slot.commit(segment.shape[1])
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("empty_cache", ["attend", "mask"])
@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "fixed"])
@pytest.mark.parametrize("span", [3, 5, 8], ids=lambda span: f"span{span}")
@pytest.mark.parametrize("lengths", [[5, 5], [5, 3], [2, 7, 1], [5, 5, 2], [1] * 6], ids=str)
def test_segments_with_a_cache_equal_one_pass(lengths: list[int], span: int, adaptive: bool, empty_cache: str) -> None:
    """For every position, for a cache shorter than, as long as and longer than a segment, however full it is."""
    config = replace(CONFIG, max_attention_span=span, adaptive_span=adaptive, empty_cache=empty_cache)
    network, text = build(config), tokens(sum(lengths))
    once, parts = slot_of(config), slot_of(config)
    expected = log_probs_of(network, [text], once, span)
    found = log_probs_of(network, list(text.split(lengths, dim=1)), parts, span)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for layer in range(config.num_layers):
        torch.testing.assert_close(parts.read(layer), once.read(layer), rtol=1e-12, atol=1e-12)


def test_segments_equal_one_pass_in_float32() -> None:
    config = replace(CONFIG, max_attention_span=64, hidden_size=32, num_attention_heads=4, persistent_memory_size=16)
    network, text = build(config, torch.float32), tokens(80)
    expected = log_probs_of(network, [text], slot_of(config, torch.float32), 64)
    found = log_probs_of(network, list(text.split([40, 40], dim=1)), slot_of(config, torch.float32), 64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("lengths", [[5], [5, 3], [5, 5, 5], [2, 1]], ids=str)
def test_the_cache_holds_the_last_hidden_states_in_order_and_detached(lengths: list[int]) -> None:
    network, text = build(CONFIG), tokens(sum(lengths))
    slot = slot_of(CONFIG)
    log_probs_of(network, list(text.split(lengths, dim=1)), slot, 6)
    embedded = F.embedding(text, network.embedding.weight)
    assert torch.equal(slot.read(0), embedded[:, -6:])
    assert not any(slot.read(layer).requires_grad for layer in range(2))
    assert slot.length == sum(lengths)


def test_a_forward_pass_reads_the_same_cache_until_it_is_committed() -> None:
    network, text = build(CONFIG), tokens(10)
    slot, windows = slot_of(CONFIG), (6, 6)
    log_probs_of(network, [text[:, :5]], slot, 6)
    context = BlockContext(windows=windows, cache=slot, dropout_keys=None)
    first, again = network(text[:, 5:], context), network(text[:, 5:], context)
    assert torch.equal(first, again)


def test_a_window_that_grows_finds_what_it_needs_in_the_cache() -> None:
    config = replace(CONFIG, max_attention_span=200, span_ramp=4)
    network, text = build(config), tokens(220)
    slot = slot_of(config)
    log_probs_of(network, [text[:, :150]], slot, 8)
    assert slot.read(0).shape == (BATCH, 72, 8)  # the window and one chunk of 64 more
    assert torch.equal(slot.read(0), F.embedding(text, network.embedding.weight)[:, 78:150])
    log_probs_of(network, [text[:, 150:]], slot, 72)
    assert slot.read(1).shape == (BATCH, 136, 8)


def test_gradient_reaches_projections_through_the_cache_but_never_what_is_cached() -> None:
    """The key projection's gradient includes cached positions: it changes when they do, though they get none."""
    config = replace(CONFIG, num_layers=1)
    network, text = build(config), tokens(6)

    def gradient(cached: Tensor) -> Tensor:
        slot = slot_of(config)
        slot.restore([cached], 6)
        network.zero_grad()
        context = BlockContext(windows=(6,), cache=slot, dropout_keys=None)
        network(text[:, :1], context, text[:, 1:2]).sum().backward()
        return network.layers[0].attention.key.grad.clone()

    cached = torch.randn(BATCH, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert (gradient(cached) - gradient(cached.detach() * 1.5)).abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["eager", "blocked"])
@pytest.mark.parametrize("normalization", ["span", "window"])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_losses_equal_those_of_loops_over_tokens(probability: float, normalization: str, backend: str) -> None:
    """Two blocks, with attention, embedding and representation dropout at global streams, heads and positions."""
    config = replace(
        CONFIG, attention_dropout=probability, embedding_dropout=probability, span_normalization=normalization
    )
    network, text = build(config, backend=backend), tokens(9)
    slot, streams, seed = slot_of(config), [5, 2], 77
    weights = {logical.name: parameter.detach() for logical, parameter in network.logical_parameters()}
    caches = [torch.zeros(BATCH, 0, 8, dtype=torch.float64)] * 2
    for step, (start, stop) in enumerate([(0, 4), (4, 8)], start=1):
        inputs, targets = text[:, start:stop], text[:, start + 1 : stop + 1]
        keys = DropoutKeys(seed, step, torch.tensor(streams, dtype=torch.int32))
        found = network(inputs, BlockContext(windows=(6, 6), cache=slot, dropout_keys=keys), targets)
        slot.commit(4)
        dropout = (probability, seed, step, streams)
        expected, caches = _slow_losses(weights, config, inputs, targets, caches, dropout)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def _slow_losses(
    weights: dict[str, Tensor],
    config: ModelConfig,
    inputs: Tensor,
    targets: Tensor,
    caches: list[Tensor],
    dropout: tuple[float, int, int, list[int]],
) -> tuple[Tensor, list[Tensor]]:
    """Losses [B, M] of a block and the hidden states before each layer so far, from logical weights by name."""
    hidden = _slow_dropout(weights["embedding.weight"][inputs], EMBEDDING_SITE, dropout)
    kept = []
    for layer in range(config.num_layers):
        part = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in weights.items()}
        problem = Problem(
            block=hidden,
            cache=caches[layer],
            query=part["query.weight"],
            key=part["key.weight"],
            value=part["value.weight"],
            persistent_key=part["persistent.key"] * 2,  # √d_h
            persistent_value=part["persistent.value"] * 3**0.5,  # √N
            span=part["span"],
            position=weights["position.key"],
            heads=[0, 1],
            window=6,
            cached=100,
            ramp=config.span_ramp,
            layer=layer,
            normalization=config.span_normalization,
            dropout=dropout if dropout[0] else None,
        )
        kept.append(torch.cat([caches[layer], hidden], dim=1))
        residual = hidden + slow_attend(problem) @ part["out.weight"].T
        centred = residual - residual.mean(dim=-1, keepdim=True)
        normed = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
        hidden = normed * part["norm1.weight"] + part["norm1.bias"]
    hidden = _slow_dropout(hidden, REPRESENTATION_SITE, dropout)
    logits = hidden @ weights["output.weight"].T + weights["output.bias"]
    losses = logits.exp().sum(dim=-1).log() - logits.gather(-1, targets[..., None])[..., 0]
    return losses, kept


def _slow_dropout(x: Tensor, site: int, dropout: tuple[float, int, int, list[int]]) -> Tensor:
    probability, seed, step, streams = dropout
    factors = [
        [
            [keep_factor(seed, (site, step, stream, position), channel, probability) for channel in range(8)]
            for position in range(x.shape[1])
        ]
        for stream in streams
    ]
    return x * torch.tensor(factors, dtype=x.dtype)


def test_the_span_loss_reaches_every_span_once() -> None:
    config = replace(CONFIG, span_loss=0.5)
    network, text = build(config), tokens(5)
    plain = build(replace(CONFIG, span_loss=0.0))
    gradients = []
    for net, scale in ((network, 1.0), (plain, 1.0), (network, 0.25)):
        net.zero_grad()
        context = BlockContext(windows=(6, 6), cache=slot_of(config), dropout_keys=None, loss_scale=scale)
        (net(text[:, :4], context, text[:, 1:]).mean() * scale).backward()
        gradients.append(torch.stack([z.grad.flatten() for z in net.span_parameters()]))
    # coefficient · L / H = 0.5 · 6 / 2, whatever the layer; scaled like the main loss
    torch.testing.assert_close(gradients[0] - gradients[1], torch.full((2, 2), 1.5).double(), rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients[2], gradients[0] * 0.25, rtol=1e-13, atol=1e-14)


def test_names_and_shapes_of_all_weights() -> None:
    network = build(replace(CONFIG, num_layers=1))
    names = {logical.name: (logical.shape, logical.shard_dim) for logical, _ in network.logical_parameters()}
    square = (8, 8)
    assert names == {
        "embedding.weight": ((13, 8), 0),
        "position.key": ((1, 4, 6), None),
        "layers.0.query.weight": (square, 0),
        "layers.0.key.weight": (square, 0),
        "layers.0.value.weight": (square, 0),
        "layers.0.out.weight": (square, 1),
        "layers.0.persistent.key": ((2, 4, 3), 0),
        "layers.0.persistent.value": ((2, 3, 4), 0),
        "layers.0.span": ((2, 1, 1), 0),
        "layers.0.norm1.weight": ((8,), None),
        "layers.0.norm1.bias": ((8,), None),
        "output.weight": ((13, 8), 0),
        "output.bias": ((13,), 0),
    }
