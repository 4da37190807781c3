"""A training step as a benchmark runs it: what it computes, what is counted, and the numbers made of it."""

from dataclasses import replace

import pytest
import torch

from megatron_allattn.benchmark.machine import rates
from megatron_allattn.benchmark.networks import full_cache, random_network, zipf_tokens
from megatron_allattn.benchmark.profiles import read_profile
from megatron_allattn.benchmark.shapes import shape_of
from megatron_allattn.benchmark.step import StepCase, TrainingStep, step_result
from megatron_allattn.config import ModelConfig, UsageError
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.kernels import eager
from megatron_allattn.model.work import step_flops
from megatron_allattn.parallel import products

CPU = torch.device("cpu")
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    persistent_memory_size=6,
    max_attention_span=128,
    span_ramp=8,
    attention_dropout=0.25,
)
Z = ((0.0, 0.25), (0.5, 0.125))
CASE = StepCase(MODEL, 50, 2, 12, Z, "cpu", "float32", "blocked")


def test_tokens_follow_zipfs_law() -> None:
    found = zipf_tokens(1000, 100, 1000)
    assert (found.shape, found.dtype) == ((100, 1000), torch.int64)
    assert found.min() == 0 and found.max() == 999
    counts = found.flatten().bincount(minlength=1000)
    # P(id < n) = log(n + 1) / log(V + 1)
    assert counts[0].item() / found.numel() == pytest.approx(0.1003, abs=0.004)
    assert counts[:31].sum().item() / found.numel() == pytest.approx(0.5016, abs=0.006)
    assert torch.equal(found, zipf_tokens(1000, 100, 1000))
    assert zipf_tokens(1, 1, 5).tolist() == [[0] * 5]


def test_the_network_has_the_spans_and_caches_of_its_windows() -> None:
    network = random_network(MODEL, 50, Z, CPU, torch.float32, eager.attend)
    spans = find_spans(network, local_spans(network))
    # longest heads 32 and 64 tokens, ramp 8: W in steps of 64 below 128
    assert (spans.windows, spans.look_back) == ((64, 128), ((9, 41), (73, 25)))
    cache = full_cache(network, spans.windows, 3)
    assert [tuple(cache.read(layer).shape) for layer in range(2)] == [(3, 128, 16), (3, 128, 16)]
    assert cache.length == 128
    assert cache.read(0).std().item() == pytest.approx(1, abs=0.05)


def test_a_step_makes_every_gradient_and_carries_the_caches() -> None:
    step = TrainingStep(CASE)
    before = step.cache.read(0)
    first = step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in step.network.parameters())
    after = step.cache.read(0)
    assert torch.equal(after[:, :-12], before[:, 12:]) and step.cache.length == 128 + 12
    work = step_flops(MODEL, 50, 2, 12, ((9, 41), (73, 25)), "blocked")
    assert (first["flops_model"], first["flops_executed"]) == (work.model, work.executed)
    assert (first["span_mean"], first["span_max"]) == ((8 + 40 + 72 + 24) / 4, 72)
    assert first["backend"] == "blocked" and first["seconds"] > 0


def test_dropout_changes_from_step_to_step_and_the_backend_does_not_matter() -> None:
    gradients = []
    for backend in ("blocked", "eager"):
        step = TrainingStep(replace(CASE, backend=backend))
        for _ in range(2):
            step()
            gradients.append(step.network.layers[1].attention.persistent.value.grad.clone())
    assert not torch.allclose(gradients[0], gradients[1], rtol=0.1)
    assert torch.allclose(gradients[0], gradients[2], rtol=1e-4, atol=1e-7)


def test_targets_by_cluster_of_an_adaptive_vocabulary() -> None:
    model = replace(MODEL, adaptive_cutoffs="5,20", adaptive_div_value=2, untie_embeddings_and_output_weights=False)
    step = TrainingStep(replace(CASE, model=model))
    targets = step.targets.flatten().tolist()
    expected = [sum(t < 5 for t in targets), sum(5 <= t < 20 for t in targets), sum(t >= 20 for t in targets)]
    assert step._cluster_tokens() == expected and sum(expected) == 24
    work = step_flops(model, 50, 2, 12, ((9, 41), (73, 25)), "blocked", cluster_tokens=expected)
    assert step()["flops_model"] == work.model


def test_numbers_of_a_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams of 12 tokens in 2, 1 and 4 seconds; 10 GFLOP needed, 16 done."""
    run = {"backend": "blocked", "span_mean": 5.0, "span_max": 9.0, "flops_model": 10**10, "flops_executed": 16 * 10**9}
    found = [{**run, "seconds": seconds} for seconds in (2.0, 1.0, 4.0)]
    by_rate = {"float32": [10.0, 40.0, 20.0], "bfloat16": [100.0, 100.0, 100.0], "copy": [1.0, 1.0, 1.0]}
    result = step_result(CASE, found, by_rate, memory=1_100_000_000)
    assert result == {
        "tokens_per_second": 12.0,
        "tokens_per_second_runs": {"median": 12.0, "lowest": 6.0, "highest": 24.0, "runs": 3, "spread": 1.5},
        "seconds_per_step": 2.0,
        "peak_memory_gb": 1.1,
        "gemm_gflops": 20.0,
        "gemm_gflops_bfloat16": 100.0,
        "tokens_per_second_per_gemm_gflops": 0.6,  # of 1.2, 0.6 and 0.3
        "gflops": 5.0,
        "share": 0.25,  # of 5 / 10, 10 / 40 and 2.5 / 20
        "share_executed": 0.4,
        "gflop_per_step": {"model": 10.0, "executed": 16.0},
        "dtype": "float32",
        "attention_backend": "blocked",
        "recompute_granularity": "none",
        "attention_dropout": 0.25,
        "span_mean": 5.0,
        "span_max": 9.0,
    }
    for there, share in ((True, 0.05), (False, 0.25)):  # without instructions the products are float32's
        monkeypatch.setattr(products, "multiplies_bfloat16", lambda there=there: there)
        half = step_result(replace(CASE, dtype="bfloat16"), found, by_rate, memory=1)
        assert (half["share"], half["tokens_per_second_per_gemm_gflops"]) == (share, 0.6)


def test_rates_count_operations_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_allattn.benchmark.machine.seconds", lambda action, device: (action(), 3e-6)[1])
    found = rates("cpu", 100, 4000)()
    # a third of 3 µs each: 2 · 100³ operations; 1,000 numbers read and 1,000 written
    assert found == {"float32": pytest.approx(2000), "bfloat16": pytest.approx(2000), "copy": pytest.approx(8)}


def test_the_shape_of_a_recipe_with_changes() -> None:
    shape = shape_of("enwik8-small", 2, None, "facts", attention_dropout=0.0, num_layers=None)
    assert (shape.model.num_layers, shape.model.attention_dropout, shape.block, shape.vocab_size) == (18, 0.0, 512, 205)
    assert shape.profile == read_profile("facts") and shape.notes == []
    assert shape.z is not None and shape.z[0][0] == (227 - 32) / 8192
    described = shape.to_dict()
    assert (described["span_mean"], described["span_max"], described["span_profile"]) == (162, 1519, "facts")


@pytest.mark.parametrize(
    ("recipe", "profile", "sweep", "message"),
    [
        ("enwik-small", None, False, "--recipe enwik-small: unknown recipe; did you mean enwik8-small?"),
        ("enwik8-transformer-small-fixed-span", "late", False, "--span-profile late: the spans of enwik8-"),
        ("enwik8-small", "late", True, "--span-profile late: --sweep has spans of its own; leave one of the two out"),
    ],
)
def test_a_shape_that_cannot_be(recipe: str, profile: str | None, sweep: bool, message: str) -> None:
    with pytest.raises(UsageError) as error:
        shape_of(recipe, 1, None, profile, sweep=sweep)
    assert str(error.value).startswith(message)


def test_fixed_spans_need_no_profile() -> None:
    shape = shape_of("enwik8-transformer-small-fixed-span", 1, 64, None)
    assert shape.profile is None and shape.z is None and "spans fixed at 8192" in shape.describe()
