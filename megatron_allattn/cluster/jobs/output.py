"""What a job's output tells of its earlier lives, to a node that sees no history of them in the run folder.

The batch script prints into one file in all lives (--open-mode=append): a line as soon as it runs, another when a life
begins. So a node finds out that it does not see the run folder of the other nodes, in whose place it would begin anew
on a disk of its own: where the file tells of a life that has begun; and where it tells of this start alone although
there were others, since then it is not the others' file either. Earlier lives that never began have done nothing.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_allattn.cluster.jobs.lives import Job

BEGUN = ", job {job}: goes on from step"
_RUNS = r" job {job}, restart (\d+): the batch script runs on "  # launch/pretrain.sbatch
_UNSEEN = "does not see what job {job} has done"


@dataclass(frozen=True)
class Output:
    """The file into which a job prints, and what is in it: nothing where it cannot be read."""

    job: str
    file: str
    text: str

    @classmethod
    def of(cls, seen: Job, job: str) -> "Output":
        path = Path(seen.output or "")
        try:
            return cls(job, str(path), path.read_text(errors="replace") if path.is_file() else "")
        except OSError:
            return cls(job, str(path), "")

    @property
    def begun(self) -> bool:
        """Whether it tells of a life that has begun."""
        return BEGUN.format(job=self.job) in self.text

    def unseen(self, folder: Path, restart: int) -> str | None:
        """Why a node that finds no history in a folder does not see what the job has done; None where there is nothing,
        or where the file does not tell (a terminal, a container without it)."""
        if restart == 0:
            return None
        what = _UNSEEN.format(job=self.job)
        if self.begun:
            return f"{what}: {folder} is not there, though {self.file} tells of it"
        runs = {int(one) for one in re.findall(_RUNS.format(job=re.escape(self.job)), self.text)}
        if runs == {restart}:
            return f"{what}: there is neither {folder} nor what earlier lives have printed into {self.file}"
        return None

    def left_out(self, seen: Job, restart: int) -> int:
        """How many nodes the job has left out since they did not see it: those told of, or as many as it can be."""
        if self.begun:
            return self.text.count(_UNSEEN.format(job=self.job))
        return min(len(seen.excluded), restart - 1)
