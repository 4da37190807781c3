"""tools/watch.py in a terminal of its own: opened, resized, closed by q and by Ctrl-C, and without a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment, run
from tests.support.watched import append, begin, end, train

TOOL = str(ROOT / "tools/watch.py")
HOME = "\x1b[H"  # where each picture begins
CLEARED = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """The tool in a pseudo-terminal. seen: all that it has written."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 30, term: str = "xterm-256color") -> None:
        self._master, slave = pty.openpty()
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(slave)
        env = environment({"TERM": term, "LANG": "C.UTF-8", "PYTHONUTF8": "1"})
        for name in ("COLUMNS", "LINES"):  # which would be the size, whatever the terminal has
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, TOOL, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # its controlling terminal: keys make signals
        )
        self._slave, self.seen = slave, ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, text: str, seconds: float = 120.0) -> str:
        """What was written since the last wait, up to some time after this text."""
        begin, deadline = len(self.seen), time.monotonic() + seconds
        while text not in CLEARED.sub("", self.seen[begin:]):
            assert time.monotonic() < deadline and self.process.poll() is None, self.seen
            self._read(0.1)
        return self.seen[begin:]

    def frame(self) -> list[str]:
        """The lines of the next picture that is whole."""
        self.wait_for("q closes this view")
        begin = len(self.seen)
        while self.seen[begin:].count(HOME) < 2:
            self.wait_for("q closes this view")
        return CLEARED.sub("", self.seen[begin:].split(HOME)[1]).rstrip().splitlines()

    def ended(self) -> int:
        """The exit code, and `modes` as the terminal was left."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            self._read(0.05)
        self._read(0.05)
        assert termios.tcgetattr(self._slave) == self.modes
        return self.process.returncode

    def _read(self, seconds: float) -> None:
        while select.select([self._master], [], [], seconds)[0]:
            self.seen += os.read(self._master, 65536).decode(errors="replace")
            seconds = 0.0

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for one in opened:
        one.close()


def test_a_run_under_way(tmp_path: Path, terminals: list[Terminal]) -> None:
    """It follows new records, takes another size, reads a rewritten file anew, and is closed by q."""
    folder = begin(tmp_path / "run", steps=100)
    terminals.append(terminal := Terminal(str(folder)))
    shown = terminal.wait_for("q closes this view")
    assert "step 100 of 400" in CLEARED.sub("", shown) and "█" in shown
    append(folder, train(101), train(102, loss=1.2345))
    assert "loss 1.2345" in CLEARED.sub("", terminal.wait_for("step 102 of 400"))
    assert max(map(len, terminal.frame())) > 40
    terminal.resize(40, 14)
    deadline = time.monotonic() + 60
    while max(map(len, narrow := terminal.frame())) > 40:
        assert time.monotonic() < deadline
    assert "step 102 of 400" in "\n".join(narrow) and len(narrow) <= 14
    (folder / "new").write_text("".join(json.dumps(train(step)) + "\n" for step in range(1, 51)))
    (folder / "new").replace(folder / "metrics.jsonl")
    terminal.wait_for("step 50 of 400")
    end(folder)
    terminal.wait_for("done at step 400")
    terminal.press(b"q")
    assert terminal.ended() == 0
    left = terminal.seen.rpartition("\x1b[?1049l")[2]  # what stays after the screen of its own
    assert "step 50 of 400" in left and "q closes" not in left


@pytest.mark.parametrize("key", [b"\x03", b"\x04", b"Q"])
def test_keys_that_close_it(tmp_path: Path, terminals: list[Terminal], key: bytes) -> None:
    """Ctrl-C, which comes as a signal, Ctrl-D and Q; other keys do nothing."""
    terminals.append(terminal := Terminal(str(begin(tmp_path / "run", steps=3))))
    terminal.wait_for("q closes this view")
    terminal.press(b"xyz\x1b[A\r")
    time.sleep(0.5)
    assert terminal.process.poll() is None
    terminal.press(key)
    assert terminal.ended() == 0
    shown = CLEARED.sub("", terminal.seen)
    assert shown.rstrip().endswith("restarts 0") and "Traceback" not in shown


def test_signals_leave_the_terminal_as_it_was(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(terminal := Terminal(str(begin(tmp_path / "run", steps=3))))
    terminal.wait_for("q closes this view")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.ended() == 128 + signal.SIGTERM
    assert "\x1b[?1049l" in terminal.seen


def test_it_waits_for_a_run_that_is_to_come(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(terminal := Terminal(str(tmp_path / "run"), "--wait"))
    terminal.wait_for("waiting for")
    begin(tmp_path / "run")
    terminal.wait_for("starting: no record yet")
    append(tmp_path / "run", train(1))
    terminal.wait_for("step 1 of 400")
    terminal.press(b"q")
    assert terminal.ended() == 0


@pytest.mark.parametrize(("arguments", "term"), [(["--once"], "xterm"), ([], "dumb")])
def test_once_in_a_terminal(tmp_path: Path, terminals: list[Terminal], arguments: list[str], term: str) -> None:
    folder = begin(tmp_path / "run", steps=3)
    terminals.append(terminal := Terminal(str(folder), *arguments, term=term))
    assert terminal.ended() == 0
    assert "step 3 of 400" in terminal.seen and "\x1b[?1049h" not in terminal.seen


def test_without_a_terminal_it_is_one_summary(tmp_path: Path) -> None:
    """Plain text, also where the output takes ASCII only."""
    folder = begin(tmp_path / "run", steps=100)
    end(folder, "guard", 100, "the loss was not finite 5 times in a row")
    done = run(sys.executable, TOOL, str(folder), folder=tmp_path)
    assert (done.returncode, done.stderr, done.left) == (0, "", [])
    assert "\x1b" not in done.stdout and "ended by its guard at step 100: the loss was not finite" in done.stdout
    variables = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "COLUMNS": "40"}
    plain = run(sys.executable, TOOL, str(folder), folder=tmp_path, variables=variables)
    assert plain.returncode == 0 and plain.stdout.isascii() and "####" in plain.stdout


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    begin(tmp_path / "odd")
    (tmp_path / "odd" / "metrics.jsonl").mkdir()
    fix = "give the run folder of --save"
    for arguments, line in (
        (["absent"], f"DIR absent: is not there; {fix}, or --wait for one that is to come"),
        (["empty"], f"DIR empty: holds no run; {fix}, or --wait for one that is to come"),
        (["file"], f"DIR file: is no folder; {fix}"),
        (["odd"], "file odd/metrics.jsonl: is not a regular file; check that path, or name another run"),
        ([], "the following arguments are required: DIR; see --help"),
        (["empty", "--onse"], "flag --onse: is unknown; did you mean --once?"),
    ):
        done = run(sys.executable, TOOL, *arguments, folder=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {line}\n"), arguments


def test_without_rich_it_says_what_brings_it(tmp_path: Path) -> None:
    program = (
        "import importlib.util, runpy, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *of: None if name == 'rich' else real(name, *of)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = run(sys.executable, "-c", program, TOOL, str(tmp_path), folder=tmp_path)
    line = "watch.py: needs the package rich, which is not installed; pip install rich"
    assert (done.returncode, done.stderr) == (2, f"error: {line}\n")


def test_it_is_there_at_once(tmp_path: Path) -> None:
    """What takes seconds to load is not loaded."""
    program = (
        "import sys, megatron_allattn.watching.terminal; print({'torch', 'numpy', 'deepspeed'} & set(sys.modules))"
    )
    done = run(sys.executable, "-c", program, folder=tmp_path, variables={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
