"""The one message that is made of what the ranks of a failed run report."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from megatron_allattn.parallel.collectives import PeerFailed, all_reduce
from megatron_allattn.parallel.groups import make_groups, single_process_groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.verdict import Report, kind_of, name_ranks, verdict, where_now, where_raised
from tests.support.pool import WorkerPools

WAIT = timedelta(seconds=30)
TENSOR, PIPELINE = "in the tensor group [2, 3]", "in the pipeline group [1, 3], for rank 3"


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        (
            {0: Report("lost", TENSOR), 2: Report("error", message="b"), 1: Report("error", message="a")},
            "a",
        ),
        (
            {0: Report("there", "in the tensor group [0, 1]"), 1: Report("lost", PIPELINE), 2: Report("lost", TENSOR)},
            "rank 3 is gone: rank 1 lost the connection in the pipeline group [1, 3], for rank 3; "
            "rank 2 lost the connection in the tensor group [2, 3]; rank 0 waited in the tensor group [0, 1]",
        ),
        (
            {0: Report("lost", "in the world group [0, 1, 2, 3]"), 3: Report("done")},
            "ranks 1 and 2 are gone: rank 0 lost the connection in the world group [0, 1, 2, 3]; rank 3 ended",
        ),
        (
            {
                0: Report("late", "in the data group [0, 2]"),
                1: Report("there", "at training/loop.py:57 (_step)"),
                2: Report("late", "in the data group [0, 2]"),
                3: Report("there", TENSOR),
            },
            "the ranks waited for each other in vain: ranks 0 and 2 gave up after 20 s in the data group [0, 2]; "
            "rank 1 was at training/loop.py:57 (_step); rank 3 waited in the tensor group [2, 3]",
        ),
        (
            {rank: Report("lost", "in the world group [0, 1, 2, 3]") for rank in range(4)},
            "a connection was lost, but no rank is gone: "
            "ranks 0, 1, 2 and 3 lost the connection in the world group [0, 1, 2, 3]",
        ),
        (
            {0: Report("lost", TENSOR), 1: Report("there", TENSOR), 2: Report("done"), 3: Report("done")},
            "some ranks ended before the others: rank 0 lost the connection in the tensor group [2, 3]; "
            "rank 1 waited in the tensor group [2, 3]; ranks 2 and 3 ended",
        ),
        (
            {
                0: Report("late", TENSOR),
                1: Report("ended", TENSOR, "SIGTERM"),
                2: Report("there", TENSOR),
                3: Report("done"),
            },
            "the run was ended by SIGTERM: rank 1 got SIGTERM in the tensor group [2, 3]; "
            "rank 0 gave up after 20 s in the tensor group [2, 3]; rank 2 waited in the tensor group [2, 3]; "
            "rank 3 ended",
        ),
        (
            {
                0: Report("ended", TENSOR, "SIGTERM"),
                2: Report("ended", TENSOR, "SIGTERM"),
                3: Report("ended", TENSOR, "SIGTERM"),
            },
            "rank 1 is gone: ranks 0, 2 and 3 got SIGTERM in the tensor group [2, 3]",
        ),
    ],
    ids=["error", "gone", "two gone", "late", "lost", "some done", "sigterm", "sigterm after a death"],
)
def test_what_explains_most_is_the_message(reports: dict[int, Report], message: str) -> None:
    assert verdict(reports, 4, 20.0) == message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:27012"), "lost"),
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"), "late"),
        (RuntimeError("Connection reset by the data server, timed out waiting"), "error"),
        (DistBackendError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), "lost"),
        (DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), "late"),
        (DistBackendError("ncclUnhandledCudaError: Call to CUDA function failed. out of memory"), "error"),
        (PeerFailed(1, 2), "there"),
        (RuntimeError("shape '[3]' is invalid"), "error"),
        (OSError("Broken pipe"), "error"),
        (KeyboardInterrupt(), "error"),
    ],
    ids=["lost", "late", "words", "nccl lost", "nccl late", "nccl own", "peer", "own", "of a file", "interrupted"],
)
def test_whose_failure_an_exception_is(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_names_of_ranks() -> None:
    assert [name_ranks([3]), name_ranks([2, 1]), name_ranks([0, 1, 2], "or")] == [
        "rank 3",
        "ranks 1 and 2",
        "rank 0, 1 or 2",
    ]


def _wheres(rank: int, world_size: int) -> list[str]:
    """Where an error of each kind of collective is said to be raised, on a grid of 2 shards × 2 stages."""
    import torch.distributed as dist

    groups = make_groups(Layout(tensor_size=2, pipeline_size=2), WAIT)
    other = groups.pipeline.ranks[1 - groups.pipeline.rank]
    unnamed = dist.new_group([0, 1, 2], timeout=WAIT)
    wrong: Any = "not a tensor"
    attempts = [
        lambda: all_reduce(wrong, groups.tensor),
        lambda: all_reduce(wrong, groups.world),
        lambda: dist.recv(wrong, other),
        lambda: dist.all_reduce(wrong, group=unnamed) if rank < 3 else dist.all_reduce(wrong),
        lambda: torch.ones(3) @ torch.ones(4),
    ]
    found = []
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            found.append(where_raised(error, groups))
    return found


def test_the_group_is_that_of_the_collective(pools: WorkerPools) -> None:
    third = pools(4).run(_wheres)[2]
    assert third[:4] == [
        "in the tensor group [2, 3]",
        "in the world group [0, 1, 2, 3]",
        "in the pipeline group [0, 2], for rank 0",
        "in a group [0, 1, 2]",
    ]
    assert third[4].startswith("at parallel/test_verdict.py:") and third[4].endswith("(<lambda>)")


def test_a_thread_that_works_alone_is_told_by_itself() -> None:
    """Whatever other threads wait for; one that has ended meanwhile is no error."""
    groups, leave = single_process_groups(), threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    assert thread.ident is not None
    assert where_now(groups, thread.ident, alone=True).endswith(" (wait)")
    leave.set()
    thread.join()
    assert where_now(groups, thread.ident, alone=True) == "at its end"
    assert where_now(groups, threading.get_ident()).endswith(" (where_now)")
