"""What four ranks measure of each other, each thing once as it should be and once with one rank's own thing broken."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_allattn.cluster.nodes import rates, shared
from megatron_allattn.cluster.nodes.judging import GroupRate, Link, clock_checks, group_checks, link_checks, rate_checks
from megatron_allattn.cluster.nodes.places import Places
from megatron_allattn.parallel import probes
from megatron_allattn.parallel.groups import Groups, make_groups
from megatron_allattn.parallel.layout import Layout
from tests.support.pool import WorkerPools

FOUR = Places(("n1", "n2", "n3", "n4"))
CPU = torch.device("cpu")
DELAY = 0.1  # seconds of a slow rank, far more than a measurement takes here
SLOW = 0.1  # part of the median: what is broken below is slower still, what is not is not, however busy the machine


def _groups(world_size: int, tensor: int, pipeline: int) -> Groups:
    return make_groups(Layout.from_world(world_size, tensor, pipeline), timedelta(seconds=60))


def _late(function: Any) -> Any:
    def wait(*args: Any, **kwargs: Any) -> Any:
        time.sleep(DELAY)
        return function(*args, **kwargs)

    return wait


def _computed(rank: int, world_size: int, slow_rank: int | None) -> dict[int, float]:
    groups = _groups(world_size, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rates.COMPUTE_SECONDS, "cpu", 0.05)
        patch.setitem(rates.SIDES, "cpu", 64)
        if rank == slow_rank:
            patch.setattr(torch, "mm", _late(torch.mm))
        return rates.compute_rates(groups, groups.world, CPU)


def test_a_rank_that_computes_slowly(pools: WorkerPools) -> None:
    found = pools(4).run(_computed, 2)
    assert all(one == found[0] for one in found) and list(found[0]) == [0, 1, 2, 3]
    checks = rate_checks("compute rate", found[0], FOUR, SLOW, "GFLOP/s")
    assert [check.node for check in checks if check.status == "fault"] == ["n3"]


def _reduced(rank: int, world_size: int, tensor: int, pipeline: int, broken: str) -> list[list[GroupRate]]:
    """broken: what rank 2 does wrong: `gives`, `gets` a wrong number, or `slow`."""
    groups = _groups(world_size, tensor, pipeline)
    reduce = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if broken == "gives" and tensor.dim() == 2:
            tensor[groups.tensor.rank, 5] += 1
        result = reduce(tensor, *args, **kwargs)
        if broken == "gets" and tensor.dim() == 2:
            tensor[-1, 7] += 1
        return result

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2 and broken:
            patch.setattr(dist, "all_reduce", _late(reduce) if broken == "slow" else wrong)
        return rates.group_rates(groups, groups.world, CPU, megabytes=1)


def test_all_reduces_of_every_group(pools: WorkerPools) -> None:
    """TP 2 × PP 2: right sums, of the groups of the layout."""
    found = pools(4).run(_reduced, 2, 2, "")
    assert [[group.ranks for group in kind] for kind in found[0]] == [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    assert [kind[0].kind for kind in found[0]] == ["TP", "PP"]
    for kind in found[0]:
        assert all(group.rate > 0 for group in kind)
        assert [check.status for check in group_checks(kind, FOUR, 1e-6)] == ["ok"]
    assert [kind[0].kind for kind in pools(4).run(_reduced, 1, 1, "")[0]] == ["DP"]


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("gives", ("n3", "what rank 2 gives is wrong in all sums (1 elements) of the group [2, 3]")),
        ("gets", ("n3", "rank 2 has a wrong sum (1 elements) of the group [2, 3]")),
    ],
)
def test_a_rank_that_reduces_wrongly(pools: WorkerPools, broken: str, told: tuple[str, str]) -> None:
    tensor_groups, *_ = pools(4).run(_reduced_tensor, broken)[0]
    faults = [check for check in group_checks(tensor_groups, FOUR, 1e-6) if check.status == "fault"]
    assert [(check.node, check.found) for check in faults] == [told]


def _reduced_tensor(rank: int, world_size: int, broken: str) -> list[list[GroupRate]]:
    return _reduced(rank, world_size, 2, 1, broken)


def test_a_group_that_reduces_slowly(pools: WorkerPools) -> None:
    """Two groups of two, of which rank 2's takes a tenth of a second longer, in which the other has long ended."""
    tensor_groups, *_ = pools(4).run(_reduced_tensor, "slow")[0]
    by_ranks = {group.ranks: group.rate for group in tensor_groups}
    assert by_ranks[(2, 3)] < by_ranks[(0, 1)]
    assert by_ranks[(2, 3)] < 2e6 / DELAY  # at most its bytes in that time


def _linked(rank: int, world_size: int, broken: str) -> list[Link]:
    groups = _groups(world_size, 1, 1)
    exchange = dist.batch_isend_irecv

    def torn(operations: list[Any]) -> Any:
        operations[0].tensor[3] += 1
        return exchange(operations)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and broken:
            patch.setattr(dist, "batch_isend_irecv", _late(exchange) if broken == "slow" else torn)
        return rates.links(groups, groups.world, FOUR, CPU, megabytes=1)


def test_links_between_all_nodes(pools: WorkerPools) -> None:
    found = pools(4).run(_linked, "")[0]
    assert sorted((link.rank, link.peer) for link in found) == [(a, b) for a in range(4) for b in range(4) if a != b]
    assert all(link.wrong == 0 and link.rate > 0 for link in found)


def test_a_node_that_is_slow_with_all_others(pools: WorkerPools) -> None:
    checks = link_checks(pools(4).run(_linked, "slow")[0], FOUR, SLOW)
    assert [check.node for check in checks if check.status == "fault"] == ["n2"]


def test_what_a_node_sends_arrives_changed(pools: WorkerPools) -> None:
    found = pools(4).run(_linked, "torn")[0]
    assert {(link.rank, link.peer) for link in found if link.wrong} == {(0, 1), (2, 1), (3, 1)}


@pytest.mark.parametrize("nodes", range(10))
def test_pairings(nodes: int) -> None:
    """Nobody twice in a round, no pair twice; everybody meets somebody, of an even number in every round."""
    rounds = rates.pairings(nodes)
    assert len(rounds) == (0 if nodes < 2 else min(rates.PAIRINGS, nodes - 1 + nodes % 2))
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs.items()]
    assert all(pairs.count(pair) == 2 for pair in pairs)  # there and back
    for one in rounds:
        assert all(one[other] == node and other != node for node, other in one.items())
        assert len(one) == nodes - nodes % 2


def test_peers_of_nodes_with_unequal_numbers_of_ranks() -> None:
    places = Places(("n1", "n1", "n2", "n1"))
    pairs = {0: 1, 1: 0}
    assert [rates.peer_of(rank, places, pairs) for rank in range(4)] == [2, None, 0, None]
    assert rates.peer_of(0, places, {}) is None


def _offset(rank: int, world_size: int, ahead: float) -> Any:
    groups = _groups(world_size, 1, 1)
    clock = (lambda: time.time() + ahead) if rank == 2 else time.time
    return probes.clock_offset([1, 2, 3], groups.world, clock=clock)


def test_a_clock_that_is_ahead(pools: WorkerPools) -> None:
    """The true offsets, 0 and 1000 s, are within what is said of them."""
    found = pools(4).run(_offset, 1000.0)
    assert found[0] is None
    for offset, truth in zip(found[1:], (0.0, 1000.0, 0.0), strict=True):
        assert abs(offset.seconds - truth) <= offset.uncertainty + 1e-4
    offsets = {rank: (found[rank].seconds, found[rank].uncertainty) for rank in (1, 2, 3)}
    checks = clock_checks(offsets, FOUR, most=60.0)
    assert [check.status for check in checks] == ["ok", "fault", "ok"]


def _shared(rank: int, world_size: int, folder: Path, broken: str) -> list[Any]:
    """broken: what rank 3 does instead: write in a folder of its `own`, not `rename`, or cannot `write`."""
    groups = _groups(world_size, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 3 and broken == "own":
            patch.setattr(Path, "exists", lambda self: False)
        if rank == 3 and broken == "denied":
            patch.setattr(Path, "exists", _denied)
        if rank == 3 and broken == "rename":
            real = shared.put
            patch.setattr(
                shared, "put", lambda path, content: real(path, content) if content.startswith(shared.FIRST) else None
            )
        if rank == 3 and broken == "write":
            patch.setattr(shared, "put", _read_only)
        if rank == 3 and broken == "late":
            patch.setattr(shared, "put", _late(shared.put))
        return shared.shared_checks(folder, FOUR, groups.world, seconds=2.0 if broken == "late" else 0.5)


def _denied(path: Path) -> bool:
    raise OSError(13, "Permission denied", str(path))


def _read_only(path: Path, content: bytes) -> None:
    raise OSError(30, "Read-only file system", str(path))


@pytest.mark.parametrize(
    ("broken", "nodes", "words"),
    [
        ("", [], ""),
        ("late", [], ""),
        ("own", ["n4"], "a folder that rank 0 made there was not seen within 0.5 s"),
        ("denied", ["n4"], "Permission denied"),
        ("write", ["n4"], "Read-only file system"),
        (
            "rename",
            ["n1", "n2", "n3", "n4"],
            "of 1 of 4 ranks the file was not seen within 0.5 s (rank 3: the content be",
        ),
    ],
)
def test_a_folder_that_all_see(pools: WorkerPools, tmp_path: Path, broken: str, nodes: list[str], words: str) -> None:
    found = pools(4).run(_shared, tmp_path, broken)
    assert all(checks == found[0] for checks in found)
    faults = [check for check in found[0] if check.status == "fault"]
    assert [check.node for check in faults] == nodes
    assert all(check.found.startswith(words) for check in faults)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(pools: WorkerPools, tmp_path: Path) -> None:
    (check,) = pools(4).run(_shared, tmp_path / "no", "")[0]
    assert (check.status, check.node) == ("fault", "n1") and "No such file" in check.found
