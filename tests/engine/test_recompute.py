"""`--recompute-granularity`: the same losses, gradients and caches to the bit, with less memory, under every engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_allattn.benchmark.tensor_bytes import profiled_peak
from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.interface import Engine
from megatron_allattn.kernels.registry import BACKENDS
from tests.support import trajectories
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trajectories import MODEL, Case, run_config

VOCABULARY, BATCH, BLOCK = 61, 8, 32
TOKENS = np.random.default_rng(7).integers(0, VOCABULARY, (BATCH, 2 * BLOCK + 1))
VARIANTS = {
    "all-attn": MODEL,
    "transformer": replace(
        MODEL, variant="transformer", persistent_memory_size=0, feed_forward_size=48, feed_forward_dropout=0.1
    ),
    "head-split": replace(MODEL, variant="head-split"),
}


def build(case: Case, recompute: str, model: ModelConfig, backend: str, batch: int, block: int) -> Engine:
    run = run_config(case, model, batch, block)
    return trajectories.build(case, VOCABULARY, run, BACKENDS[backend](torch.device("cpu")), recompute)


def _steps(rank: int, world_size: int, case: Case, recompute: str, variant: str, backend: str) -> dict[str, np.ndarray]:
    """Losses, the second step's gradients, and weights and caches after it."""
    engine, losses, result = build(case, recompute, VARIANTS[variant], backend, BATCH, BLOCK), [], {}
    own = TOKENS[engine.streams.start : engine.streams.stop]
    for step in range(2):
        inputs, targets = (own[:, step * BLOCK + shift : (step + 1) * BLOCK + shift] for shift in (0, 1))
        losses.append(engine.forward_backward(inputs, targets, step + 1, engine.spans()))
        if step == 1:
            result |= {f"gradient of {logical.name}": tensor.numpy() for logical, tensor in engine.gradients()}
        engine.update(0.01, step + 1)
    result |= {logical.name: tensor.numpy() for logical, tensor in engine.weights()}
    caches = [slot.read(layer) for slot in engine.slots for layer in engine.network.part.layers]
    return result | {"losses": np.array(losses), "caches": torch.cat([c.flatten() for c in caches]).float().numpy()}


def check(
    pools: WorkerPools, case: Case, granularities: list[str], variant: str = "all-attn", backend: str = "blocked"
):
    expected, *results = (
        pools(case.world_size).run(_steps, case, recompute, variant, backend) for recompute in ["none", *granularities]
    )
    for found in results:
        for own, wanted in zip(found, expected, strict=True):
            assert own.keys() == wanted.keys()
            for name, value in wanted.items():
                np.testing.assert_array_equal(own[name], value, err_msg=name)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2, 3, 1, "adam", "bfloat16", "deepspeed"),
        Case(1, 1, 1, 2, "adam", "float32", "deepspeed", pipeline=2),
        *rest(Case(2, 1, 0, 2, "adam"), *(Case(1, 2, zero, 2, "adagrad", "float32", "deepspeed") for zero in range(4))),
    ],
    ids=str,
)
def test_the_same_bits(case: Case, pools: WorkerPools) -> None:
    check(pools, case, ["selective", "full"])


@pytest.mark.parametrize("variant", ["transformer", "head-split"])
def test_the_same_bits_in_variants(variant: str, pools: WorkerPools) -> None:
    check(pools, Case(2, 1), ["selective", "full"], variant)


def test_whole_layers_with_the_eager_backend(pools: WorkerPools) -> None:
    check(pools, Case(2, 1, 3, 1, "adam", "float32", "deepspeed"), ["full"], backend="eager")


DEEPSPEED = Case(engine="deepspeed")
WIDE = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, persistent_memory_size=32, span_ramp=8)


def test_the_peak_falls(pools: WorkerPools) -> None:
    peaks = [pools(1).run(_peak, DEEPSPEED, recompute)[0] for recompute in ("none", "selective", "full")]
    vectors = 4 * 4 * 512 * WIDE.hidden_size  # bytes of as many hidden states as a step has tokens
    assert peaks[0] - peaks[1] > 0.8 * 3 * (WIDE.num_layers - 1) * vectors  # q, k and v
    assert peaks[1] - peaks[2] > 0.8 * 2 * (WIDE.num_layers - 1) * vectors  # and outputs of heads and of sublayers


def _peak(rank: int, world_size: int, case: Case, recompute: str) -> int:
    tokens = np.zeros((4, 513), dtype=np.int64)
    engines: list[Engine] = []

    def step() -> None:
        engines[0].train_step(tokens[:, :-1], tokens[:, 1:], 1, 0.1, engines[0].spans())

    def start() -> None:
        engines.append(build(case, recompute, WIDE, "blocked", 4, 512))
        step()

    return profiled_peak(start, step)
