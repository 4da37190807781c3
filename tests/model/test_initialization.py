"""Initial weights: their distributions, that no layout changes them, and loading."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.initialization import initialize, load_logical
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE, Group

VOCABULARY = 101
ALL_ATTENTION = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, persistent_memory_size=128, max_attention_span=256
)
TRANSFORMER = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    persistent_memory_size=0,
    max_attention_span=256,
    variant="transformer",
    feed_forward_size=256,
)
ADAPTIVE = replace(ALL_ATTENTION, adaptive_cutoffs="20,60", adaptive_div_value=2)
TIED = {"untie_embeddings_and_output_weights": False}


def weights_of(config: ModelConfig, seed: int, group: Group = ALONE) -> dict[str, torch.Tensor]:
    network = Network(config, VOCABULARY, group, FusedOps("torch"))
    initialize(network, seed)
    return {logical.name: parameter.detach() for logical, parameter in network.logical_parameters()}


def assert_normal(x: torch.Tensor, variance: float) -> None:
    """Mean, variance and fourth moment of N(0, variance), within five standard errors."""
    n = x.numel()
    assert abs(x.mean().item()) < 5 * math.sqrt(variance / n)
    assert abs(x.var().item() / variance - 1) < 5 * math.sqrt(2 / n)
    assert abs(x.pow(4).mean().item() / variance**2 - 3) < 5 * math.sqrt(96 / n)


def assert_uniform(x: torch.Tensor, bound: float) -> None:
    """Within ± bound, reaching out to it, with the variance bound² / 3."""
    n = x.numel()
    assert x.abs().max().item() <= bound
    assert x.abs().max().item() > bound * (1 - 10 / n)
    assert abs(x.mean().item()) < 5 * bound / math.sqrt(3 * n)
    assert abs(x.var().item() / (bound**2 / 3) - 1) < 5 * math.sqrt(0.8 / n)


def test_distributions() -> None:
    weights = weights_of(ALL_ATTENTION, 7)
    head_size = 16
    for layer in range(2):
        name = f"layers.{layer}"
        assert_normal(weights[f"{name}.persistent.key"], 1 / head_size)
        assert_normal(weights[f"{name}.persistent.value"], 1 / 128)
        for projection in ("query", "key", "value", "out"):
            assert_uniform(weights[f"{name}.{projection}.weight"], 1 / math.sqrt(64))
        assert weights[f"{name}.span"].tolist() == [[[0.0]]] * 4
        assert weights[f"{name}.norm1.weight"].tolist() == [1.0] * 64
        assert weights[f"{name}.norm1.bias"].tolist() == [0.0] * 64
    assert_normal(weights["embedding.weight"], 1.0)
    assert_normal(weights["position.key"], 1.0)
    assert_uniform(weights["output.weight"], 1 / math.sqrt(64))
    assert_uniform(weights["output.bias"], 1 / math.sqrt(64))


def test_distributions_of_the_feed_forward_sublayer() -> None:
    weights = weights_of(TRANSFORMER, 7)
    assert "layers.0.persistent.key" not in weights
    assert_uniform(weights["layers.1.ff.in.weight"], 1 / math.sqrt(64))
    assert_uniform(weights["layers.1.ff.in.bias"], 1 / math.sqrt(64))
    assert_uniform(weights["layers.1.ff.out.weight"], 1 / math.sqrt(256))
    assert_uniform(weights["layers.1.ff.out.bias"], 1 / math.sqrt(256))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_distributions_of_an_adaptive_vocabulary(tied: bool) -> None:
    weights = weights_of(replace(ADAPTIVE, **(TIED if tied else {})), 7)
    for k, width in enumerate((64, 32, 16)):
        bound = 1 / math.sqrt(width)
        assert_normal(weights[f"embedding.cluster{k}.weight"], 1.0)
        assert_uniform(weights[f"embedding.cluster{k}.projection"], bound)
        assert_uniform(weights[f"output.cluster{k}.bias"], bound)
        assert (f"output.cluster{k}.weight" in weights) is not tied
        if not tied:
            assert_uniform(weights[f"output.cluster{k}.weight"], bound)
            assert_uniform(weights[f"output.cluster{k}.projection"], bound)
    assert_uniform(weights["output.cluster_logits.weight"], 1 / math.sqrt(64))
    assert_uniform(weights["output.cluster_logits.bias"], 1 / math.sqrt(64))


def test_a_tied_vocabulary_starts_from_the_embedding() -> None:
    weights = weights_of(replace(ALL_ATTENTION, **TIED), 7)
    assert "output.weight" not in weights
    assert_normal(weights["embedding.weight"], 1 / 64)
    assert_uniform(weights["output.bias"], 1 / math.sqrt(64))


@pytest.mark.parametrize(("tied", "above"), [({}, 1.0), (TIED, math.sqrt(64))], ids=["untied", "tied"])
def test_a_plain_network_starts_near_the_uniform_guess(tied: dict, above: float) -> None:
    """A tied one gives the token that it reads a logit of up to √D: the residual stream carries that token's vector."""
    network = Network(replace(ALL_ATTENTION, **tied), VOCABULARY, ALONE, FusedOps("torch"))
    initialize(network, 7)
    tokens = torch.randint(VOCABULARY, (8, 33), generator=torch.Generator().manual_seed(1))
    slot = CacheSlot(range(2), 8, 64, torch.float32, torch.device("cpu"))
    context = BlockContext(windows=(64, 64), cache=slot, dropout_keys=None)
    loss = network(tokens[:, :-1], context, tokens[:, 1:]).mean().item()
    assert math.log(VOCABULARY) - 0.2 < loss < math.log(VOCABULARY) + above


def test_tensors_are_independent_of_each_other_and_decided_by_the_seed() -> None:
    weights, again, other = (weights_of(ALL_ATTENTION, seed) for seed in (7, 7, 8))
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    square = [name for name in weights if weights[name].shape == (64, 64)]
    assert len(square) == 8
    draws = [weights[name] for name in square] + [other[square[0]]]
    correlations = torch.corrcoef(torch.stack([draw.flatten() for draw in draws])) - torch.eye(len(draws))
    assert correlations.abs().max() < 5 / 64


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("config", "num_sharded"),
    [
        (ALL_ATTENTION, 17),
        (TRANSFORMER, 19),
        (ADAPTIVE, 14 + 3 + 6 + 2),  # all but projections: the layers', E_k of the input, E_k and b_k, C and c
        (replace(ADAPTIVE, **TIED), 14 + 3 + 3 + 2),
        (replace(ALL_ATTENTION, **TIED), 16),
    ],
    ids=["all-attention", "transformer", "adaptive", "adaptive tied", "tied"],
)
def test_shards_of_every_layout_join_to_the_same_weights(config: ModelConfig, num_sharded: int, size: int) -> None:
    single = weights_of(config, 3)
    groups = [Group(ranks=tuple(range(size)), rank=rank, handle=None) for rank in range(size)]
    networks = [Network(config, VOCABULARY, group, FusedOps("torch")) for group in groups]
    for network in networks:
        initialize(network, 3)
    sharded = 0
    for parts in zip(*(network.logical_parameters() for network in networks), strict=True):
        logical = parts[0][0]
        assert torch.equal(logical.join([parameter.detach() for _, parameter in parts]), single[logical.name])
        if logical.shard_dim is None:
            assert all(torch.equal(parameter, single[logical.name]) for _, parameter in parts)
        sharded += logical.shard_dim is not None
    assert sharded == num_sharded
    # 101 rows (41 of an adaptive vocabulary's last cluster) over 2 or 4 ranks: the last rank has padding, which is zero
    output = networks[-1].output
    last, rows = (output.weight(2), 41) if config.cutoffs else (output.weight, VOCABULARY)
    padding = size * last.shape[0] - rows
    assert padding == {2: 1, 4: 3}[size]
    assert last[-padding:].count_nonzero() == 0


def test_loading_sets_every_weight() -> None:
    network = Network(ALL_ATTENTION, VOCABULARY, ALONE, FusedOps("torch"))
    weights = weights_of(ALL_ATTENTION, 5)
    load_logical(network, weights)
    assert all(torch.equal(parameter, weights[logical.name]) for logical, parameter in network.logical_parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.0.span": None}, r"1 tensors differ .* first layers.0.span: the model has \(4, 1, 1\), the file none"),
        ({"extra": torch.zeros(2)}, r"first extra: the model has none, the file \(2,\)"),
        ({"output.bias": torch.zeros(100)}, r"first output.bias: the model has \(101,\), the file \(100,\)"),
        ({"layers.1.span": None, "extra": torch.zeros(2)}, "2 tensors differ"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    network = Network(ALL_ATTENTION, VOCABULARY, ALONE, FusedOps("torch"))
    weights = {
        name: tensor for name, tensor in {**weights_of(ALL_ATTENTION, 5), **change}.items() if tensor is not None
    }
    with pytest.raises(ValueError, match=message):
        load_logical(network, weights)
