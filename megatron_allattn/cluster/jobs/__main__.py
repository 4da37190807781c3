"""What a batch script asks (launch/pretrain.sbatch); people's lines go to stderr, one line for the script to stdout.

    python -m megatron_allattn.cluster.jobs begin --job 7 --restart 0 --signal-seconds 660 -- ARGUMENTS
        begins a life: `begun FOLDER`, in which `arguments` and `needs` are (each word ended by a zero byte)
    python -m megatron_allattn.cluster.jobs nodes FOLDER --job 7 --nodes n1,n2,n3 --needed 2
        after the nodes' check: `train n1,n3`
    python -m megatron_allattn.cluster.jobs next FOLDER --job 7 --asked USR1
        after training

Each may say instead what becomes of the job: `requeue`, `requeue NODES` (that it leaves out from then on), `stop CODE`
or `leave`. A second line is to be added to the job's comment (remembered.py). They read what `scontrol show job` says
of it from their standard input. Exit code 0, or 2 for a mistake (`stop 2`): the line is printed.
"""

import argparse
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.checkpoint.lock import RunLock
from megatron_allattn.checkpoint.run_folder import OUTCOME, unwritable
from megatron_allattn.cluster.jobs import arguments, endings, health, margin, remembered
from megatron_allattn.cluster.jobs.lives import History, Job, Limits, Next, given_up, next_action
from megatron_allattn.cluster.nodes.checks import table
from megatron_allattn.cluster.nodes.names import node_name
from megatron_allattn.config.errors import UsageError
from megatron_allattn.config.reporting import run_program
from megatron_allattn.config.tool_flags import ToolParser, count
from megatron_allattn.parallel.nodelist import expand_nodes

HEALTH = "health"  # folder of the nodes' reports in that of a life
BLIND = 3
"""So many nodes are left out at most since they do not see what their job has done."""


def _parser(command: str) -> ToolParser:
    parser = ToolParser(f"megatron_allattn.cluster.jobs {command}", __doc__)
    add: Any = parser.add_argument
    add("--job", required=True, metavar="ID", help="SLURM_JOB_ID")
    add("--max-lives", type=count, default=Limits.lives, metavar="N", help="of a job in all")
    add("--max-wasted", type=count, default=Limits.wasted, metavar="N", help="in a row without a new checkpoint")
    if command == "begin":
        add("--restart", type=int, default=0, metavar="N", help="SLURM_RESTART_COUNT")
        add("--signal-seconds", type=count, metavar="S", help="of --signal=B:USR1@S in the script")
        add("--lock-seconds", type=float, default=180.0, metavar="S", help="to wait for the run before to let go")
    else:
        add("life", type=Path, help="its folder")
    if command == "nodes":
        add("--nodes", required=True, metavar="LIST", help="those of the job")
        add("--needed", type=count, required=True, metavar="N", help="how many of them training takes")
    if command == "next":
        add("--asked", default="", metavar="SIGNAL", help="that the script was sent")
    return parser


def begin(given: argparse.Namespace, words: Sequence[str]) -> int:
    """A life begins, unless the job is given up or somebody else is at the run folder."""
    job, seen = arguments.submitted(words), _seen()
    history = History(job.run_folder)
    if given.signal_seconds is not None and seen.time_limit is not None:
        margin.check_time(given.signal_seconds, seen.time_limit, f"{seen.time_limit // 60}")
    first = remembered.begun_on(seen.comment)
    if given.restart > 0 and not history.tells_of(given.job):
        if first is not None:
            return _blind(history, seen, given, first)
        _say(f"note: nothing tells of an earlier life of job {given.job}, neither {history.folder} nor its comment")
    busy = _wait_for_lock(job.run_folder, given.lock_seconds)
    if busy is not None and given.restart == 0:
        raise busy
    number, life = history.begin(given.job, given.restart)
    if busy is not None:  # by what is left of an earlier life, perhaps on a node that SLURM has lost
        history.end(number, "failed", str(busy))
        return _answer(_next(history, given, seen))
    lives = history.lives(given.job)
    if (why := given_up(lives, _limits(given), stop_asked=history.stop_asked)) is not None:
        history.end(number, "ended", why.reason)
        return _answer(why)
    (job.run_folder / OUTCOME).unlink(missing_ok=True)  # so that one that is there afterwards is of this life
    (life / HEALTH).mkdir(exist_ok=True)
    _write_words(life / "arguments", job.of_life(given.signal_seconds))
    _write_words(life / "needs", _needs(job))
    goes_on = f"goes on from step {history.newest_step()}"
    _say(f"life {number} of {job.run_folder}, job {given.job}: {goes_on}; what ranks print is in {life}")
    found = margin.measured(job.run_folder)
    deadline = job.run.checkpoint.stop_deadline_minutes
    for line in margin.notes(found, given.signal_seconds, deadline, seen.time_limit):
        _say(f"warning: {line}")
    print(f"begun {life.absolute()}")
    return 0


def _seen() -> Job:
    """What SLURM says of the job."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # its comment may be in any encoding
    return Job.parse(sys.stdin.read())


def _blind(history: History, seen: Job, given: argparse.Namespace, first: str) -> int:
    """Another node is tried in place of this one, on which the job would begin anew. first: on which it has begun."""
    host, tried = node_name(), remembered.tries(seen.comment)
    reason = f"nothing in {history.folder} on {host} tells of job {given.job}, which began on {first}"
    if not seen.running:  # a requeue would undo it
        return _answer(Next(action="leave", reason=f"the job was ended by others, and {reason}"))
    if tried >= BLIND or given.restart >= given.max_lives:  # SLURM may refuse to note how many there were
        reason += f", and {tried or 'other'} nodes are left out for that already: look which of them share that folder"
        return _answer(Next(action="stop", reason=reason, exit_code=1))
    _answer(Next(action="requeue", reason=reason, exclude=(*seen.excluded, host)))
    print(f"{remembered.UNSEEN} {host}")
    return 0


def nodes(given: argparse.Namespace, words: Sequence[str]) -> int:
    """On which nodes to train."""
    assert not words
    seen = _seen()
    history, number = _history(given.life)
    lives = history.lives(given.job)
    if not seen.running:  # and the checks have been ended with it
        history.end(number, "ended", "cancelled, requeued or at its time limit before its nodes were checked")
        return _answer(_next(history, given, seen))
    judgement = health.judge_nodes(given.life / HEALTH, expand_nodes(given.nodes, "--nodes"))
    choice = health.choose_nodes(judgement, given.needed, lives, node_name())
    if choice.told or choice.stop:
        _say(table(judgement.checks, len(judgement.nodes)))
    if choice.train:
        if choice.told:
            _say(f"left out: {choice.told}")
        print(f"train {','.join(choice.train)}")
        return 0
    if choice.stop:
        history.end(number, "mistake", choice.stop)
        return _answer(Next(action="stop", reason=choice.stop, exit_code=1))
    history.end(number, "unfit", choice.told, choice.exclude)
    return _answer(_next(history, given, seen))


def next_(given: argparse.Namespace, words: Sequence[str]) -> int:
    """What follows a life whose training is over."""
    assert not words
    history, number = _history(given.life)
    seen = _seen()
    how, reason = endings.how_it_ended(history.run_folder, given.life, given.asked, seen)
    history.end(number, how, reason)
    if how in ("failed", "mistake", "guard"):
        for line in endings.last_lines(given.life):
            _say(line)
    return _answer(_next(history, given, seen))


def _next(history: History, given: argparse.Namespace, seen: Job) -> Next:
    return next_action(history.lives(given.job), _limits(given), seen, stop_asked=history.stop_asked)


def _answer(what: Next) -> int:
    _told(what)
    detail = ",".join(what.exclude) if what.action == "requeue" else str(what.exit_code)
    print(what.action if what.action == "leave" else f"{what.action} {detail}".rstrip())
    return 0


def _told(what: Next) -> Next:
    words = {"requeue": "requeued", "leave": "nothing to do", "stop": "over" if what.exit_code == 0 else "stopped"}
    left_out = f"; without {','.join(what.exclude)}" if what.exclude else ""
    _say(f"{words[what.action]}: {what.reason}{left_out}")
    return what


def _say(line: str) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"{stamp} {line}", file=sys.stderr, flush=True)


def _limits(given: argparse.Namespace) -> Limits:
    return Limits(lives=given.max_lives, wasted=given.max_wasted)


def _history(life: Path) -> tuple[History, int]:
    """Whose life it is, and which."""
    history = History(life.parent.parent)
    return history, int(life.name.removeprefix("life-"))


def _wait_for_lock(run_folder: Path, seconds: float) -> UsageError | None:
    """Until no process holds the run folder; who holds it, when that has not come in time. Raises UsageError: it cannot
    be written."""
    deadline, told = time.monotonic() + seconds, False
    history_folder = History(run_folder).folder
    try:
        history_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(run_folder, error) from None
    while True:
        try:
            RunLock(run_folder).release()
            return None
        except UsageError as error:
            if time.monotonic() > deadline:
                return error
            if not told:
                _say(f"waiting: {error}")
                told = True
            time.sleep(1.0)


def _needs(job: arguments.Submitted) -> list[str]:
    """Files that every node must see: the program, and the data (the first file of them, where none is here)."""
    program, absent = str(Path(__file__).resolve().parents[3] / "pretrain.py"), job.absent
    return [program, *([absent] if absent is not None else job.data_files)]


def _write_words(path: Path, words: Sequence[str]) -> None:
    path.write_bytes(b"".join(os.fsencode(word) + b"\0" for word in words))


COMMANDS = {"begin": begin, "nodes": nodes, "next": next_}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] not in COMMANDS:
            raise UsageError(f"megatron_allattn.cluster.jobs: give one of {', '.join(COMMANDS)} first")
        cut = words.index("--") if "--" in words else len(words)
        return COMMANDS[words[0]](_parser(words[0]).parse_args(words[1:cut]), words[cut + 1 :])
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        print("stop 2")
        return 2
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    run_program(main)
