"""tools/generate.py --interactive on a real terminal, and on ranks of which one is gone while nobody types."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import ROOT, corpus, environment, world
from tests.support.runs import untrained_run

PATIENCE = 200.0  # seconds
TOOL = [sys.executable, str(ROOT / "tools/generate.py"), "--load", "run", "--interactive"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`: a checkpoint of a network over characters."""
    found = tmp_path_factory.mktemp("terminal")
    untrained_run(found / "run", corpus(found, tokenizer="char"))
    return found


class Terminal:
    """A program with a terminal of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._ours, self._theirs = pty.openpty()
        self.before = self.settings()
        end = self._theirs
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment({"TERM": "dumb", "COLUMNS": "80"}),
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        self._unread = b""

    def settings(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def type(self, text: str) -> None:
        """Bit by bit: a terminal holds some thousand characters."""
        content = text.encode()
        for start in range(0, len(content), 500):
            os.write(self._ours, content[start : start + 500])
            self._read(0.1)

    def _read(self, seconds: float) -> None:
        """What comes, at most once."""
        if select.select([self._ours], [], [], seconds)[0]:
            self._unread += os.read(self._ours, 65536)

    def expect(self, pattern: bytes) -> bytes:
        """What is shown up to a match of this, which comes before long."""
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self._unread)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self._unread!r}"
            self._read(0.5)
        shown, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return shown

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal(folder: Path) -> Iterator[Terminal]:
    found = Terminal([*TOOL, "--num-tokens-to-generate", "1000000", "--stop", "q"], folder)
    yield found
    found.end()


def test_a_terminal(terminal: Terminal) -> None:
    assert b"Ctrl-D" in terminal.expect(rb"\n> ")
    assert terminal.settings() != terminal.before or find_spec("readline") is None  # lines can be edited
    terminal.type("the of\n")
    terminal.expect(rb"the of\r\n[a-z ]{40}")
    terminal.type("\x03")  # Ctrl-C stops the answer
    terminal.expect(rb"\n> ")
    terminal.type("\U0001f600\n")
    terminal.expect(rb"note: text of this line: character .*\r\n> ")
    terminal.type("the " * 1500 + "\n")  # more than a terminal holds of a line without readline
    terminal.expect(rb"\r\n[a-z ]{40}")
    terminal.type("\x03")
    terminal.expect(rb"\n> ")
    terminal.type("half a li\x03")  # at the prompt it ends
    assert terminal.process.wait(PATIENCE) == 0
    assert terminal.settings() == terminal.before


@contextmanager
def ranks(folder: Path, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Of one conversation, whose collectives wait 6 s."""
    shared, programs = world(count), []
    flags = ("--tensor-model-parallel-size", str(count), "--distributed-timeout-minutes", "0.1")
    try:
        for rank in range(count):
            env = environment(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            programs.append(subprocess.Popen([*TOOL, *flags], cwd=folder, env=env, **pipes))  # type: ignore[call-overload]
        yield programs
    finally:
        for program in programs:
            with suppress(ProcessLookupError):
                program.kill()
            program.communicate()


@pytest.mark.faults
@pytest.mark.parametrize("gone", [None, 0, 1])
def test_nobody_waits_for_a_rank_that_is_gone(folder: Path, gone: int | None) -> None:
    with ranks(folder, 2) as programs:
        first = programs[0]
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write(b"the of\n")
        first.stdin.flush()
        assert first.stdout.readline()  # the answer
        time.sleep(8.0)  # longer than collectives wait
        assert [program.poll() for program in programs] == [None, None]
        if gone is None:
            first.stdin.close()
            first.stdin = None
            assert [program.wait(PATIENCE) for program in programs] == [0, 0]
            return
        programs[gone].send_signal(signal.SIGKILL)
        other = programs[1 - gone]
        assert other.wait(PATIENCE) not in (0, -signal.SIGKILL)
        assert other.stderr is not None and b"error: " in other.stderr.read()
