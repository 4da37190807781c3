"""How a life ended, from what it has left: outcome.json, what srun said, what the ranks printed.

srun's own exit code tells little: the first rank that ends badly has all others ended by a signal. The order in which
srun tells of tasks does: `srun: error: n2: tasks 8-15: Exited with exit code 2`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_allattn.checkpoint.run_folder import Outcome, read_outcome
from megatron_allattn.cluster.jobs.lives import How, Job
from megatron_allattn.config.errors import UsageError, one_line

SRUN = "srun.log"
MISTAKE = 2  # exit code of a rank
_ENDED = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
_CODE = re.compile(r"Exited with exit code (\d+)")
_TAIL = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """What ended the training step first, as srun told it. rank: the first such task; code: its exit code, if any."""

    rank: int
    node: str
    how: str
    code: int | None

    @property
    def told(self) -> str:
        return f"rank {self.rank} on {self.node}: {self.how}"


def first_end(srun_log: Path) -> StepEnd | None:
    """The task that srun first told of, None where it told of none."""
    if not srun_log.is_file():
        return None
    for line in srun_log.read_text(errors="replace").splitlines():
        if match := _ENDED.match(line.strip()):
            code = _CODE.match(match["how"])
            rank = int(re.split("[,-]", match["tasks"])[0])
            return StepEnd(rank=rank, node=match["node"], how=match["how"], code=int(code[1]) if code else None)
    return None


def how_it_ended(run_folder: Path, life: Path, asked: str, job: Job) -> tuple[How, str]:
    """How a life ended and why, in one line.

    asked: the signal that its batch script was sent, empty if none; job: as SLURM sees it now.
    """
    outcome, end = _outcome(run_folder), first_end(life / SRUN)
    kind, step = (None, None) if outcome is None else (outcome.how, outcome.step)
    said = last_error(life) if outcome is None else one_line(outcome.reason)
    if kind == "done":
        return "done", said
    if kind == "guard":
        return "guard", said
    if kind == "stopped":
        return "stopped", f"stopped by {said} and saved at step {step}"
    if end is not None and end.code == MISTAKE and step is None and said:  # else it is what runs Python that has failed
        return "mistake", said
    if job.out_of_time:
        return "failed", "the time limit came before a save had ended: let the signal come earlier (--signal=B:USR1@…)"
    if not job.running:
        return "ended", "cancelled, requeued or lost with a node"
    if outcome is None and asked:
        return "stopped", f"asked to stop ({asked}), and ended before it had saved; it goes on from the last checkpoint"
    told = end.told if end is not None else last_word(life / SRUN) or "the training step ended without a word"
    return "failed", f"{said} ({told})" if said else told


def last_error(life: Path) -> str:
    """The last line `error: …` that any rank of a life has printed, without that word; empty if there is none."""
    for path in _logs(life):
        errors = [line for line in _tail(path).splitlines() if line.startswith("error: ")]
        if errors:
            return one_line(errors[-1].removeprefix("error: "))
    return ""


def last_word(srun_log: Path) -> str:
    """The last line that srun has printed, such as why it could not start; empty if there is none."""
    lines = _tail(srun_log).split("\n") if srun_log.is_file() else []
    return next((one_line(line) for line in reversed(lines) if line.strip()), "")


def last_lines(life: Path, most: int = 20) -> list[str]:
    """What the rank that ended the step printed last; the first rank's, where no rank did."""
    end = first_end(life / SRUN)
    rank = end.rank if end is not None else 0
    for path in _logs(life):
        if re.search(rf"-0*{rank}\.log$", path.name):
            return [f"{path.name}: {one_line(line)}" for line in _tail(path).splitlines()[-most:]]
    return []


def _outcome(run_folder: Path) -> Outcome | None:
    """outcome.json, None where there is none or it is torn: then the life is judged by what else it has left."""
    try:
        return read_outcome(run_folder)
    except UsageError:
        return None


def _logs(life: Path) -> Iterable[Path]:
    return sorted(life.glob("rank-*.log"))


def _tail(path: Path) -> str:
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - _TAIL))
        return handle.read().decode(errors="replace")
