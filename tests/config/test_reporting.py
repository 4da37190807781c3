"""Printing that fails ends no program: what is told, once, and which exit code follows."""

import errno
import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO, cast

import pytest

from megatron_allattn.config.reporting import Output, run_program, tell_lost_output, without_interrupts
from tests.support.forked import run_forked
from tests.support.template import ROOT

FULL = "/dev/full"


def ended(main: Callable[[], int], output: Callable[[], TextIO | None], errors: Path) -> tuple[int, str]:
    """Exit code and stderr of a program with this standard output."""

    def program() -> None:
        sys.stderr = open(errors, "w")  # noqa: SIM115
        sys.stdout = cast(TextIO, output())
        run_program(main)

    code, _ = run_forked(program)
    return code, errors.read_text()


def full() -> TextIO:
    return open(FULL, "w")


def broken_pipe() -> TextIO:
    read_end, write_end = os.pipe()
    os.close(read_end)
    return open(write_end, "w")


def closed() -> None:
    """What Python has for a descriptor that was closed before the start."""
    os.close(1)


def prints(code: int, lines: int = 5000) -> int:
    for number in range(lines):
        print("a line that fills the buffer after a while", number)
    return code


def goes_on() -> int:
    """As a run does: the failure is told and is no error."""
    for _ in range(3):
        print("step", flush=True)
        tell_lost_output()
    return 0


@pytest.mark.parametrize(
    ("output", "reason"),
    [(full, "No space left on device"), (closed, "Bad file descriptor")],
)
def test_lost_output_is_one_line_and_exit_code_1(
    output: Callable[[], TextIO | None], reason: str, tmp_path: Path
) -> None:
    line = f"error: standard output: {reason}\n"
    assert ended(lambda: prints(0), output, tmp_path / "1") == (1, line)
    assert ended(lambda: prints(0, lines=1), output, tmp_path / "2") == (1, line)  # found out by the last flush
    assert ended(lambda: prints(3), output, tmp_path / "3") == (3, line)
    assert ended(lambda: prints(0, lines=0), output, tmp_path / "4") == (0, "")
    warning = f"warning: standard output failed and gets no more lines ({reason})\n"
    assert ended(goes_on, output, tmp_path / "5") == (0, warning)


def test_a_reader_that_is_gone_is_no_fault(tmp_path: Path) -> None:
    assert ended(lambda: prints(0), broken_pipe, tmp_path / "1") == (0, "")
    assert ended(lambda: prints(2), broken_pipe, tmp_path / "2") == (2, "")
    assert ended(goes_on, broken_pipe, tmp_path / "3")[1].count("(Broken pipe)") == 1


def test_a_closed_descriptor_goes_to_no_other_file(tmp_path: Path) -> None:
    """The next file opened would get number 1, and with it what libraries print."""

    def main() -> int:
        with open(tmp_path / "weights", "wb") as handle:
            assert handle.fileno() > 2
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(1, b"from a library")
        return 0

    assert ended(main, closed, tmp_path / "errors") == (0, "")


def interrupts(pid: int = 0) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    os.kill(pid or os.getpid(), signal.SIGINT)
    time.sleep(10)
    return 0


def test_an_interruption_is_one_line(tmp_path: Path) -> None:
    assert ended(interrupts, lambda: sys.stdout, tmp_path / "errors") == (1, "error: interrupted\n")


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [("raise KeyboardInterrupt", 1, "error: interrupted"), ("raise ValueError", 1, "ValueError")],
)
def test_an_interruption_of_a_programs_imports_is_one_line(body: str, code: int, line: str) -> None:
    program = f"from megatron_allattn.config.reporting import *; tell_early_ends(); {body}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, line)
    assert done.stderr.count("\n") == 1 or line == "ValueError"


@pytest.mark.parametrize(
    "command",
    [
        "pretrain.py --recipe demo",
        "launch/submit.py --recipe demo --save run",
        "tools/ablation.py --output all",
        "tools/benchmark.py attention",
        "tools/convert_checkpoint.py --to safetensors --load run --output file",
        "tools/evaluate.py --load run",
        "tools/generate.py --load run --prompt a",
        "tools/inspect_checkpoint.py run",
        "tools/plan.py --recipe demo",
        "tools/prepare_data.py byte --input file --output-prefix data",
        "tools/report.py run",
        "tools/verify_reference.py file",
    ],
)
def test_a_python_without_the_packages_is_one_line(command: str, tmp_path: Path) -> None:
    program, *flags = command.split()
    bare = [sys.executable, "-S", ROOT / program, *flags]  # -S: it sees nothing that was installed
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(bare, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: \S+: (\w+) is not installed in this environment; activate the project's .*\n", done.stderr
    )
    assert not [*tmp_path.iterdir()]


def test_a_lack_that_is_no_packages_of_the_project_is_not_hidden() -> None:
    program = (
        "from megatron_allattn.config.reporting import *; run_program(lambda: __import__('megatron_allattn.nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "megatron_allattn.nothing" in done.stderr


def test_a_process_that_is_started_is_not_interrupted() -> None:
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    with without_interrupts():
        child = context.Process(target=interrupt_itself, args=(its,))
        child.start()
    assert ours.poll(30) and ours.recv() == "alive"
    child.join()
    assert child.exitcode == 0
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def interrupt_itself(pipe: Connection) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    pipe.send("alive")


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (2, 2), ("why", 1)])
def test_exits(code: int | str | None, expected: int, tmp_path: Path) -> None:
    assert ended(lambda: sys.exit(code), full, tmp_path / "errors") == (expected, "")


def test_stderr_that_fails_is_silent() -> None:
    output = Output(full(), 2)
    print("error: something", file=cast(TextIO, output), flush=True)
    assert output.failure is not None
    assert output.failure.errno == errno.ENOSPC
    print("more", file=cast(TextIO, output), flush=True)


def test_what_an_encoding_lacks_is_escaped() -> None:
    content = io.BytesIO()
    output = Output(io.TextIOWrapper(content, encoding="ascii"), 1)
    print("64 × 32", file=cast(TextIO, output), flush=True)
    assert content.getvalue() == b"64 \\xd7 32\n"
    assert output.encoding == "ascii"


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, 2), (errno.ENAMETOOLONG, 2), (errno.EIO, 1)])
def test_a_path_that_cannot_be_used_is_one_line(tmp_path: Path, number: int, code: int) -> None:
    def main() -> int:
        raise OSError(number, os.strerror(number), "/x/run")

    found, errors = ended(main, broken_pipe, tmp_path / "errors")
    assert found == code
    if code == 2:
        assert errors == f"error: path /x/run: {os.strerror(number)}; check that path, or name another\n"
