"""Replicas that are no longer the same are found before a checkpoint is written."""

from pathlib import Path

import pytest
import torch

from megatron_allattn.checkpoint.saver import Saver
from megatron_allattn.engine.drift import ROW, Drift, _apart, _digest, check_replicas
from megatron_allattn.engine.interface import Engine
from megatron_allattn.parallel.collectives import PeerFailed
from tests.support.pool import WorkerError, WorkerPools
from tests.support.trajectories import Case, build

CASES = [
    Case(2, 1, 0, 1, "adam", "float32", "deepspeed"),
    Case(1, 2, 1, 1, "adagrad", "bfloat16", "deepspeed"),
    Case(1, 2, 3, 1, "adam", "float32", "deepspeed"),
    Case(1, 1, 1, 1, "adam", "float32", "deepspeed", pipeline=2),
    Case(2, 2, 0, 1, "adam", "float64", "plain"),
]


def _check(rank: int, world_size: int, case: Case, changed: str | None, on: int) -> str | None:
    """What is said on this rank after one weight has changed on one rank by a rounding."""
    engine = build(case, 61)
    with torch.no_grad():
        for logical, parameter in engine.network.logical_parameters():
            if logical.name == changed and rank == on:
                parameter.flatten()[:1] *= 1.01
    return _said(engine)


def _said(engine: Engine) -> str | None:
    try:
        check_replicas(engine)
    except Drift as error:
        return str(error)
    except PeerFailed:
        return "peer"
    return None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replicas_that_are_the_same_are_left_alone(case: Case, pools: WorkerPools) -> None:
    assert pools(case.world_size).run(_check, case, None, 0) == [None] * case.world_size


@pytest.mark.parametrize(
    ("case", "name", "on", "said"),
    [
        (CASES[0], "layers.1.norm1.weight", 1, "layers.1.norm1.weight on rank 0, another on rank 1, and it"),
        (CASES[1], "output.weight", 0, "output.weight (shard 0) on rank 0, another on rank 1, and it is"),
        (CASES[3], "position.key", 1, "position.key on rank 0, another on rank 1, and it is not known"),
        (CASES[4], "embedding.weight", 3, "embedding.weight (shard 1) on rank 1, another on rank 3, and it is"),
        (CASES[4], "position.key", 2, "position.key on rank 2 of 4 that hold it"),
        (CASES[4], "position.key", 0, "position.key on rank 0 of 4 that hold it"),
    ],
)
def test_one_that_differs_is_named_with_its_rank(case: Case, name: str, on: int, said: str, pools: WorkerPools) -> None:
    first, *others = pools(case.world_size).run(_check, case, name, on)
    assert first is not None and first.startswith("1 of the weights") and said in first
    assert others == ["peer"] * (case.world_size - 1)


def _check_masters(rank: int, world_size: int, case: Case) -> tuple[bool, str | None]:
    """What is said after a change of one rank's master that its bfloat16 weight does not show, and whether it does."""
    engine = build(case, 61)
    weight = engine.network.position.key
    before = weight.detach().clone()
    if rank == 1:
        master = engine._master(weight)
        master.view(-1)[0] *= 1 + 1e-5
        engine._set_master(weight, master)
    return torch.equal(before, weight), _said(engine)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 1, 1, "adam", "bfloat16", "deepspeed"),
        Case(2, 1, 3, 1, "adam", "bfloat16", "deepspeed"),
    ],
    ids=str,
)
def test_a_master_that_differs_by_less_than_a_weight_shows(case: Case, pools: WorkerPools) -> None:
    assert pools(2).run(_check, case, None, 0) == [None, None]
    (unseen, first), (_, other) = pools(2).run(_check_masters, case)
    assert unseen and other == "peer"
    assert first is not None and first.startswith("1 of the weights") and "position.key (master) on rank 0, an" in first


def test_of_what_stages_share_the_first_ones_master_counts(pools: WorkerPools) -> None:
    """The others' weights come from it after every update (tests/engine/test_pipeline.py)."""
    case = Case(1, 1, 1, 1, "adagrad", "bfloat16", "deepspeed", pipeline=2)
    assert pools(2).run(_check_masters, case) == [(True, None), (True, None)]
    assert pools(2).run(_check, case, "position.key", 1)[0] is not None


def test_a_weight_that_one_rank_alone_holds_has_no_replica(pools: WorkerPools) -> None:
    assert pools(2).run(_check, CASES[0], "layers.0.query.weight", 1) == [None, None]


def _save(rank: int, world_size: int, folder: str) -> None:
    engine = build(CASES[0], 61)
    with torch.no_grad():
        if rank == 1:
            engine.network.position.key[0, 0, 0] += 1
    Saver(Path(folder), engine, asynchronous=False, after_commit=lambda *_: None).save(1, {})


def test_nothing_is_saved(pools: WorkerPools, tmp_path) -> None:
    with pytest.raises(WorkerError, match=r"position\.key on rank"):
        pools(2).run(_save, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ([[0, 1, 2], [3]], "on rank 3 of 4 that hold it"),
        ([[0], [1], [2, 3, 4, 5]], "on ranks 0 and 1 of 6 that hold it"),
        ([[0, 2], [1, 3]], "on ranks 0 and 2, another on ranks 1 and 3, and it is not known which is right"),
        (
            [[0], [1], [2, 3]],
            "on rank 0, another on rank 1, another on ranks 2 and 3, and it is not known which is right",
        ),
    ],
)
def test_only_most_of_the_ranks_are_taken_to_be_right(versions: list[list[int]], said: str) -> None:
    assert _apart(versions) == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, ROW - 1, ROW, 3 * ROW + 7])
def test_any_element_and_all_signs_change_a_digest(size: int, dtype: torch.dtype) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    own = _digest(weight)
    assert _digest(weight.clone()) == own != _digest(-weight)
    for place in {0, size // 2, size - 1}:
        other = weight.clone()
        other[place] *= 1 + 2**-7
        assert _digest(other) != own, place
    swapped = weight.clone().view(-1)
    swapped[: 2 * ROW] = swapped[: 2 * ROW].roll(ROW)
    assert size < 2 * ROW or _digest(swapped) != own
