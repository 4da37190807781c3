"""Jobs of launch/pretrain.sbatch on a cluster of tests/support/slurm.py: submitted, watched, asked how they end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_allattn.cluster.jobs.script import JobOptions, write_job
from tests.support.commands import ROOT, TINY, outcome, records
from tests.support.slurm import ENDED, Cluster

SCRIPT = str(ROOT / "launch" / "pretrain.sbatch")
SUBMIT = str(ROOT / "launch" / "submit.py")
PATIENCE = 900  # seconds: the machine may do other things, too
NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class Scene:
    """A cluster, a folder of the test's own on it, and a corpus. python: the program that jobs run as Python."""

    cluster: Cluster
    folder: Path
    data: Path
    python: str = sys.executable

    def flags(self, *flags: str) -> list[str]:
        """Of pretrain.py: a tiny run in the folder `run`, told step by step, with these changes."""
        usual = dict(zip(TINY[::2], TINY[1::2], strict=True))
        usual |= {"--log-interval": "1", "--data-path": str(self.data), "--save": "run"}
        words = (word for name, value in usual.items() if name not in flags for word in (name, value))
        return [*words, "--no-report", *flags]

    def submit(
        self, *options: str, flags: list[str], variables: Mapping[str, str] = NONE, run: Path | None = None
    ) -> "Submission":
        """With `sbatch OPTIONS launch/pretrain.sbatch FLAGS`. run: the run folder, if it is another than `run`."""
        variables = {"ALLATTN_ROOT": str(ROOT), "HEALTH_SECONDS": str(PATIENCE), "PYTHON": self.python, **variables}
        job = self.cluster.run(
            "sbatch", "--parsable", *options, SCRIPT, *flags, folder=self.folder, variables=variables
        )
        return Submission(self, job, run or self.folder / "run")

    def submit_written(self, options: JobOptions, flags: list[str]) -> "Submission":
        """With the script that submit.py would write."""
        path = write_job(self.folder, flags, options)
        variables = {"HEALTH_SECONDS": str(PATIENCE), "PYTHON": self.python}
        job = self.cluster.run("sbatch", "--parsable", str(path), folder=self.folder, variables=variables)
        return Submission(self, job, self.folder / "run")

    def submit_checked(self, *words: str) -> "Submission":
        """With `launch/submit.py WORDS --submit`."""
        variables = {"PYTHON": self.python, "HEALTH_SECONDS": str(PATIENCE)}
        said = self.cluster.run(sys.executable, SUBMIT, *words, "--submit", folder=self.folder, variables=variables)
        return Submission(self, said.split()[-1], self.folder / "run")

    def drive_out(self, seconds: int = 1) -> str:
        """A job of higher priority that wants every node for a moment."""
        nodes = f"--nodes={len(self.cluster.nodes)}"
        words = ("sbatch", "--parsable", "--partition=urgent", nodes, "--exclusive", f"--wrap=sleep {seconds}")
        return self.cluster.run(*words, folder=self.folder)


@dataclass(frozen=True)
class Submission:
    """A job (of an array: ARRAY_PLACE), and its run folder."""

    scene: Scene
    job: str
    run: Path

    @property
    def output(self) -> str:
        """What the batch script has printed in all lives, and the last words of the ranks."""
        outputs = sorted(self.scene.folder.glob("*.out"))
        logs = sorted(self.run.glob("jobs/life-*/*.log"))
        tails = [f"{log.relative_to(self.run)}: {log.read_text(errors='replace')[-1500:]}" for log in logs[-6:]]
        return "\n".join([*(path.read_text() for path in outputs), *tails])

    @property
    def endings(self) -> list[tuple[str, int]]:
        """How each life of the job has ended, and the step of its newest checkpoint then."""
        path = self.run / "jobs" / "lives.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        mine = {one["life"] for one in found if one["kind"] == "begin" and one["job"] == self.job}
        return [(one["how"], one["step"]) for one in found if one["kind"] == "end" and one["life"] in mine]

    @property
    def begins(self) -> list[int]:
        """The newest checkpoint with which each life began."""
        lines = (self.run / "jobs" / "lives.jsonl").read_text().splitlines()
        return [one["step"] for one in map(json.loads, lines) if one["kind"] == "begin" and one["job"] == self.job]

    @property
    def records(self) -> list[dict[str, Any]]:
        """Without what differs from run to run."""
        return [{k: v for k, v in one.items() if k != "tokens_per_second"} for one in records(self.run)]

    @property
    def outcome(self) -> dict[str, Any]:
        return outcome(self.run)

    def until(self, true: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait for something. AssertionError with the job's output when it does not come, or the job ends before."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"not within {seconds:g} s; {self.state()}\n{self.output}"
            assert self.state() not in ENDED, f"{self.state()}\n{self.output}"
            time.sleep(0.2)

    def until_step(self, step: int, life: int = 1, seconds: float = PATIENCE) -> None:
        """Until this life has told of this step."""
        log = self.run / "jobs" / f"life-{life:04d}" / "rank-000.log"
        self.until(lambda: log.exists() and any(step <= told for told in _steps(log.read_text())), seconds)

    def state(self) -> str:
        return self.scene.cluster.job(self.job).get("JobState", "UNKNOWN")

    def ended(self, seconds: float = PATIENCE) -> str:
        """The state in which it ends."""
        try:
            return self.scene.cluster.ended(self.job, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def strike(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        self.until(lambda: rank in self.scene.cluster.ranks(self.job))
        os.kill(self.scene.cluster.ranks(self.job)[rank], number)

    def cancel(self, *options: str) -> None:
        self.scene.cluster.run("scancel", *options, self.job, folder=self.scene.folder)


def _steps(text: str) -> list[int]:
    lines = (line.split() for line in text.splitlines() if line.startswith("step "))
    return [int(words[1].partition("/")[0]) for words in lines if len(words) > 1 and "/" in words[1]]


def hide(cluster: Cluster, node: str, folder: Path) -> None:
    """On this node alone a folder is empty, as where a file system is not mounted."""
    subprocess.run([*cluster.inside(node), "mount", "-t", "tmpfs", "none", str(folder)], check=True)


def show(cluster: Cluster, node: str, folder: Path) -> None:
    """It is there again."""
    subprocess.run([*cluster.inside(node), "umount", str(folder)], check=True)
