"""The worker pool itself: results by rank, one process group, errors with traceback, recovery, no leftovers."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import WorkerError, WorkerPool
from tests.support.template import ROOT


@dataclass
class Pair:
    """An argument and result whose class lives in this test file."""

    left: int
    right: torch.Tensor


class OwnError(Exception):
    pass


def _describe(rank: int, world_size: int, offset: int) -> tuple[int, int, int, int]:
    return rank, world_size, offset + rank, dist.get_rank()


def _sum_over_ranks(rank: int, world_size: int, scale: float) -> torch.Tensor:
    values = torch.tensor([rank + 1.0, 10.0 * rank], dtype=torch.float64) * scale
    dist.all_reduce(values)
    return values


def _swap(rank: int, world_size: int, pair: Pair) -> Pair:
    return Pair(left=pair.left + rank, right=pair.right * 2)


def _environment(rank: int, world_size: int) -> dict[str, object]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "DS_ACCELERATOR")
    return {**{name: os.environ[name] for name in names}, "threads": torch.get_num_threads(), "cwd": os.getcwd()}


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def _raise_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        print("said before the error")
        raise OwnError(f"no luck on {rank}")
    dist.barrier()  # the peers hang here


def _exit_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _sleep_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        time.sleep(60.0)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, but its parent has not asked how


@pytest.fixture
def own_pool(pools):
    pool = WorkerPool(2, pools.template)
    yield pool
    pool.end()


def test_results_come_by_rank(pools):
    assert pools(2).run(_describe, 40) == [(0, 2, 40, 0), (1, 2, 41, 1)]


def test_all_reduce_value(pools):
    for result in pools(2).run(_sum_over_ranks, 0.5):
        assert torch.equal(result, torch.tensor([1.5, 5.0], dtype=torch.float64))


def test_classes_of_the_test_file_travel_both_ways(pools):
    results = pools(2).run(_swap, Pair(left=5, right=torch.arange(3)))
    assert [type(result) for result in results] == [Pair, Pair]
    assert [result.left for result in results] == [5, 6]
    assert results[1].right.tolist() == [0, 2, 4]


def test_workers_are_reused_and_single_threaded(pools):
    first = pools(2).run(_pid)
    assert pools(2).run(_pid) == first == pools(2).pids
    assert len(set(first)) == 2
    for rank, found in enumerate(pools(2).run(_environment)):
        assert found == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "threads": 1,
            "cwd": str(ROOT),
        }


def test_a_local_function_is_refused(pools):
    with pytest.raises(ValueError, match="module level"):
        pools(2).run(lambda rank, world_size: rank)


def test_an_exception_ends_the_pool_and_names_rank_and_line(own_pool):
    old = own_pool.run(_pid)
    with pytest.raises(WorkerError) as caught:
        own_pool.run(_raise_on, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.original, OwnError)
    message = str(caught.value)
    assert message.startswith("rank 1 of 2: raised\nTraceback")
    assert "OwnError: no luck on 1" in message and "in _raise_on" in message and "said before the error" in message
    assert not any(_is_running(pid) for pid in old)
    new = own_pool.run(_pid)
    assert not set(new) & set(old)


def test_a_dead_worker_is_noticed_and_replaced(own_pool, pools):
    old = own_pool.run(_pid)
    with pytest.raises(WorkerError, match=r"rank 1 of 2: died \(exit code -9\)"):
        own_pool.run(_exit_on, 1)
    assert not any(_is_running(pid) for pid in old)
    assert [result[2] for result in own_pool.run(_describe, 7)] == [7, 8]
    pid = own_pool.pids[0]
    os.kill(pid, signal.SIGKILL)  # between two calls
    while pools.template.poll(pid) is None:  # all of its threads are gone, and the pool does not know
        time.sleep(0.01)
    assert [result[2] for result in own_pool.run(_describe, 8)] == [8, 9]


def test_a_hanging_worker_shows_its_stack(own_pool):
    own_pool.run(_pid)
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        own_pool.run(_sleep_on, 1, timeout=1.0)
    assert time.monotonic() - started < 40.0
    assert caught.value.rank == 1
    message = str(caught.value)
    assert "did not finish _sleep_on within 1 s (late: ranks [1])" in message
    line = _sleep_on.__code__.co_firstlineno + 2
    assert re.search(rf'test_pool\.py", line {line} in _sleep_on', message.partition("output of rank 1")[2])


@pytest.mark.faults
def test_workers_leave_when_the_test_run_is_killed(tmp_path: Path):
    (tmp_path / "functions.py").write_text("import os\ndef pid(rank, world_size):\n    return os.getpid()\n")
    script = tmp_path / "run.py"
    script.write_text(
        f"import os, signal, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from functions import pid\n"
        "from tests.support.pool import WorkerPool\nfrom tests.support.template import Template\n"
        "print(*WorkerPool(2, Template()).run(pid), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script)]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    pids = [int(word) for word in output.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10.0
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_is_running(pid) for pid in pids)
