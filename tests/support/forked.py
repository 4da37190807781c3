"""Run a function in a forked child that may be killed, limited or unprivileged: no new interpreter to pay for."""

import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

KILLABLE = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "open")


def run_forked(function: Callable[[], Any], timeout: float = 60.0) -> tuple[int, str]:
    """(exit code, text): 0 and the result's text, 1 and "Type: message" of an exception, -N and "" for signal N.

    A crash has the stack for its text. The child collects no cycles: what other threads of its parent left, which it
    does not have, is not to be ended by it.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        gc.disable()
        faulthandler.enable(write_end)
        code, text = 0, ""
        try:
            text = str(function())
        except BaseException as error:
            code, text = 1, f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode()[:60_000])
        os._exit(code)
    os.close(write_end)
    deadline = time.monotonic() + timeout
    while (result := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    with os.fdopen(read_end, "rb") as pipe:
        return os.waitstatus_to_exitcode(result[1]), pipe.read().decode()


def kill_before_call(number: int) -> None:
    """Make this process kill -9 itself right before its call number `number` (from 1) that changes or flushes files."""
    calls = 0

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return wrapper

    for name in KILLABLE:
        setattr(os, name, wrap(getattr(os, name)))


class Forked:
    """A forked child that runs a function with outputs of its own, as a program would; use it in `with`, which ends it.

    Its exit code is the function's result; 1, and the exception on stderr, where that raises.
    """

    def __init__(self, function: Callable[[], int], folder: Path, name: str, variables: Mapping[str, str]) -> None:
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        self._code: int | None = None
        for path in (self._out, self._err):
            path.touch()
        self.pid = os.fork()
        if self.pid == 0:
            for number, path in ((1, self._out), (2, self._err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(variables)
            code = 1
            try:
                code = function()
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def wait(self, timeout: float) -> int:
        """Its exit code, -N for signal N. Raises AssertionError with its output when the end does not come."""
        deadline = time.monotonic() + timeout
        while self._code is None:
            assert time.monotonic() < deadline, f"no end after {timeout:g} s:\n{self.stdout}{self.stderr}"
            time.sleep(0.02)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code
