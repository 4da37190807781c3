"""Tied and adaptive vocabularies in a whole network: the same trajectory at every layout and under every engine."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_allattn.config import ModelConfig
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trajectories import Case, Trajectory, build, differences, run_config, trajectory

PLAIN = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    persistent_memory_size=8,
    max_attention_span=64,
    embedding_dropout=0.1,
)
ADAPTIVE = replace(PLAIN, adaptive_cutoffs="10,30", adaptive_div_value=2)
MODELS = {
    "tied": replace(PLAIN, untie_embeddings_and_output_weights=False),
    "adaptive": ADAPTIVE,
    "adaptive tied": replace(ADAPTIVE, untie_embeddings_and_output_weights=False),
}
VOCABULARY = 61
# The streams of the first half hold words of the first cluster only, those of the second half words of the last one:
# with two replicas each hits clusters that the other never does.
HALF = 8 * 32 * 10
TOKENS = np.concatenate(
    [np.random.default_rng(seed).integers(*bounds, HALF) for seed, bounds in ((1, (0, 10)), (2, (30, 61)))]
).astype(np.uint8)


def train(pools: WorkerPools, case: Case, model: str) -> Trajectory:
    return pools(case.world_size).run(trajectory, case, TOKENS, VOCABULARY, 4, MODELS[model])[0]


@pytest.mark.parametrize(("size", "model"), [(2, "tied"), (2, "adaptive"), (2, "adaptive tied"), (4, "adaptive tied")])
def test_tensor_parallel_equals_one_process(size: int, model: str, pools: WorkerPools) -> None:
    case = Case(size, 1, 0, 1, "adagrad", "float64")
    found, expected = train(pools, case, model), train(pools, case.single(), model)
    assert max(differences(found, expected).values()) < 1e-12
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], weight, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("case", "model"),
    [
        (Case(1, 2, 2, 1, "adagrad", "float32", "deepspeed"), "adaptive tied"),
        (Case(1, 2, 3, 2, "adam", "float32", "deepspeed"), "adaptive"),
        (Case(2, 2, 0, 2, "adam", "float32", "plain"), "adaptive tied"),
        (Case(1, 1, 0, 2, "adam", "float32", "deepspeed", pipeline=2), "adaptive tied"),
        *rest(
            *((Case(1, 2, zero, 1, "adagrad", "float32", "deepspeed"), "adaptive tied") for zero in (1, 3)),
            *((Case(1, 2, zero, 2, "adam", "float32", "deepspeed"), "adaptive") for zero in (0, 2)),
            (Case(2, 2, 3, 1, "adagrad", "float32", "deepspeed"), "adaptive tied"),
            (Case(1, 2, 3, 2, "adagrad", "float32", "deepspeed"), "tied"),
            (Case(2, 1, 2, 2, "adam", "float32", "deepspeed"), "tied"),
            (Case(1, 1, 1, 2, "adagrad", "float32", "deepspeed", pipeline=2), "tied"),
            (Case(1, 2, 1, 1, "adam", "float32", "deepspeed", pipeline=2), "adaptive tied"),
            (Case(2, 1, 0, 1, "adagrad", "float32", "deepspeed", pipeline=2), "adaptive"),
        ),
    ],
    ids=str,
)
def test_replicas_that_hit_different_clusters_equal_one_process(case: Case, model: str, pools: WorkerPools) -> None:
    largest = differences(train(pools, case, model), train(pools, case.single(), model))
    assert largest["first loss"] < 1e-6
    assert largest["gradients"] < 1e-5
    assert largest["losses"] < 1e-5
    assert largest["first norm"] < 1e-5


def _initial(rank: int, world_size: int, case: Case) -> dict[str, np.ndarray]:
    engine = build(case, VOCABULARY, run_config(case, ADAPTIVE))
    return {logical.name: tensor.double().numpy() for logical, tensor in engine.weights()}


def test_every_parameter_moves_where_it_is_used(pools: WorkerPools) -> None:
    """Four steps later, only the weights of the cluster between the two halves are what they were."""
    case = Case(optimizer="adam")
    start, moved = pools(1).run(_initial, case)[0], train(pools, case, "adaptive").weights
    assert {name for name, weight in moved.items() if np.array_equal(weight, start[name])} == {
        "embedding.cluster1.weight",
        "embedding.cluster1.projection",
        "output.cluster1.weight",
        "output.cluster1.projection",
        "output.cluster1.bias",
    }
