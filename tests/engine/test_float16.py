"""float16's loss scale: a step that overflows on one rank is left out on all of them, counted, and costs nothing else.

DeepSpeed's engines themselves, on CPU tensors (tests/support/half.py). The rest of the grid has the mark `layouts`.
"""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine
from megatron_allattn.engine.loss_scale import LossScale
from tests.support.half import allowed
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trajectories import Case, build

VOCABULARY = 61
TOKENS = np.random.default_rng(7).integers(0, VOCABULARY, 8 * 32 * 40).astype(np.uint8)
START = 2.0**16
HUGE = 2.0**40  # of this scale the gradient of every tensor is too large


def float16(tensor: int, data: int, zero: int, pipeline: int = 1, optimizer: str = "adam", **more: Any) -> Case:
    return Case(tensor, data, zero, 8 // data // 2, optimizer, "float16", "deepspeed", pipeline, **more)


class Steps:
    """An engine on its way through the tokens."""

    def __init__(self, case: Case) -> None:
        with allowed():
            engine = build(case, VOCABULARY)
        assert isinstance(engine, DeepSpeedEngine) and engine.loss_scale is not None
        self.engine, self.scale = engine, engine.loss_scale
        self.scaler = engine.engine.optimizer.loss_scaler
        self.streams, self.step = TokenStreams(TOKENS, 8, 32, 1), 0

    def train(self) -> Any:
        self.step += 1
        block = self.streams.next_block(self.engine.streams)
        return self.engine.train_step(block.inputs, block.targets, self.step, 1e-3, self.engine.spans())

    def held(self) -> dict[str, bytes]:
        """Weights and optimizer state."""
        weights = {logical.name: tensor.numpy().tobytes() for logical, tensor in self.engine.weights()}
        return weights | {name: tensor.numpy().tobytes() for name, tensor in self.engine.optimizer_state()}

    def caches(self) -> dict[str, bytes]:
        return {name: cache.numpy().tobytes() for name, cache in self.engine.caches() if cache is not None}


def _losses(rank: int, world_size: int, case: Case, steps: int) -> list[float]:
    run = Steps(case)
    results = [run.train() for _ in range(steps)]
    assert not any(result.overflow for result in results) and {result.loss_scale for result in results} == {START}
    return [result.loss for result in results]


def _plain(rank: int, world_size: int, steps: int) -> list[float]:
    engine, streams = build(Case(optimizer="adam"), VOCABULARY), TokenStreams(TOKENS, 8, 32, 1)
    blocks = [streams.next_block(engine.streams) for _ in range(steps)]
    return [
        engine.train_step(block.inputs, block.targets, step, 1e-3, engine.spans()).loss
        for step, block in enumerate(blocks, 1)
    ]


@pytest.mark.parametrize(
    "case", [float16(2, 1, 1, 2), *rest(float16(1, 2, 3), float16(1, 2, 1), float16(1, 2, 2))], ids=str
)
def test_training_is_near_float32(case: Case, pools: WorkerPools) -> None:
    half, full = pools(case.world_size).run(_losses, case, 6)[0], pools(1).run(_plain, 6)[0]
    np.testing.assert_allclose(half, full, rtol=1e-3)
    assert half != full


def _overflows(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """Two steps at a scale that is too large, one more, and what all of it left."""
    run = Steps(case)
    run.train()
    before, results = run.held(), []
    run.scaler.cur_scale = HUGE
    results += [run.train(), run.train()]
    after, scale, caches = run.held(), run.scale.scale, run.caches()
    run.scaler.cur_scale = START
    results.append(run.train())
    return {
        "kept": before == after,
        "scale": scale,
        "caches": caches,
        "seen": run.engine.slots[0].length,
        "overflow": [result.overflow for result in results],
        "infinite": [result.grad_norm == float("inf") for result in results],
        "skipped": run.engine.skipped,
        "finite": np.isfinite([result.loss for result in results]).all(),
        "moved": run.held() != after,
        "updates": run.engine.optimizer.param_groups[0]["step"],
    }


def _caches(rank: int, world_size: int, case: Case) -> dict[str, bytes]:
    """After three steps of which the last two make no difference."""
    run = Steps(case)
    run.train()
    for group in (engine := run.engine).optimizer.param_groups:
        group.update(lr=0.0)
    for _ in range(2):
        run.step += 1
        block = run.streams.next_block(engine.streams)
        engine.train_step(block.inputs, block.targets, run.step, 0.0, engine.spans())
    return run.caches()


SOMEWHERE = [float16(1, 2, 2), float16(2, 1, 0, 2, optimizer="adagrad")]
EVERYWHERE = [
    float16(1, 2, 0),
    float16(1, 2, 1),
    float16(2, 1, 3),
    float16(1, 2, 2, offload=True),
    float16(1, 2, 3, offload=True),
    float16(1, 1, 1, 2),
]


@pytest.mark.parametrize("case", [*SOMEWHERE, *rest(*EVERYWHERE)], ids=str)
def test_a_step_that_overflows_changes_caches_and_the_scale_alone(case: Case, pools: WorkerPools) -> None:
    ranks = pools(case.world_size).run(_overflows, case)
    as_if = pools(case.world_size).run(_caches, case)
    for rank, found in enumerate(ranks):
        assert found["caches"] == as_if[rank]
        assert found["overflow"] == found["infinite"] == [True, True, False]
        assert found["kept"] and found["finite"] and found["moved"]
        assert found["scale"] == HUGE / 2  # the second time only
        assert found["seen"] == 4 * 32  # the data has moved on
        assert found["skipped"] == 2
        assert case.optimizer != "adam" or found["updates"] == 2  # of four steps
    assert all(found["caches"] or rank for rank, found in enumerate(ranks))


def _one_rank(rank: int, world_size: int, case: Case, where: int, what: float) -> tuple[list[bool], bool]:
    """Whether steps overflow, the second of which has one number too large, in one tensor of one rank."""
    run = Steps(case)
    results = [run.train()]
    before = run.held()
    weight = next(weight for logical, weight in run.engine.network.logical_parameters() if "query" in logical.name)
    if rank == where:

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            spoiled = gradient.clone()
            spoiled.view(-1)[-1] = what
            return spoiled

        handle = weight.register_hook(spoil)
    results.append(run.train())
    kept = run.held() == before
    if rank == where:
        handle.remove()
    results.append(run.train())
    return [result.overflow for result in results], kept


@pytest.mark.parametrize("where", [3, *rest(0, 1, 2)])
@pytest.mark.parametrize(
    "case",
    [
        float16(2, 1, 1, 2),
        *rest(float16(1, 2, 0, 2), float16(2, 2, 2), float16(2, 2, 3), float16(2, 1, 1, 2, offload=True)),
    ],
    ids=str,
)
def test_one_rank_is_enough_for_all_to_leave_it_out(case: Case, where: int, pools: WorkerPools) -> None:
    """The first or the last stage, either shard, either replica."""
    for what in (float("inf"), float("nan")):
        assert pools(4).run(_one_rank, case, where, what) == [([False, True, False], True)] * 4


def _too_large_together(rank: int, world_size: int, case: Case) -> list[bool]:
    """Gradients that float16 can hold, and the sum of whose squares float32 cannot: told on one stage alone."""
    run = Steps(case)
    engine, true = run.engine, run.engine._partition_gradients
    run.train()
    if rank == 0:
        engine._partition_gradients = lambda: [(weight, gradient.float() * 1e30) for weight, gradient in true()]  # type: ignore[method-assign]
    first = run.train()
    engine._partition_gradients = true  # type: ignore[method-assign]
    return [first.overflow, run.train().overflow]


def test_a_norm_that_overflows_on_one_stage_is_everybodys(pools: WorkerPools) -> None:
    assert pools(4).run(_too_large_together, float16(2, 1, 1, 2)) == [[True, False]] * 4


def _ends(rank: int, world_size: int, case: Case, smallest: bool) -> str | None:
    run = Steps(case)
    run.train()
    if smallest:
        run.scaler.cur_scale = run.scaler.min_scale = HUGE
    elif rank == world_size - 1:
        with torch.no_grad():
            run.engine.network.layers[-1].norm1.weight.fill_(float("inf"))
    before, caches, seen = run.held(), run.caches(), run.engine.slots[0].length
    result = run.train()
    assert not result.overflow and run.engine.skipped == 1
    assert (run.held(), run.caches(), run.engine.slots[0].length) == (before, caches, seen)
    return result.not_finite


@pytest.mark.parametrize("case", [float16(1, 1, 1, 2), *rest(float16(1, 2, 2), float16(2, 1, 0))], ids=str)
def test_a_step_that_no_smaller_scale_cures_leaves_nothing(case: Case, pools: WorkerPools) -> None:
    ranks, kind = ("ranks 0 and 1", "tensor group") if case.tensor > 1 else ("rank 1", "data group")
    where = "stage 2 of the pipeline group" if case.pipeline > 1 else kind
    lost = f"the loss is not finite on {ranks} ({where} [0, 1]), which no smaller loss scale changes"
    assert pools(2).run(_ends, case, False) == [lost] * 2
    assert pools(2).run(_ends, case, True) == ["the gradient overflows float16 at the smallest loss scale too"] * 2


def test_the_state_is_what_deepspeeds_scaler_goes_on_from() -> None:
    """Two scalers: one that lives on, and one that takes the other's state over before every step."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    class Zero:
        overflow = False

        def __init__(self) -> None:
            self.loss_scaler = DynamicLossScaler(2.0**8, 3, 1, 2, False)

        def step(self, overflow: bool) -> None:
            self.overflow = overflow
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("deepspeed.comm.get_rank", lambda: 1)  # the first one tells
                self.loss_scaler.update_scale(overflow)

    zero, scales = Zero(), []
    scale = LossScale(zero)
    for overflow in (True, True, True, False, False, False, False, False, True, True, *[False] * 8):
        fresh = Zero()
        other = LossScale(fresh)
        other.load(scale.state())
        zero.step(overflow)
        fresh.step(overflow)
        assert other.state() == scale.state()
        scales.append(scale.scale)
    # by hand: the first overflow only warns; doubled after every three steps without one, which also forgives it
    assert scales == [256, 128, 64, 64, 64, 64, 128, 128, 128, 64, 64, 64, 64, 128, 128, 128, 256, 256]
    assert not scale.smallest
    scale.load(scale.state() | {"cur_scale": 1.0})
    assert scale.smallest
