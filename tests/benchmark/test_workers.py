"""Processes of their own: what they run, their memory, and how they end."""

import os
from collections.abc import Callable

import pytest
import torch

from megatron_allattn.benchmark.workers import Worker, WorkerFailed, peak_memory

MEGABYTES = 300


def counter(start: int) -> Callable[[], tuple[int, int, int]]:
    """Counts its calls; tells the process and its threads."""
    count = start

    def run() -> tuple[int, int, int]:
        nonlocal count
        count += 1
        return count, os.getpid(), torch.get_num_threads()

    return run


def filling(megabytes: int) -> Callable[[], int]:
    return lambda: torch.ones(megabytes * 2**18).numel()


def failing(when: str) -> Callable[[], None]:
    if when == "build":
        raise ValueError("cannot be built")
    return lambda: os._exit(3)


def test_a_case_is_built_once_and_runs_in_a_process_of_its_own() -> None:
    with Worker(1, counter, 10) as first, Worker(1, counter, 20) as second:
        first.ready()
        second.ready()
        found = [first(), second(), first(), second()]
    counts, processes, threads = zip(*found, strict=True)
    assert counts == (11, 21, 12, 22)
    assert processes[:2] == processes[2:] and len({*processes, os.getpid()}) == 3
    assert set(threads) == {1}


def test_peak_memory_is_that_of_the_process_and_stays() -> None:
    held = torch.ones(MEGABYTES * 2**18)  # in this process, which the worker must not count
    with Worker(1, filling, MEGABYTES) as worker:
        worker.ready()
        before = worker.peak_memory()
        assert worker() == held.numel()
        after = worker.peak_memory()
        assert worker() == held.numel()
        again = worker.peak_memory()
    assert before < peak_memory() - 0.5 * MEGABYTES * 2**20
    assert 0.9 * MEGABYTES * 2**20 < after - before < 1.2 * MEGABYTES * 2**20
    assert after <= again < after + 0.2 * MEGABYTES * 2**20


@pytest.mark.parametrize(
    ("when", "message"),
    [("build", "ValueError: cannot be built"), ("run", "ended with code 3")],
)
def test_a_case_that_fails(when: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    def use() -> None:
        with Worker(1, failing, when) as worker:
            worker.ready()
            worker()

    with pytest.raises(WorkerFailed, match=message):
        use()
    assert ("Traceback" in capfd.readouterr().err) == (when == "build")
