"""A measurement in a process of its own, so that its peak memory is its own.

A worker is a fresh Python (started by "spawn"; a fork would begin with its parent's memory). It builds its case once
and then runs it whenever it is called, so that cases in several workers can be alternated.
"""

import multiprocessing
import resource
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from megatron_allattn.benchmark.machine import use_threads
from megatron_allattn.config.reporting import without_interrupts

STATUS = Path("/proc/self/status")


class WorkerFailed(RuntimeError):
    """A case could not be built or run; the message is its error's, the child has printed the traceback."""


class Worker:
    """`build(*arguments)` in a fresh process gives what each call of the worker runs. Both must be picklable."""

    def __init__(self, threads: int, build: Callable[..., Callable[[], Any]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, threads, build, arguments), daemon=True)
        with without_interrupts():
            self._process.start()
        other.close()

    def ready(self) -> None:
        """Wait until the case is built."""
        self._answer()

    def __call__(self) -> Any:
        """Run the case once and give what it returns."""
        self._pipe.send("run")
        return self._answer()

    def peak_memory(self) -> int:
        """The most bytes that the process has held so far: of the GPU's tensors, or of the process on a CPU."""
        self._pipe.send("memory")
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise WorkerFailed(f"the process ended with code {self._process.exitcode} (out of memory?)") from None
        if kind == "error":
            raise WorkerFailed(value)
        return value

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if kind is not None:  # such as an interruption: nobody waits for what it is at
            self._process.kill()
        self.close()


def _serve(pipe: Connection, threads: int, build: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> None:
    """The worker's side: build, then answer until the other side closes the pipe."""
    use_threads(threads)
    try:
        case = build(*arguments)
        pipe.send(("done", None))
        while True:
            request = pipe.recv()
            pipe.send(("done", case() if request == "run" else peak_memory()))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def peak_memory() -> int:
    """The most bytes held so far: of tensors on the GPU where it was used, else resident memory of this process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
