"""Run a function in a forked child that may be killed, limited or unprivileged: no new interpreter to pay for."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

KILLABLE = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "open")


def run_forked(function: Callable[[], Any], timeout: float = 60.0) -> tuple[int, str]:
    """(exit code, text): 0 and the result's text, 1 and "Type: message" of an exception, -N and "" for signal N."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
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
