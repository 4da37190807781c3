"""One interpreter that has torch and DeepSpeed in it, which take seconds to import, and forks whatever needs them.

It forks the workers of pool.py, and programs: a Python file run as `__main__`, in a process of its own with the
arguments, environment, folder and outputs that it would have if it were started. For programs that are over soon.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 180.0  # seconds; importing torch takes long on a busy machine


class Template:
    """The interpreter that forks; started when it is first asked for something."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def worker(self, environment: Mapping[str, str], log: Path, pipe: socket.socket) -> "Child":
        """A worker with these variables, whose outputs go to `log` and whose calls come through `pipe`."""
        self._send("worker", dict(environment), str(log))
        assert self._process is not None
        send_handle(self._pipe, pipe.fileno(), self._process.pid)
        return Child(self._answer(), self)

    def program(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], outputs: tuple[str, str]
    ) -> "Child":
        """`python FILE ARGUMENTS` in a folder, with these variables alone; outputs: files for stdout and stderr."""
        self._send("program", list(command), str(folder), dict(environment), outputs)
        return Child(self._answer(), self)

    def poll(self, pid: int) -> int | None:
        """The exit code of a child that has ended, -N for signal N."""
        self._send("poll", pid)
        return self._answer()

    def end(self) -> None:
        if self._process is not None:
            self._pipe.close()  # upon which it leaves
            self._process.wait()
            self._process = None

    def _send(self, *request: Any) -> None:
        if self._process is None:
            self._start()
        self._pipe.send(request)

    def _answer(self) -> Any:
        if not self._pipe.poll(START_TIMEOUT):
            raise RuntimeError(f"the tests' template says nothing within {START_TIMEOUT:g} s")
        return self._pipe.recv()

    def _start(self) -> None:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "TORCHELASTIC_"))},
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # as `run_program` has it before torch is there
        }
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.template_process", str(theirs.fileno())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._pipe = Connection(ours.detach())


class Child:
    """A process that the template has forked."""

    def __init__(self, pid: int, template: Template) -> None:
        self.pid, self._template = pid, template

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._template.poll(self.pid)

    def kill(self) -> None:
        """kill -9; it keeps its pid until the template is asked."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = START_TIMEOUT) -> int:
        """Its exit code. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
            time.sleep(0.005)
        return code
