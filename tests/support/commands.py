"""Whole programs in tests: `pretrain.py` under any launcher, on a tiny corpus, with nothing left behind.

Every program gets an environment without the variables of other launchers and with a mark in it. All its descendants
inherit the mark, so that after the program's end those still alive can be found and ended by pid, whichever session
they are in.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from megatron_allattn.data.corpora import files_corpus
from megatron_allattn.data.prepare import Preparation, prepare
from megatron_allattn.parallel.addresses import free_port
from tests.support.template import ROOT, Child, Template

BIN = Path(sys.executable).parent
PRETRAIN = str(ROOT / "pretrain.py")
MARK = "TEST_COMMAND_MARK"
OF_LAUNCHERS = ("PMI", "OMPI_", "HYDRA_", "MPI", "SLURM_", "TORCHELASTIC_", "PYTEST_", "DS_", "MASTER_", "NCCL_")
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "PYTHONPATH"}

# A network that takes milliseconds a step.
TINY = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--persistent-memory-size", "16"),
    *("--max-attention-span", "64", "--seq-length", "32", "--global-batch-size", "4"),
]


Variables = Mapping[str, str]
NONE: Variables = {}


def environment(variables: Variables = NONE) -> dict[str, str]:
    """The test's own environment without launchers' variables; programs beside this Python are found first."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_LAUNCHERS) and k not in RANK_VARIABLES}
    ours = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        MARK: uuid.uuid4().hex,
    }
    return kept | ours | dict(variables)


@dataclass(frozen=True)
class Finished:
    """How a program ended. left: descendants that were still alive a moment after it (and have been ended)."""

    returncode: int
    stdout: str
    stderr: str
    left: list[int]

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Program:
    """A program under way; use it in `with`, which ends it and its descendants.

    template: what forks it, if it is a Python file, so that torch need not be imported for it.
    """

    def __init__(self, command: list[str], folder: Path, env: Variables, template: Template | None = None) -> None:
        if PRETRAIN in command and not {"--no-report", "--report", "--help"} & set(command):
            command = [*command, "--no-report"]  # seconds of every run
        self.mark = env[MARK]
        self._stdout, self._stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (closed in exit)
        self.process: subprocess.Popen[bytes] | Child
        if template is None:
            self.process = subprocess.Popen(
                command, cwd=folder, env=dict(env), stdin=subprocess.DEVNULL, stdout=self._stdout, stderr=self._stderr
            )
        else:
            assert command[0] == sys.executable
            outputs = (_path(self._stdout), _path(self._stderr))
            self.process = template.program(command[1:], folder, env, outputs)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in marked(self.mark):
            kill(pid)
        self._stdout.close()
        self._stderr.close()

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return _content(self._stdout)

    @property
    def stderr(self) -> str:
        """What it has complained about so far."""
        return _content(self._stderr)

    def wait(self, timeout: float = 240.0) -> Finished:
        """Wait for its end. Raises AssertionError with its output when that does not come."""
        try:
            code = self.process.wait(timeout)
        except (subprocess.TimeoutExpired, TimeoutError):
            raise AssertionError(f"no end after {timeout:g} s:\n{self.stdout}{self.stderr}") from None
        deadline = time.monotonic() + 5.0
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return Finished(code, self.stdout, self.stderr, left)


def _path(file: IO[bytes]) -> str:
    """By which another process can open it, though it has no name."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _content(file: IO[bytes]) -> str:
    """All of a file that another process may be writing, without moving the position that is shared with it."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def run(*command: str, folder: Path, variables: Variables = NONE, template: Template | None = None) -> Finished:
    """Run a program to its end in a folder, with these environment variables."""
    with Program(list(command), folder, environment(variables), template) as program:
        return program.wait()


@contextmanager
def plain_ranks(
    count: int, *arguments: str, folder: Path, port: int | None = None, template: Template | None = None
) -> Iterator[list[Program]]:
    """`pretrain.py` as `count` processes that know each other through plain environment variables alone."""
    shared = world(count, port)
    programs: list[Program] = []
    try:
        for rank in range(count):
            env = environment(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            programs.append(Program([sys.executable, PRETRAIN, *arguments], folder, env, template))
        yield programs
    finally:
        for program in programs:
            program.__exit__()


def run_ranks(
    count: int, *arguments: str, folder: Path, port: int | None = None, template: Template | None = None
) -> list[Finished]:
    """`plain_ranks`, to the end of all; by rank."""
    with plain_ranks(count, *arguments, folder=folder, port=port, template=template) as programs:
        return [program.wait() for program in programs]


def world(count: int, port: int | None = None) -> dict[str, str]:
    """The variables that `count` ranks on this machine have in common."""
    return {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}


def marked(mark: str) -> list[int]:
    """Live processes with this mark in their environment."""
    found = []
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # gone meanwhile, or another user's
                continue
    return found


def kill(pid: int) -> None:
    """kill -9, unless it is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def english(num_words: int, seed: int = 1) -> str:
    """Words in random order, the same for the same seed."""
    words = [
        "the",
        "of",
        "and",
        "to",
        "in",
        "that",
        "is",
        "was",
        "he",
        "for",
        "it",
        "with",
        "as",
        "his",
        "on",
        "be",
        "at",
        "by",
        "had",
        "not",
        "are",
        "but",
        "from",
        "or",
        "have",
        "an",
        "they",
    ]
    generator = random.Random(seed)
    return " ".join(generator.choice(words) for _ in range(num_words))


def corpus(
    folder: Path,
    *,
    num_words: int = 4000,
    seed: int = 1,
    tokenizer: Literal["byte", "char"] = "byte",
    split: str = "8,1,1",
) -> Path:
    """Prefix of a tiny prepared corpus."""
    text = folder / f"words{seed}.txt"
    text.write_text(english(num_words, seed))
    prefix = folder / f"{tokenizer}{seed}"
    prepare(Preparation(corpus=files_corpus([text]), prefix=prefix, tokenizer=tokenizer, split=split))
    return prefix


def records(run_folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, with floats as the text that stands there."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_float=str) for line in lines]


def outcome(run_folder: Path) -> dict[str, Any]:
    """outcome.json."""
    return json.loads((run_folder / "outcome.json").read_text())
