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
    gather_shards,
    gather_to_first,
    reduce_scatter,
    softmax_over_shards,
    sum_over_shards,
    sum_to_shards,
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


def _columns(rank: int, world_size: int) -> dict:
    """The column pair on three dimensions; each rank weighs its result with rank + 1."""
    group, result = groups_of(2, 1).tensor, {}
    for name, function, width in (("gather", gather_shards, 1), ("sum", sum_to_shards, 2)):
        x = (torch.arange(2.0 * width).view(1, 2, width) + 10 * rank).requires_grad_()
        y = function(x, group, dim=-1)
        (y * torch.arange(1.0, y.numel() + 1).view_as(y) * (rank + 1)).sum().backward()
        result[name] = (y.tolist(), x.grad.tolist())
    return result


def test_gathering_columns_and_summing_to_columns_are_each_others_backward(pools: WorkerPools) -> None:
    first, second = pools(2).run(_columns)
    # gathered [[0, 10], [1, 11]] on both; its gradient [[1, 2], [3, 4]], weighed 1 and 2, summed, cut into columns
    assert first["gather"] == ([[[0.0, 10.0], [1.0, 11.0]]], [[[3.0], [9.0]]])
    assert second["gather"] == ([[[0.0, 10.0], [1.0, 11.0]]], [[[6.0], [12.0]]])
    # [[0, 1], [2, 3]] + [[10, 11], [12, 13]], cut into columns; gradients [[1], [2]] and [[2], [4]] side by side
    assert first["sum"] == ([[[10.0], [14.0]]], [[[1.0, 2.0], [2.0, 4.0]]])
    assert second["sum"] == ([[[12.0], [16.0]]], [[[1.0, 2.0], [2.0, 4.0]]])


def _scores(rows: int = 5) -> torch.Tensor:
    """[rows, 8], among them rows that would overflow and rows that are nothing but one column's."""
    scores = torch.randn(rows, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
    scores[1, 6], scores[2], scores[3, :4] = 2000.0, -5000.0, -3000.0
    return scores


def _softmax(rank: int, world_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    group = groups_of(world_size, 1).tensor
    scores = _scores().to(dtype).chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    weights = softmax_over_shards(scores, group)
    own = torch.linspace(-1, 1, 40).view(5, 8).chunk(world_size, dim=-1)[rank]
    (weights * own).sum().backward()
    return weights.detach(), scores.grad


@pytest.mark.parametrize("size", [2, 4])
def test_softmax_over_shards_is_the_softmax(pools: WorkerPools, size: int) -> None:
    scores = _scores().requires_grad_()
    expected = scores.softmax(dim=-1)
    (expected * torch.linspace(-1, 1, 40).view(5, 8)).sum().backward()
    parts = pools(size).run(_softmax, torch.float64)
    torch.testing.assert_close(torch.cat([p[0] for p in parts], dim=-1), expected.detach(), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(torch.cat([p[1] for p in parts], dim=-1), scores.grad, rtol=1e-12, atol=1e-15)
    half = pools(size).run(_softmax, torch.bfloat16)
    assert all(weights.dtype == torch.float32 and grad.dtype == torch.bfloat16 for weights, grad in half)
    rounded = _scores().bfloat16().float().softmax(dim=-1)
    torch.testing.assert_close(torch.cat([p[0] for p in half], dim=-1), rounded, rtol=1e-5, atol=1e-7)


def test_one_rank_alone_sends_nothing() -> None:
    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(softmax_over_shards(x, ALONE), x.softmax(dim=0))
    for function in (
        all_reduce,
        all_reduce_max,
        copy_to_shards,
        sum_over_shards,
    ):
        assert function(x, ALONE) is x
    for cut in (gather_shards, sum_to_shards, reduce_scatter):
        assert cut(x, ALONE, 0) is x
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
