"""Attention alone: its work by hand, the comparison of backends and what it finds, layers beside it."""

from dataclasses import replace

import pytest
import torch

from megatron_allattn.benchmark import check
from megatron_allattn.benchmark.attention import Attention, AttentionCase, measure_attention
from megatron_allattn.benchmark.check import compare_backends, relative_difference
from megatron_allattn.benchmark.layer import LayerCase, Layers, OwnLayers, measure_layers
from megatron_allattn.benchmark.peers import PEERS, StandardLayer, missing
from megatron_allattn.config import ModelConfig
from megatron_allattn.kernels import eager
from megatron_allattn.kernels.registry import BACKENDS
from tests.benchmark.test_step import CPU, MODEL, Z

CASE = AttentionCase(MODEL, 2, 12, Z, "cpu", "float64", "eager")


def test_backends_run_the_same() -> None:
    expected, found = (Attention(replace(CASE, backend=name)) for name in ("eager", "blocked"))
    for layer in range(2):
        truth, other = expected.results(layer), found.results(layer)
        assert (
            truth.keys()
            == other.keys()
            == {
                *("output", "hidden", "query", "key", "value"),
                *("persistent_key", "persistent_value", "span", "position_key"),
            }
        )
        for name, tensor in truth.items():
            assert relative_difference(other[name], tensor) < 1e-7, name
            assert tensor.abs().sum() > 0, name


def test_work_by_hand() -> None:
    """What the equations need: T = 24 tokens, D = 16, K = 8, N = 6, distances 9 + 41 and 73 + 25."""
    found = Attention(CASE).gflop()["model"]
    block = 3 * 2 * 24 * 16 * 48
    distances = 9 + 41 + 73 + 25
    cached = 2 * 4 * 2 * 16 * 8 * distances
    attention = 3 * 2 * 24 * 8 * (3 * distances + 2 * 2 * 2 * 6)
    assert found * 1e9 == pytest.approx(2 * block + cached + attention)


def test_measured_in_turns_with_the_machine() -> None:
    cases = {name: replace(CASE, dtype="float32", backend=name) for name in ("eager", "blocked")}
    results, rates = measure_attention(cases, runs=2, warmup=0, sizes=(64, 4096))
    assert list(results) == ["eager", "blocked"] and rates.keys() == {"float32", "bfloat16", "copy"}
    for name, one in results.items():
        assert (one["attention_backend"], one["seconds"]["runs"]) == (name, 2)
        assert (one["span_mean"], one["span_max"]) == (36, 72)
        assert one["tokens_per_second"] == pytest.approx(24 / one["seconds"]["median"])
        assert one["share"] > 0


def test_every_backend_passes_or_says_why_not() -> None:
    rows = {row.part: row for row in compare_backends(CPU)}
    assert set(rows) == {f"attention {backend}, {dtype}" for backend in BACKENDS for dtype in ("float32", "bfloat16")}
    for part, row in rows.items():
        if "triton" in part:
            assert row.status in ("passed", "left out"), row
        else:
            assert row.status == "passed" and 0 < row.values["difference"] <= row.values["limit"], row
            assert len(row.values["differences"]) == 5 * 9 - 2  # one case has no persistent vectors


def test_a_backend_that_is_wrong_in_one_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(block, cache, weights, settings, state):
        doubled = 2 * weights.span - weights.span.detach()  # the same value, twice the gradient
        return eager.attend(block, cache, replace(weights, span=doubled), settings, state)

    monkeypatch.setitem(BACKENDS, "eager", lambda device: eager.attend)
    monkeypatch.setitem(BACKENDS, "wrong", lambda device: wrong)
    monkeypatch.setattr(check, "CASES", {"one": check.CASES["2 heads of 32, one vector"]})
    rows = {row.part: row for row in compare_backends(CPU) if "float32" in row.part}
    assert rows["attention eager, float32"].status == "passed"
    failed = rows["attention wrong, float32"]
    assert failed.status == "failed" and failed.detail.endswith("at worst: span, one")
    assert failed.values["difference"] == pytest.approx(1, rel=1e-3)


def test_what_is_not_finite_is_infinitely_wrong() -> None:
    one = torch.tensor([3.0, 4.0])
    assert relative_difference(one + torch.tensor([0.5, 0.0]), one) == pytest.approx(0.1)
    assert relative_difference(torch.tensor([float("nan"), 4.0]), one) == float("inf")


LAYERS = LayerCase(MODEL, 2, 12, Z, "cpu", "float32", "blocked")


def test_peers_have_as_many_parameters() -> None:
    own = Layers(LAYERS).parameters
    d, vectors = 16, 6
    assert own == 2 * (4 * d * d + 2 * vectors * d + 2 * d + 2)  # projections, vectors, norm, spans
    standard = Layers(replace(LAYERS, layer="standard")).parameters
    assert standard - own == 2 * (2 * d + vectors + d - 2)  # one more norm, two biases, no spans


def test_our_stack_is_the_networks_layers() -> None:
    with torch.no_grad():
        hidden = torch.randn(2, 12, 16)
        found = [OwnLayers(replace(LAYERS, layer=name), CPU, torch.float32)(hidden) for name in ("blocked", "eager")]
    assert torch.allclose(*found, atol=1e-5)
    assert torch.allclose(found[0].mean(-1), torch.zeros(2, 12), atol=1e-5)  # behind a LayerNorm


def test_the_standard_layer_is_causal() -> None:
    torch.manual_seed(0)
    layer = StandardLayer(replace(MODEL, attention_dropout=0.0))
    hidden = torch.randn(1, 10, 16)
    changed = hidden.clone()
    changed[:, 6:] += 1
    before, after = layer(hidden), layer(changed)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=0.1)


def test_layers_beside_each_other() -> None:
    cases = {"ours": LAYERS, "standard": replace(LAYERS, layer="standard")}
    results, _ = measure_layers(cases, runs=1, warmup=1, sizes=(64, 4096))
    ours, standard = results["ours"], results["standard"]
    assert ours["first_over_this"] == 1
    assert standard["first_over_this"] == pytest.approx(standard["seconds"]["median"] / ours["seconds"]["median"])
    assert ours["parameters_per_layer"] == Layers(LAYERS).parameters / 2


def test_x_transformers_where_it_is_installed() -> None:
    why = missing("x-transformers")
    if why is not None:
        pytest.skip(why)
    model = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=2, persistent_memory_size=8)
    layer = PEERS["x-transformers"](model)
    hidden = torch.randn(1, 10, 32)
    changed = hidden.clone()
    changed[:, 6:] += 1
    assert torch.allclose(layer(hidden)[:, :6], layer(changed)[:, :6], atol=1e-5)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 32 * 32 + 2 * 8 * 32 + 2 * 32
