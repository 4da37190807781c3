"""The lives of a run under SLURM: what began, how it ended, and what is done next.

A job that is requeued lives again: the same batch script, a new allocation, the run goes on from its newest checkpoint.
RUN/jobs/lives.jsonl has two records a life, one when it begins and one when it ends; a life without the second was lost
with the node on which its batch script ran, or killed. `next_action` is the whole policy, on plain values:

    done                                            the job ends, exit code 0
    stopped by a signal, pre-empted, time is up     requeue
    a rank killed, hung, failed; a node lost        requeue, unless it is the third in a row without a new checkpoint
    the user's mistake, what is not finite          the job ends with the reason: it would only happen again
    somebody else has ended the job                 nothing is done about it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_allattn.checkpoint.files import append_json_line, read_json_lines
from megatron_allattn.checkpoint.folder import find_latest
from megatron_allattn.cluster.jobs.margin import seconds
from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.parallel.nodelist import expand_nodes

FOLDER, HISTORY, STOP_FILE = "jobs", "lives.jsonl", "stop"

How = Literal["done", "stopped", "guard", "mistake", "failed", "unfit", "ended", "lost"]
"""How a life ended: unfit, its nodes; ended, by others (scancel, another requeue); lost, without a word."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One life of a job. number: from 1, over all jobs of the run; restart: SLURM's count, 0 in a job's first life.

    first_step, last_step: the newest checkpoint when it began and ended (0: none). excluded: nodes that the job leaves
    out from then on.
    """

    number: int
    job: str
    restart: int
    first_step: int
    last_step: int
    how: How
    reason: str
    excluded: tuple[str, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether it left no new checkpoint: all that it has done will be done again."""
        return self.last_step <= self.first_step

    @property
    def wasted(self) -> bool:
        """Whether it failed, too."""
        return self.how in ("failed", "lost") and self.idle


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a job is given up: so many lives in all, so many in a row that fail without a new checkpoint, and so many in
    a row without one however they end."""

    lives: int = 100
    wasted: int = 3
    idle: int = 10


RUNNING = ("RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "STOPPED", "SUSPENDED")
"""States of a job that runs: `scontrol show job` names what is done to it meanwhile in place of RUNNING."""

_WORDS_OF_PEOPLE = (
    "Comment=",
    "AdminComment=",
    "SystemComment=",
    "Extra=",
    "Command=",
    "WorkDir=",
    "StdErr=",
    "StdIn=",
    "StdOut=",
)
"""How lines of `scontrol show job` begin that may have anything in them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What SLURM says of the job right now (`scontrol show job`)."""

    running: bool
    """False once somebody has ended it: cancelled, requeued, at its time limit."""

    out_of_time: bool = False
    """At its time limit."""

    requeue: bool = True
    """False with --no-requeue."""

    excluded: tuple[str, ...] = ()
    """Nodes that it leaves out."""

    comment: str = ""
    """The user's, and what was added to it (remembered.py)."""

    time_limit: int | None = None
    """Seconds that it has, None where there is no limit, or none is told."""

    @classmethod
    def parse(cls, text: str) -> "Job":
        """From the lines of `scontrol show job`. Raises UsageError: they are none."""
        lines = [line.strip().partition(" JobName=")[0] for line in text.splitlines()]
        fields = " ".join(line for line in lines if not line.startswith(_WORDS_OF_PEOPLE))
        words = dict(word.split("=", 1) for word in fields.split() if "=" in word)
        if "JobState" not in words:
            raise usage_error("scontrol", text, "says nothing of a job's state", "look at what it prints")
        left_out, limit = words.get("ExcNodeList", "(null)"), words.get("TimeLimit", "")
        return cls(
            running=words["JobState"] in RUNNING,
            out_of_time=words.get("Reason") == "TimeLimit" or words["JobState"] == "TIMEOUT",
            requeue=words.get("Requeue", "1") != "0",
            excluded=() if left_out == "(null)" else tuple(expand_nodes(left_out, "ExcNodeList")),
            comment=next((line.removeprefix("Comment=") for line in lines if line.startswith("Comment=")), ""),
            time_limit=seconds(limit) if limit[:1].isdecimal() else None,
        )


@dataclass(frozen=True, kw_only=True)
class Next:
    """What the batch script does: `requeue` the job, without these nodes; `stop` it with an exit code; or `leave` it to
    whoever has ended it."""

    action: Literal["requeue", "stop", "leave"]
    reason: str
    exit_code: int = 0
    exclude: tuple[str, ...] = ()


class History:
    """RUN/jobs/lives.jsonl. Every method may raise StorageError, and UsageError for a file that is no such history."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.folder = run_folder / FOLDER
        self._path = self.folder / HISTORY

    def tells_of(self, job: str) -> bool:
        """Whether a life of this job has begun here; lives without a history are of one that was moved away."""
        if not self._path.exists():
            return any(self.folder.glob("life-*"))
        return any(record["kind"] == "begin" and record["job"] == job for record in self._records())

    @property
    def stop_asked(self) -> bool:
        """Whether somebody has left a file RUN/jobs/stop, which ends the job for good once its life is over."""
        return (self.folder / STOP_FILE).exists()

    def begin(self, job: str, restart: int) -> tuple[int, Path]:
        """A new life; its number and its folder, made for what its ranks print."""
        number = 1 + sum(record.get("kind") == "begin" for record in self._records())
        folder = self.folder / f"life-{number:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        for report in folder.glob("health/*.json"):  # of a history that was moved away
            report.unlink()
        record: dict[str, Any] = {"kind": "begin", "life": number, "job": job, "restart": restart}
        append_json_line(self._path, record | {"step": self.newest_step()})
        return number, folder

    def end(self, number: int, how: How, reason: str, excluded: Sequence[str] = ()) -> None:
        """How this life has ended."""
        record: dict[str, Any] = {"kind": "end", "life": number, "how": how, "reason": reason}
        append_json_line(self._path, record | {"step": self.newest_step(), "excluded": list(excluded)})

    def lives(self, job: str) -> list[Life]:
        """All lives of a job that are over, in their order: one that began and has not ended is lost if it is not the
        last of all."""
        records = self._records()
        ends = {record["life"]: record for record in records if record["kind"] == "end"}
        begins = [record for record in records if record["kind"] == "begin"]
        found = []
        for begin, following in zip_longest(begins, begins[1:]):
            end = ends.get(begin["life"])
            if end is None and following is not None:
                reason = "its batch script was lost with its node, or killed"
                end = {"how": "lost", "step": following["step"], "reason": reason, "excluded": []}
            if begin["job"] == job and end is not None:
                found.append(_life(begin, end))
        return found

    def newest_step(self) -> int:
        """The step of the newest complete checkpoint, 0 where there is none."""
        try:
            return int(find_latest(self.run_folder)[0].name.strip(".").partition(".")[0].removeprefix("step_"))
        except UsageError:
            return 0

    def _records(self) -> list[dict[str, Any]]:
        records = read_json_lines(self._path)
        if not all(_is_record(record) for record in records):
            fix = "move it away, and lives are counted from 1 again"
            raise usage_error("file", self._path, "holds what is no record of a life", fix)
        return records


def _is_record(record: dict[str, Any]) -> bool:
    if record.get("kind") == "begin":
        return {"life", "step", "job", "restart"} <= record.keys()
    wanted = {"life", "step", "how", "reason", "excluded"}
    return record.get("kind") == "end" and wanted <= record.keys() and record["how"] in get_args(How)


def _life(begin: dict[str, Any], end: dict[str, Any]) -> Life:
    return Life(
        number=begin["life"],
        job=begin["job"],
        restart=begin["restart"],
        first_step=begin["step"],
        last_step=end["step"],
        how=end["how"],
        reason=end["reason"],
        excluded=tuple(end["excluded"]),
    )


def next_action(lives: Sequence[Life], limits: Limits, job: Job, *, stop_asked: bool = False) -> Next:
    """What follows the last of these lives of a job (at least one)."""
    last = lives[-1]
    if last.how == "done":
        return Next(action="stop", reason=last.reason)
    if last.how == "guard":
        return Next(action="stop", reason=last.reason, exit_code=4)
    if last.how == "mistake":
        return Next(action="stop", reason=last.reason, exit_code=2)
    if not job.running and not job.out_of_time:
        return Next(action="leave", reason=f"the job was ended by others: {last.reason}")
    if (why := given_up(lives, limits, stop_asked=stop_asked)) is not None:
        return why
    if not job.requeue:
        reason = f"{last.reason}; the job may not be requeued (--no-requeue): submit it again to go on"
        return Next(action="stop", reason=reason, exit_code=3 if last.how == "stopped" else 1)
    exclude = tuple(dict.fromkeys([*job.excluded, *last.excluded])) if last.excluded else ()
    return Next(action="requeue", reason=last.reason, exclude=exclude)


def given_up(lives: Sequence[Life], limits: Limits, *, stop_asked: bool = False) -> Next | None:
    """Why no further life is begun, if that is so. lives: of the job, all over; there may be none."""
    if stop_asked:
        told = lives[-1].reason if lives else "nothing was begun"
        reason = f"{told}; {FOLDER}/{STOP_FILE} is in the run folder: remove it and submit the job again to go on"
        return Next(action="stop", reason=reason, exit_code=3)
    if not lives:
        return None
    last = lives[-1]
    wasted, idle = (len(list(takewhile(attrgetter(name), reversed(lives)))) for name in ("wasted", "idle"))
    where = f"step {last.last_step}" if last.last_step else "the beginning"
    if wasted >= limits.wasted:
        reason = f"{wasted} lives in a row have failed without a checkpoint after {where}"
    elif idle >= limits.idle:
        reason = f"{idle} lives in a row have ended without a checkpoint after {where}: give each more time (--time)"
    elif len(lives) >= limits.lives:
        reason = f"{len(lives)} lives are the most that a job gets (MAX_LIVES)"
    else:
        return None
    return Next(action="stop", reason=f"{reason}; the last: {last.reason}", exit_code=1)
