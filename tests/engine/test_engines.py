"""DeepSpeed's engine against the plain one: half precision, evaluation that leaves no trace, cache slots, span loss."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from megatron_allattn.config.parameters import count_parameters
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.engine.interface import Engine
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.spoiled import changed_loss, spoiled
from tests.support.trajectories import MODEL, Case, build, run_config

TOKENS = np.random.default_rng(7).integers(0, 61, 8 * 32 * 40).astype(np.uint8)
VOCAB = 61
DTYPES = ("float32", "bfloat16")


def _losses(engine: Engine, steps: int, evaluate: bool = False) -> list[float]:
    streams = TokenStreams(TOKENS, 8, 32, 1)
    losses = []
    for step in range(1, steps + 1):
        block = streams.next_block(engine.streams)
        losses.append(engine.train_step(block.inputs, block.targets, step, 1e-3, engine.spans()).loss)
        if evaluate:
            rows = slice(0, engine.micro_batch_size)
            slot = engine.new_evaluation_slot(engine.micro_batch_size)
            engine.evaluate_block(block.inputs[rows], block.targets[rows], engine.spans(), slot)
    return losses


def _run(rank: int, world_size: int, case: Case, steps: int, evaluate: bool = False) -> list[float]:
    return _losses(build(case, VOCAB), steps, evaluate)


@pytest.mark.parametrize("zero", [0, 3, *rest(1, 2)])
def test_bf16_is_near_float32_and_equal_over_stages(zero: int, pools: WorkerPools) -> None:
    half = pools(2).run(_run, Case(1, 2, zero, 1, "adam", "bfloat16", "deepspeed"), 6)
    full = pools(2).run(_run, Case(1, 2, 0, 1, "adam", "float32", "plain"), 6)
    assert half[0] == half[1]  # the loss of the whole batch, on every rank
    np.testing.assert_allclose(half[0], full[0], rtol=5e-3)
    assert half[0] != full[0]
    if zero:
        stage_zero = pools(2).run(_run, Case(1, 2, 0, 1, "adam", "bfloat16", "deepspeed"), 6)
        np.testing.assert_allclose(half[0], stage_zero[0], rtol=2e-4)


def _masters(rank: int, world_size: int, case: Case) -> dict[str, bytes]:
    return {logical.name: tensor.numpy().tobytes() for logical, tensor in build(case, VOCAB).weights()}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_masters_start_from_the_unrounded_weights(zero: int, pools: WorkerPools) -> None:
    half = pools(2).run(_masters, Case(1, 2, zero, 1, "adam", "bfloat16", "deepspeed"))
    full = pools(2).run(_masters, Case(1, 2, 0, 1, "adam", "float32", "plain"))
    assert half == full


@pytest.mark.parametrize("case", [Case(2, 1, 3, 2, "adagrad", "float32", "deepspeed"), Case(2, 1, 0, 2)], ids=str)
def test_evaluation_leaves_training_alone(case: Case, pools: WorkerPools) -> None:
    assert pools(2).run(_run, case, 4, True) == pools(2).run(_run, case, 4, False)


def _evaluate(rank: int, world_size: int, case: Case) -> tuple[float, float]:
    """The evaluation loss of a block, and the training loss of the same block without dropout (model without any)."""
    engine = build(case, VOCAB, run_config(case, MODEL_WITHOUT_DROPOUT))
    block = TokenStreams(TOKENS, 8, 32, 1).next_block(engine.streams)
    trained = engine.forward_backward(block.inputs, block.targets, 1, engine.spans())
    total = torch.zeros((), dtype=torch.float64)
    for index in range(engine.num_slots):
        rows = slice(index * engine.micro_batch_size, (index + 1) * engine.micro_batch_size)
        slot = engine.new_evaluation_slot(engine.micro_batch_size)
        total += engine.evaluate_block(block.inputs[rows], block.targets[rows], engine.spans(), slot)
    return trained, total.item() / block.inputs.size


MODEL_WITHOUT_DROPOUT = type(MODEL)(
    num_layers=2, hidden_size=32, num_attention_heads=4, persistent_memory_size=8, max_attention_span=64
)


@pytest.mark.parametrize("case", [Case(2, 1, 3, 2, "adam", "float32", "deepspeed"), Case(1, 1)], ids=str)
def test_evaluation_computes_the_training_loss(case: Case, pools: WorkerPools) -> None:
    for trained, evaluated in pools(case.world_size).run(_evaluate, case):
        assert evaluated == pytest.approx(trained, rel=1e-6)


def _span_gradient(rank: int, world_size: int, case: Case, coefficient: float) -> np.ndarray:
    model = type(MODEL)(
        num_layers=2, hidden_size=32, num_attention_heads=4, persistent_memory_size=8, span_loss=coefficient
    )
    engine = build(case, VOCAB, run_config(case, model))
    block = TokenStreams(TOKENS, 8, 32, 1).next_block(engine.streams)
    engine.forward_backward(block.inputs, block.targets, 1, engine.spans())
    return {logical.name: tensor for logical, tensor in engine.gradients()}["layers.1.span"].numpy().ravel()


@pytest.mark.parametrize(
    "case",
    [Case(2, 2, 2, 2, "adam", "float32", "deepspeed"), Case(4, 1, 3, 1, "adam", "float32", "deepspeed"), Case(1, 1)],
    ids=str,
)
def test_span_loss_adds_its_constant_gradient(case: Case, pools: WorkerPools) -> None:
    """coefficient · L / H = 0.01 · 256 / 4 = 0.64 on every head, whatever scales the main loss on the way."""
    with_loss = pools(case.world_size).run(_span_gradient, case, 0.01)[0]
    without = pools(case.world_size).run(_span_gradient, case, 0.0)[0]
    np.testing.assert_allclose(with_loss - without, [0.64] * 4, rtol=1e-5)


def _local_parameters(rank: int, world_size: int, case: Case) -> int:
    return build(case, VOCAB).local_parameters


def test_a_rank_knows_its_parameters_at_zero_3_too(pools: WorkerPools) -> None:
    whole, parted = (Case(1, 2, zero, 1, "adam", "float32", "deepspeed") for zero in (0, 3))
    count = count_parameters(MODEL, VOCAB).total
    assert pools(2).run(_local_parameters, whole) == pools(2).run(_local_parameters, parted) == [count, count]


def _held(engine: Engine) -> dict[str, bytes]:
    """All that a step changes."""
    tensors = {logical.name: tensor for logical, tensor in engine.weights()} | dict(engine.optimizer_state())
    tensors |= {name: cache for name, cache in engine.caches() if cache is not None}
    return {name: tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def _spoiled(rank: int, world_size: int, case: Case, what: str) -> tuple[str | None, list[bool], int]:
    """Of four steps, in the second of which one rank's gradient or loss is not a number: what that says, which of them
    changed anything, and how many updates there were."""
    engine, streams, said, moved = build(case, VOCAB), TokenStreams(TOKENS, 8, 32, 1), [], []
    weight = next(one for logical, one in engine.network.logical_parameters() if "query" in logical.name)
    for step in range(1, 5):
        block, before = streams.next_block(engine.streams), _held(engine)
        with ExitStack() as stack:
            if step == 2 and rank == world_size - 1:
                spoil = (
                    spoiled(weight) if what == "gradient" else changed_loss(engine, lambda loss: loss + float("inf"))
                )
                stack.enter_context(spoil)
            result = engine.train_step(block.inputs, block.targets, step, 1e-3, engine.spans())
        said.append(result.not_finite)
        moved.append(_held(engine) != before)
    assert said[0] is said[2] is said[3] is None and engine.skipped == 1
    return said[1], moved, engine.optimizer.param_groups[0]["step"]


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2, 0, 1, "adam"),
        Case(2, 1, 3, 1, "adam", "float32", "deepspeed"),
        Case(1, 2, 1, 1, "adam", "bfloat16", "deepspeed"),
        *rest(
            Case(1, 2, 0, 2, "adagrad", "float32", "deepspeed"),
            *(Case(1, 2, zero, 1, "adam", "bfloat16", "deepspeed") for zero in (0, 2, 3)),
            Case(1, 1, 1, 2, "adagrad", "bfloat16", "deepspeed", 2),
            *(Case(1, 2, z, 1, "adagrad", dtype, "deepspeed", offload=True) for z in (1, 2, 3) for dtype in DTYPES),
        ),
    ],
    ids=str,
)
def test_a_step_with_what_is_not_a_number_leaves_nothing(case: Case, pools: WorkerPools) -> None:
    """Neither weights nor the optimizer's state nor caches change on any rank, which all say why."""
    kind = "tensor group" if case.tensor > 1 else "data group"
    where, layer = ("stage 2 of the pipeline group", 2) if case.pipeline > 1 else (kind, 0)
    gradient = f"the gradient is not finite on rank 1 ({where} [0, 1]): layers.{layer}.query.weight"
    for what, said in (("gradient", gradient), ("loss", f"the loss is not finite on rank 1 ({where} [0, 1])")):
        assert pools(2).run(_spoiled, case, what) == [(said, [True, False, True, True], 3)] * 2
