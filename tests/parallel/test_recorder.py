"""Every kind of message, in every group, whatever the thread."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_allattn.parallel import collectives
from megatron_allattn.parallel.collectives import copy_to_shards
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger, Messages, groups_by_name
from megatron_allattn.parallel.recorder import Recorder
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of

Entries = dict[tuple[str, str], Messages]
DEPTH = 100  # of backward passes inside each other; from the 60th on, autograd takes another thread


def every_kind(rank: int, world_size: int) -> Entries:
    groups = groups_of(2, 2)
    tensor, data = groups.tensor, groups.data
    with Recorder(groups.layout, rank) as recorder:
        collectives.all_reduce(torch.zeros(3), tensor)
        collectives.all_reduce(torch.zeros(5, dtype=torch.float64), groups.world)
        collectives.all_gather(torch.zeros(2, 3), data)
        collectives.reduce_scatter(torch.zeros(2, 4, dtype=torch.bfloat16), tensor, dim=1)
        collectives.gather_to_first(torch.zeros(7), tensor)
        dist.all_gather_into_tensor(torch.zeros(6), torch.zeros(3), group=tensor.handle)
        dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(6), group=tensor.handle)
        dist.broadcast(torch.zeros(9), src=data.ranks[0], group=data.handle, async_op=True).wait()
        dist.reduce(torch.zeros(4), dst=data.ranks[0], group=data.handle)
        dist.barrier(group=data.handle)
        collectives.all_reduce(torch.zeros(100), groups_of(2, 2).pipeline)  # of this rank alone
    return recorder.ledger.entries


def test_every_kind(pools: WorkerPools) -> None:
    for rank, entries in enumerate(pools(4).run(every_kind)):
        assert entries == {
            ("tensor", "all_reduce"): Messages(1, 12),
            ("world", "all_reduce"): Messages(1, 40),
            ("data", "all_gather"): Messages(1, 2 * 24),
            ("tensor", "reduce_scatter"): Messages(2, 16 + 24),
            ("tensor", "gather"): Messages(1, 56 if rank % 2 == 0 else 28),  # only the first has all of it
            ("tensor", "all_gather"): Messages(1, 24),
            ("data", "broadcast"): Messages(1, 36),
            ("data", "reduce"): Messages(1, 16),
            ("data", "barrier"): Messages(1, 0),
        }, f"rank {rank}"


def between_stages(rank: int, world_size: int) -> Entries:
    groups = groups_of(1, 1, 2)
    with Recorder(groups.layout, rank) as recorder:
        if rank == 0:
            dist.send(torch.zeros(3, 5), 1)
        else:
            dist.recv(torch.zeros(3, 5), 0)
    return recorder.ledger.entries


def test_messages_between_stages(pools: WorkerPools) -> None:
    sent, received = pools(2).run(between_stages)
    assert sent == {("pipeline", "send"): Messages(1, 60)}
    assert received == {("pipeline", "recv"): Messages(1, 60)}


class Nested(torch.autograd.Function):
    """Its backward is another graph's, `depth` times inside each other; the innermost sends something."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, threads: list[int], group: Any) -> torch.Tensor:
        ctx.inner = depth, threads, group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        depth, threads, group = ctx.inner
        with torch.enable_grad():
            x = torch.zeros(2, requires_grad=True)
            (Nested.apply(x, depth - 1, threads, group) if depth else copy_to_shards(x, group)).sum().backward()
        threads.append(threading.get_ident())
        return grads[0], None, None, None


def on_other_threads(rank: int, world_size: int) -> tuple[Entries, int]:
    groups, threads = groups_of(2, 1), list[int]()
    with Recorder(groups.layout, rank) as recorder:
        Nested.apply(torch.zeros(2, requires_grad=True), DEPTH, threads, groups.tensor).sum().backward()
    return recorder.ledger.entries, len(set(threads))


def test_backward_on_another_thread(pools: WorkerPools) -> None:
    """As on a GPU, autograd's own thread sees the mode."""
    for entries, threads in pools(2).run(on_other_threads):
        assert threads > 1
        assert entries == {("tensor", "all_reduce"): Messages(1, 8)}


def test_groups_of_equal_ranks_are_one() -> None:
    named = groups_by_name(Layout(tensor_size=2, pipeline_size=3, data_size=2), 6)
    assert named == {
        "tensor": (6, 7),
        "data": (4, 6),
        "pipeline": (2, 6, 10),
        "ends": (6,),
        "replica": (2, 3, 6, 7, 10, 11),
        "world": tuple(range(12)),
    }
    ledger = Ledger(Layout(data_size=2), 1)
    ledger.add("world", "all_reduce", 8)
    ledger.add("data", "all_reduce", 30, count=3)
    ledger.add("tensor", "all_reduce", 100)
    assert ledger.entries == {("data", "all_reduce"): Messages(4, 38)}


def test_bytes_sent_by_a_ring() -> None:
    ledger = Ledger(Layout(tensor_size=4, pipeline_size=2), 0)
    for operation, num_bytes in (("all_reduce", 100), ("all_gather", 200), ("reduce_scatter", 40)):
        ledger.add("tensor", operation, num_bytes)
    ledger.add("pipeline", "send", 7)
    ledger.add("pipeline", "recv", 1000)
    assert ledger.sent() == pytest.approx(2 * 100 * 3 / 4 + 200 * 3 / 4 + 40 * 3 / 4 + 7)
