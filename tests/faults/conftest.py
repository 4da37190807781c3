"""Runs with a fault on one rank, and what all of their ranks say."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import ROOT, TINY, Finished, Program, corpus, environment, free_port, run, world
from tests.support.template import Template

FAULTY = str(ROOT / "tests" / "support" / "faulty.py")
TIMEOUT = 15.0  # seconds, of every collective
SLACK = 120.0  # for a machine that does other things too
FLAGS = {
    "--num-layers": "4",
    "--train-iters": "6",
    "--log-interval": "1",
    "--save": "run",
}  # and no report, which takes seconds
PATH = {"PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Ended:
    """How a run with a fault has ended: every rank, and the lines on stderr of all that begin with `error:`."""

    ranks: list[Finished]
    errors: list[str]

    @property
    def codes(self) -> list[int]:
        return [rank.returncode for rank in self.ranks]

    @property
    def said(self) -> str:
        """Everything, by rank."""
        return "\n".join(f"{rank.returncode}: {rank.output}" for rank in self.ranks)


class Runs:
    """Starts runs whose rank RANK has a fault, at step 3 unless it says when."""

    def __init__(self, folder: Path, data: Path, template: Template) -> None:
        self.folder, self._template = folder, template
        self._usual = dict(zip(TINY[::2], TINY[1::2], strict=True)) | FLAGS | {"--data-path": str(data)}

    def plain(self, count: int, rank: int, fault: str, *flags: str) -> Ended:
        """As processes that plain environment variables bring together. AssertionError when one does not end."""
        with self.started(count, rank, fault, *flags) as programs:
            return ended(programs)

    def succeeds(self, count: int, *flags: str) -> None:
        """Without a fault."""
        done = self.plain(count, 0, "pause@0", *flags)
        assert done.codes == [0] * count, done.said

    def refuses(self, line: str, *flags: str) -> None:
        """One process, with exit code 2 and this line."""
        done = self.plain(1, 0, "pause@0", *flags)
        assert (done.codes, done.errors) == ([2], [line]), done.said

    @contextmanager
    def started(self, count: int, rank: int, fault: str, *flags: str) -> Iterator[list[Program]]:
        """The same, under way."""
        shared, programs = world(count) | PATH, []
        try:
            for own in range(count):
                env = environment(shared | {"RANK": str(own), "LOCAL_RANK": str(own)})
                programs.append(Program(self._command(rank, fault, flags), self.folder, env, self._template))
            yield programs
        finally:
            for program in programs:
                program.__exit__()

    def torchrun(self, count: int, rank: int, fault: str, *flags: str) -> Finished:
        """Under torchrun."""
        launch = ["torchrun", "--nproc-per-node", str(count), "--master-port", str(free_port())]
        command = [*launch, *self._command(rank, fault, flags)[1:]]
        return run(*command, folder=self.folder, variables=PATH)

    def flags(self, *flags: str) -> list[str]:
        """These, and the usual ones that are not among them."""
        usual = [word for name, value in self._usual.items() if name not in flags for word in (name, value)]
        return [*usual, "--no-report", *flags]

    def _command(self, rank: int, fault: str, flags: tuple[str, ...]) -> list[str]:
        minutes = ["--distributed-timeout-minutes", str(TIMEOUT / 60)]
        when = fault if "@" in fault else f"{fault}@3"
        return [sys.executable, FAULTY, str(rank), when, *minutes, *self.flags(*flags)]


def ended(programs: list[Program]) -> Ended:
    """How they end. AssertionError when one does not."""
    deadline = time.monotonic() + TIMEOUT + SLACK + 10 * len(programs)
    ranks = [program.wait(deadline - time.monotonic()) for program in programs]
    return Ended(ranks, [line for done in ranks for line in errors(done)])


def until_step(step: int, program: Program, *others: Program) -> None:
    """Wait until a program has told of this step. AssertionError, with what the others say too, when it ends before."""
    deadline = time.monotonic() + SLACK
    while not re.search(f"step +{step}/", program.stdout):
        ended = program.process.poll()
        said = "\n".join(one.stdout + one.stderr for one in (program, *others))
        assert ended is None and time.monotonic() < deadline, f"no step {step} (code {ended}):\n{said}"
        time.sleep(0.02)


def errors(done: Finished) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture
def runs(data: Path, tmp_path: Path, template: Template) -> Runs:
    return Runs(tmp_path, data, template)
