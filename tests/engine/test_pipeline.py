"""DeepSpeed's pipeline against one stage: what layouts and checkpoints do not show."""

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.engine.drift import check_replicas
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trajectories import MODEL, Case, build, differences, run_config, trajectory

VOCABULARY = 101
TOKENS = np.random.default_rng(7).integers(0, VOCABULARY, 8 * 32 * 12).astype(np.uint8)
DEEP = replace(MODEL, num_layers=5)


def train(pools: WorkerPools, case: Case, steps: int = 3, model: Any = DEEP) -> Any:
    return pools(case.world_size).run(trajectory, case, TOKENS, VOCABULARY, steps, model)[0]


@pytest.mark.parametrize("optimizer", ["adam", *rest("adagrad")])
def test_where_layers_are_cut_does_not_change_a_bit_of_the_first_loss(optimizer: str, pools: WorkerPools) -> None:
    one = train(pools, Case(1, 1, 1, 2, optimizer, "float32", "deepspeed"))
    for layers in ((1, 4), (3, 2), (4, 1)):
        found = train(pools, Case(1, 1, 1, 2, optimizer, "float32", "deepspeed", 2, layers))
        assert found.losses[0] == one.losses[0]
        assert max(differences(found, one).values()) < 1e-5


def test_a_stage_of_one_layer_for_each(pools: WorkerPools) -> None:
    one = train(pools, Case(1, 1, 1, 2, "adagrad", "float32", "deepspeed"))
    found = train(pools, Case(1, 1, 1, 2, "adagrad", "float32", "deepspeed", 5))
    assert found.losses[0] == one.losses[0] and max(differences(found, one).values()) < 1e-5


@pytest.mark.parametrize("optimizer", ["adam", *rest("adagrad")])
def test_bf16_in_a_pipeline_is_near_bf16_in_one_stage(optimizer: str, pools: WorkerPools) -> None:
    one = train(pools, Case(1, 1, 1, 2, optimizer, "bfloat16", "deepspeed"), 6)
    found = train(pools, Case(1, 1, 1, 2, optimizer, "bfloat16", "deepspeed", 2), 6)
    assert found.losses[0] == one.losses[0]
    np.testing.assert_allclose(found.losses, one.losses, rtol=2e-3)
    np.testing.assert_allclose(found.norms, one.norms, rtol=2e-2)


def test_fixed_spans_and_no_persistent_vectors(pools: WorkerPools) -> None:
    model = replace(DEEP, adaptive_span=False, persistent_memory_size=0, max_attention_span=64)
    one = train(pools, Case(1, 1, 1, 2, "adam", "float32", "deepspeed"), model=model)
    found = train(pools, Case(1, 1, 1, 2, "adam", "float32", "deepspeed", 2), model=model)
    assert max(differences(found, one).values()) < 1e-5


def _every_rank(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """What every rank says of the same things, and its groups' time-outs."""
    engine = build(case, VOCABULARY, run_config(case, DEEP))
    streams, losses = TokenStreams(TOKENS, 8, 32, 1), []
    for step in range(1, 4):
        block = streams.next_block(engine.streams)
        losses.append(engine.train_step(block.inputs, block.targets, step, 0.05, engine.spans()))
    slot = engine.new_evaluation_slot(engine.micro_batch_size)
    rows = slice(0, engine.micro_batch_size)
    nats = engine.evaluate_block(block.inputs[rows], block.targets[rows], engine.spans(), slot).item()
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not engine.groups.saving.handle]
    waits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    return {
        "results": losses,
        "nats": nats,
        "spans": engine.spans().tokens.tolist(),
        "weights": {logical.name: tensor.sum().item() for logical, tensor in engine.weights()},
        "cached": slot.length,
        "layers": list(engine.network.part.layers),
        "waits": waits,
    }


def test_every_stage_knows_what_the_run_reports(pools: WorkerPools) -> None:
    case = Case(2, 1, 1, 2, "adagrad", "float32", "deepspeed", 2)
    found = pools(4).run(_every_rank, case)
    for name in ("results", "nats", "spans", "weights", "cached"):
        assert all(rank[name] == found[0][name] for rank in found), name
    assert math.isfinite(found[0]["nats"]) and found[0]["cached"] == 32
    assert [rank["layers"] for rank in found] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
    one = pools(1).run(_every_rank, Case(1, 1, 1, 2, "adagrad", "float32", "deepspeed"))[0]
    assert found[0]["nats"] == pytest.approx(one["nats"], rel=1e-5)
    assert found[0]["weights"] == pytest.approx(one["weights"], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    "case",
    [Case(1, 1, 1, 1, "adam", "float32", "deepspeed", 2), *rest(Case(1, 2, 2, 1, "adam", "float32", "deepspeed"))],
    ids=str,
)
def test_no_process_group_waits_for_ever(case: Case, pools: WorkerPools) -> None:
    """Those that DeepSpeed makes included: it gives them no time-out of its own. That of saves is another
    (tests/faults/test_watchdog.py)."""
    for rank in pools(2).run(_every_rank, case):
        assert rank["waits"] == {timedelta(minutes=run_config(Case()).parallel.distributed_timeout_minutes)}


def _train_and_compare(rank: int, world_size: int, case: Case, tied: bool) -> list[float]:
    model = replace(DEEP, untie_embeddings_and_output_weights=not tied)
    engine = build(case, VOCABULARY, run_config(case, model))
    streams, losses = TokenStreams(TOKENS, 8, 32, 1), []
    for step in range(1, 4):
        block = streams.next_block(engine.streams)
        losses.append(engine.train_step(block.inputs, block.targets, step, 0.05, engine.spans()).loss)
    check_replicas(engine)
    return losses


@pytest.mark.parametrize(
    ("zero", "optimizer", "dtype", "tied"),
    [
        (1, "adam", "float32", True),
        *rest((0, "adagrad", "float32", True), (1, "adam", "bfloat16", False), (1, "adagrad", "float32", True)),
    ],
)
def test_what_stages_share_stays_the_same_with_more_than_two_replicas(
    zero: int, optimizer: str, dtype: str, tied: bool, pools: WorkerPools
) -> None:
    """Sums of three numbers or more depend on their order, and stages average among tensors of their own."""
    case = Case(1, 4, zero, 1, optimizer, dtype, "deepspeed", 2)
    losses = pools(8).run(_train_and_compare, case, tied)
    assert all(one == losses[0] for one in losses) and math.isfinite(losses[0][-1])
