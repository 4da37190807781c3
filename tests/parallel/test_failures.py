"""Nothing waits for ever: a rank that is frozen, killed or asked to end, whatever it holds and whenever it comes.

What the message is made of is in test_verdict.py, whole runs with a fault are in tests/faults. Waiting times are short
here: what is looked at is that they end.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_allattn.config import ParallelConfig
from megatron_allattn.parallel import board, discovery, failures
from megatron_allattn.parallel.collectives import PeerFailed, gather_objects
from megatron_allattn.parallel.failures import Watch
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.training.main import as_rank
from tests.support.commands import world
from tests.support.forked import Forked

SECONDS = 4  # of collectives
PATIENCE = 90.0  # more than any of this takes, on a machine that does other things too
SIGTERM_CODE = 128 + signal.SIGTERM
HERE = r"at parallel/test_failures.py:\d+ \(_body\)"


def _body(what: str, groups: Groups, watch: Watch) -> None:
    gather_objects(None, groups.world)
    print(what, flush=True)
    if what == "collective":
        gather_objects(None, groups.world)
    elif what == "wait":
        time.sleep(1000)
    elif what == "freeze":  # as by SIGSTOP, or where a host hangs
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "peer":  # as training does, which writes outcome.json before it lets an error through
        try:
            raise PeerFailed(1, 1)
        except PeerFailed as error:
            watch.explain(error, 1, says_all=False)
            raise
    else:
        assert what == "ends"


def _no_board(*_: object) -> None:
    print("deaf", flush=True)
    raise OSError("no more connections")


def _rank(what: str) -> int:
    torch.set_num_threads(1)
    failures.PATIENCE_SECONDS, failures.GRACE_SECONDS, failures.POLL_SECONDS = 1.5, 0.5, 0.1
    failures.ANSWER_SECONDS, failures.SPEECH_SECONDS = 4.0, 12.0
    if what == "deaf":
        failures.Board = _no_board  # type: ignore[assignment, misc]
    meet = discovery.initialize
    discovery.initialize = lambda info, _, device: meet(info, PATIENCE, device)
    limits = ParallelConfig(distributed_timeout_minutes=SECONDS / 60)
    return as_rank(lambda _: None, limits, lambda groups, _, watch: _body(what, groups, watch) or 0)


@contextmanager
def ranks(folder: Path, *whats: str) -> Iterator[list[Forked]]:
    """A rank for each of these, once all have come to it."""
    with ExitStack() as stack:
        shared, running = world(len(whats)) | {"LOCAL_WORLD_SIZE": str(len(whats))}, []
        for rank, what in enumerate(whats):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            running.append(stack.enter_context(Forked(lambda what=what: _rank(what), folder, str(rank), shared | own)))
        deadline = time.monotonic() + PATIENCE
        while not all(what in one.stdout for what, one in zip(whats, running, strict=True)):
            assert time.monotonic() < deadline, [one.stderr for one in running]
            time.sleep(0.05)
        yield running


def ends(*running: Forked) -> tuple[list[int], list[str]]:
    """The exit codes, and the lines of all that begin with `error:`."""
    codes = [one.wait(PATIENCE) for one in running]
    return codes, [line for one in running for line in one.stderr.splitlines() if line.startswith("error: ")]


def test_a_frozen_rank_that_holds_the_store(tmp_path: Path) -> None:
    with ranks(tmp_path, "freeze", "collective") as (_, second):
        codes, said = ends(second)
    assert codes == [1]
    assert said == [f"error: rank 0 does not answer: rank 1 gave up after {SECONDS} s in the world group [0, 1]"]


def test_a_frozen_rank_that_holds_nothing(tmp_path: Path) -> None:
    with ranks(tmp_path, "collective", "freeze", "collective") as (first, _, third):
        codes, (line,) = ends(first, third)
    assert codes == [1, 1]
    assert line.startswith("error: rank 1 is gone: ") and "in the world group [0, 1, 2]" in line


def test_sigterm_beside_a_frozen_rank(tmp_path: Path) -> None:
    with ranks(tmp_path, "freeze", "wait") as (_, second):
        os.kill(second.pid, signal.SIGTERM)
        codes, (line,) = ends(second)
    assert codes == [SIGTERM_CODE]
    assert re.fullmatch(f"error: rank 0 does not answer: rank 1 got SIGTERM {HERE}", line)


def test_sigterm_on_all_ranks_is_told_once(tmp_path: Path) -> None:
    with ranks(tmp_path, "wait", "wait") as both:
        for one in both:
            os.kill(one.pid, signal.SIGTERM)
        codes, (line,) = ends(*both)
    assert codes == [SIGTERM_CODE] * 2
    assert re.fullmatch(f"error: the run was ended by SIGTERM: ranks 0 and 1 got SIGTERM {HERE}", line)


def test_sigterm_on_one_rank_ends_all(tmp_path: Path) -> None:
    with ranks(tmp_path, "collective", "wait") as (first, second):
        os.kill(second.pid, signal.SIGTERM)
        codes, (line, *more) = ends(first, second)
    assert (codes, more) == ([1, SIGTERM_CODE], [])
    told = f"rank 1 got SIGTERM {HERE}; rank 0 waited in the world group \\[0, 1\\]"
    assert re.fullmatch(f"error: the run was ended by SIGTERM: {told}", line)


def test_an_interruption_while_the_others_are_waited_for(tmp_path: Path) -> None:
    with ranks(tmp_path, "peer", "freeze") as (first, _):
        time.sleep(0.5)
        os.kill(first.pid, signal.SIGINT)
        assert ends(first) == ([1], ["error: interrupted"])


def test_a_rank_that_cannot_reach_the_store_once_more_says_why(tmp_path: Path) -> None:
    with ranks(tmp_path, "deaf", "deaf") as both:
        codes, lines = ends(*both)
    assert codes == [1, 1]
    rule = "cannot connect once more to where the ranks have met: OSError: no more connections"
    assert sorted(lines) == [f"error: rank {rank} {rule}; start the run again" for rank in range(2)]
    assert "Traceback" not in both[0].stderr


def test_the_end_of_a_rank_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    with ranks(tmp_path, "ends", "dies") as both:
        assert ends(*both) == ([0, -signal.SIGKILL], [])


def test_a_board_that_is_silent_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that does not come costs its limit once; what is asked after that costs nothing."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    one, asked = board.Board("silent", 0.2), []
    one.ask(lambda store: store.set("a", "b"))
    assert one.ask(lambda store: store.get("a")) == b"b"
    with pytest.raises(board.Silent):
        one.ask(lambda store: time.sleep(5))
    with pytest.raises(board.Silent):
        one.ask(asked.append)
    assert asked == []
