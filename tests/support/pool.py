"""Worker processes that stay alive for the whole test run, joined by gloo: a distributed test costs milliseconds.

    def _sum_of_ranks(rank, world_size, offset):            # at module level of the test's file
        ...
    def test_sum(pools):
        assert pools(2).run(_sum_of_ranks, 5) == [11, 11]   # one result per rank

Workers are processes with a pickle pipe each, forked by the template (template.py). A function is sent as file + module
+ qualified name, so that test files need not be importable. When a worker raises, dies or hangs, every worker's output
(with its Python stack, if it hangs) is in the error, the pool is ended by pid, and the next call starts a new one.
"""

import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, cast

from tests.support.template import START_TIMEOUT, Child, Template

START_TIMEOUT_EACH = 10.0  # seconds, and START_TIMEOUT for all
GRACE = 2.0  # seconds that the other workers get to report after the first failure
TAIL = 6000  # characters of a worker's output shown in an error


class WorkerError(RuntimeError):
    """A worker raised, died or hung. `rank` is the first one; `original` its exception, if it could be sent."""

    def __init__(self, message: str, rank: int, original: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank, self.original = rank, original


class WorkerPool:
    """`world_size` persistent processes with one gloo default group; started by the first `run`."""

    def __init__(self, world_size: int, template: Template) -> None:
        self.world_size, self._template = world_size, template
        self._processes: list[Child] = []
        self._pipes: list[Connection] = []
        self._folder: Path | None = None

    @property
    def _patience(self) -> float:
        return START_TIMEOUT + START_TIMEOUT_EACH * self.world_size

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call `function(rank, world_size, *args)` on every worker; the results by rank. Raises WorkerError."""
        if "<" in function.__qualname__ or function.__module__ == "__main__":
            raise ValueError(f"{function.__qualname__}: workers need a function at module level of an imported file")
        if any(process.poll() is not None for process in self._processes):
            self.end()  # died between two calls
        if not self._processes:
            self._start()
        path = str(Path(function.__code__.co_filename).resolve())
        request = pickle.dumps((path, function.__module__, function.__qualname__, pickle.dumps(args)))
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(request)
            except OSError:
                self._fail(rank, "died before the call", None)
        return self._collect(timeout, function.__qualname__)

    def end(self) -> None:
        """End every worker by its pid and remove the pool's folder. The next `run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()  # an idle worker leaves by itself when its pipe closes
        deadline = time.monotonic() + 1.0
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                process.kill()
                process.wait(START_TIMEOUT)  # all of its threads have to end
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="worker_pool_"))
        shared = {"WORLD_SIZE": str(self.world_size), "LOCAL_WORLD_SIZE": str(self.world_size)}
        shared |= {"MASTER_ADDR": "127.0.0.1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
        for rank in range(self.world_size):
            self._log(rank).touch()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ours, theirs = socket.socketpair()
            with theirs:
                self._processes.append(self._template.worker(shared | own, self._log(rank), theirs))
            self._pipes.append(Connection(ours.detach()))
        # Rank 0 takes a free port and tells it, so that nobody else can take it in between.
        port = self._collect(self._patience, "start", ranks=[0])[0]
        for pipe in self._pipes[1:]:
            pipe.send_bytes(pickle.dumps(port))
        self._collect(self._patience, "start")

    def _collect(self, timeout: float, what: str, ranks: list[int] | None = None) -> list[Any]:
        waiting = {self._pipes[rank]: rank for rank in (ranks if ranks is not None else range(self.world_size))}
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._dump_stacks()
                late = sorted(waiting.values())
                self._fail(late[0], f"did not finish {what} within {timeout:g} s (late: ranks {late})", None)
            for pipe in ready:
                rank = waiting.pop(cast(Connection, pipe))
                ok, value, original = self._receive(rank)
                if not ok:
                    self._fail(rank, value, original)
                results[rank] = value
        return [results[rank] for rank in sorted(results)]

    def _receive(self, rank: int) -> tuple[bool, Any, BaseException | None]:
        try:
            message = self._pipes[rank].recv_bytes()
        except (EOFError, ConnectionError):
            return False, f"died (exit code {self._processes[rank].wait(10)})", None
        ok, value, pickled = pickle.loads(message)
        try:
            return ok, value, pickle.loads(pickled) if pickled else None
        except Exception:  # an exception's class that only the worker knows; the traceback is in `value`
            return ok, value, None

    def _fail(self, rank: int, what: str, original: BaseException | None) -> NoReturn:
        """End the pool and raise one error for it: this rank's, then every worker's output."""
        if isinstance(original, RuntimeError) and (dead := self._dead()) is not None:
            rank, what, original = dead  # upon which this one has lost its connection, and was heard of first
        time.sleep(GRACE if what.startswith("died") else 0.0)  # let the others write why they fail too
        tails = [self._log(other).read_text(errors="replace")[-TAIL:].strip() for other in range(len(self._processes))]
        outputs = "".join(f"\n--- output of rank {other}\n{tail}" for other, tail in enumerate(tails) if tail)
        self.end()
        raise WorkerError(f"rank {rank} of {self.world_size}: {what}{outputs}", rank, original) from original

    def _dead(self) -> tuple[int, str, None] | None:
        """A worker that has ended, or does within a moment, and how."""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes):
                if (code := process.poll()) is not None:
                    return rank, f"died (exit code {code})", None
            time.sleep(0.05)
        return None

    def _dump_stacks(self) -> None:
        alive = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
        for rank in alive:
            self._processes[rank].send_signal(signal.SIGUSR1)  # faulthandler, see template_process.py
        deadline = time.monotonic() + 10.0
        while any(b"most recent call first" not in self._log(rank).read_bytes() for rank in alive):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        time.sleep(0.2)  # the rest of the stacks

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank_{rank}.log"


class WorkerPools:
    """One pool per world size: `pools(2).run(function, *args)`. The last two that were asked for stay.

    Threads of gloo wake up all the time: four idle workers that have trained in a pipeline take a tenth of a core.
    """

    def __init__(self, template: Template) -> None:
        self.template = template
        self._pools: dict[int, WorkerPool] = {}

    def __call__(self, world_size: int) -> WorkerPool:
        pool = self._pools.pop(world_size, None) or WorkerPool(world_size, self.template)
        for other in list(self._pools.values())[:-1]:
            other.end()  # its next call starts it again
        self._pools[world_size] = pool
        return pool

    def end(self) -> None:
        for pool in self._pools.values():
            pool.end()
