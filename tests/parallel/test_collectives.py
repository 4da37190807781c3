"""Collectives over real processes, their gradients, and failing together."""

import pytest
import torch

from megatron_allattn.parallel.collectives import (
    PeerFailed,
    agree,
    all_gather,
    all_reduce,
    all_reduce_max,
    broadcast_object,
    copy_to_shards,
    gather_objects,
    gather_to_first,
    sum_over_shards,
)
from megatron_allattn.parallel.groups import ALONE
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of


def _plain(rank: int, world_size: int) -> dict:
    """Every collective once, over the tensor group of a 2 × 2 grid; ranks 0, 1 and 2, 3 are groups."""
    group = groups_of(2, 2).tensor
    mine = torch.tensor([float(rank), 10.0 - rank])
    kept = mine.clone()
    parts = gather_to_first(mine, group)
    result = {
        "gather": [part.tolist() for part in all_gather(mine, group)],
        "first": parts and [part.tolist() for part in parts],
        "objects": gather_objects(("rank", rank), group),
        "broadcast": broadcast_object({"from": rank}, group),
        "data": [part.tolist() for part in all_gather(mine, groups_of(2, 2).data)],
    }
    assert torch.equal(mine, kept)
    result["max"] = all_reduce_max(mine.clone(), group).tolist()
    result["sum in place"] = all_reduce(mine, group) is mine
    result["sum"] = mine.tolist()
    return result


def test_collectives_stay_within_their_group(pools: WorkerPools) -> None:
    results = pools(4).run(_plain)
    for rank, found in enumerate(results):
        a, b = (0, 1) if rank < 2 else (2, 3)
        first, second = [a, 10 - a], [b, 10 - b]
        assert found == {
            "gather": [first, second],
            "first": [first, second] if rank == a else None,
            "objects": [("rank", a), ("rank", b)],
            "broadcast": {"from": a},
            "data": [[r, 10 - r] for r in (rank % 2, rank % 2 + 2)],
            "max": [b, 10 - a],
            "sum in place": True,
            "sum": [a + b, 20 - a - b],
        }


def _conjugates(rank: int, world_size: int) -> dict:
    """Values and gradients of both functions; each rank weighs its result with rank + 1."""
    group, result = groups_of(2, 1).tensor, {}
    for name, function in (("copy", copy_to_shards), ("sum", sum_over_shards)):
        x = torch.tensor([1.0 + rank, 5.0], requires_grad=True)
        y = function(x, group)
        (y * (rank + 1)).sum().backward()
        result[name] = (y.tolist(), x.grad.tolist())
    return result


def test_each_function_is_the_others_backward(pools: WorkerPools) -> None:
    results = pools(2).run(_conjugates)
    assert results[0] == {"copy": ([1.0, 5.0], [3.0, 3.0]), "sum": ([3.0, 10.0], [1.0, 1.0])}
    assert results[1] == {"copy": ([2.0, 5.0], [3.0, 3.0]), "sum": ([3.0, 10.0], [2.0, 2.0])}


def test_one_rank_alone_sends_nothing() -> None:
    x = torch.tensor([1.0, 2.0])
    for function in (all_reduce, all_reduce_max, copy_to_shards, sum_over_shards):
        assert function(x, ALONE) is x
    assert all_gather(x, ALONE) == [x] and gather_to_first(x, ALONE) == [x]
    assert gather_objects("a", ALONE) == ["a"] and broadcast_object("a", ALONE) == "a"


def _fail(rank: int, world_size: int, failing: list[int]) -> tuple[str, int]:
    def action() -> str:
        if rank in failing:
            raise ValueError(f"broken on {rank}")
        return "done"

    try:
        return agree(action, groups_of(4, 1).tensor, lambda error: 7), 0
    except PeerFailed as error:
        return str(error), error.exit_code
    except ValueError as error:
        return str(error), -1


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ([], [("done", 0)] * 4),
        ([2], [("rank 2 failed", 7), ("rank 2 failed", 7), ("broken on 2", -1), ("rank 2 failed", 7)]),
        ([1, 3], [("rank 1 failed", 7), ("broken on 1", -1), ("rank 1 failed", 7), ("rank 1 failed", 7)]),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_with_one_message(pools: WorkerPools, failing, expected) -> None:
    assert pools(4).run(_fail, failing) == expected
