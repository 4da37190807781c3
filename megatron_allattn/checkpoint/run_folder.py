"""A run folder from outside: whether it has saved, how it has ended, what is a part of it, and that it can be written.

RUN/checkpoints/step_00000100/            the steps (folder.py)
RUN/latest                                the step that was saved last
RUN/outcome.json                          how the run has ended
"""

import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.config.errors import Unreadable, UsageError, unreadable, usage_error
from megatron_allattn.config.json_files import read_json_object

FOLDER, MARKER, LATEST = "checkpoints", "COMPLETE", "latest"
CONFIG, METRICS, OBSERVATIONS = "config.json", "metrics.jsonl", "observations.jsonl"
OUTCOME = "outcome.json"
STEP_NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")
ASIDE_NAME = re.compile(rf"\.{STEP_NAME.pattern}\.old-[1-9][0-9]*")  # of one that is being replaced
_LONGEST_NAME = 40  # characters that are read of a `latest`, which anybody may have written

End = Literal["done", "stopped", "guard", "failed"]
"""How a run ends that can tell: all steps done, on request, by its guard against what is not finite, by any error."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run has ended. step: the last one done, None before it is known; reason: of any text, in any number of
    lines."""

    how: End
    step: int | None
    reason: str

    def write(self, run_folder: Path) -> None:
        """RUN/outcome.json. Raises StorageError."""
        write_json_atomic(run_folder / OUTCOME, {"outcome": self.how, "step": self.step, "reason": self.reason})


def read_outcome(run_folder: Path) -> Outcome | None:
    """How a run has ended; None while it has not, or where it could not tell. Raises UsageError: the file cannot be
    read, or is not what a run writes."""
    path, fix = run_folder / OUTCOME, "move it away"
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable("file", path, error, fix) from None
    found = read_json_object("file", path, fix)
    how: Any = found.get("outcome")
    step, reason = found.get("step"), found.get("reason")
    if how not in get_args(End):
        raise usage_error("file", path, f"has outcome {how!r:.40}, expected one of {', '.join(get_args(End))}", fix)
    if not (isinstance(reason, str) and (step is None or type(step) is int)):
        raise usage_error("file", path, "has no reason in words, or a step that is no integer", fix)
    return Outcome(how=how, step=step, reason=reason)


def step_name(step: int) -> str:
    """The folder's name: step 100 is step_00000100."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The number of a step folder by its name, moved aside or not; -1: it is none's."""
    match = STEP_NAME.fullmatch(path.name) or ASIDE_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def prepare_run_folder(run_folder: Path) -> None:
    """Make RUN/checkpoints and prove that it can be written, before a run spends time. Raises UsageError otherwise."""
    parent = run_folder / FOLDER
    probe = parent / f".probe.tmp-{os.getpid()}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(run_folder, error) from error


def unwritable(run_folder: Path, error: OSError) -> UsageError:
    """The refusal of a run folder in which nothing can be made."""
    why = f"cannot be written ({error.strerror})"
    if os.path.islink(run_folder) and not os.path.exists(run_folder):
        why = f"is a link to {os.readlink(run_folder)}, which is not there"
    return usage_error("--save", run_folder, why, "choose another folder")


def has_saved(run_folder: Path) -> bool:
    """Whether any save of a run has ended, whatever has become of it since.

    A kill during the first one leaves at most one step folder, without its marker, and no `latest`.
    """
    entries = list((run_folder / FOLDER).glob("*"))
    steps = [path for path in entries if STEP_NAME.fullmatch(path.name)]
    marked = any((path / MARKER).exists() for path in entries)
    return len(steps) > 1 or marked or os.path.lexists(run_folder / LATEST)


def begun_from(run_folder: Path) -> Path | None:
    """--load of the run that last began in a folder, where that is another one; None where there was none, or no run.
    Raises UsageError: config.json cannot be read."""
    path = run_folder / CONFIG
    if not path.is_file():
        return None
    checkpoint = read_json_object("file", path, "move it away").get("checkpoint")
    load = checkpoint.get("load") if isinstance(checkpoint, dict) else None
    if not isinstance(load, str) or "\0" in load or os.path.realpath(load) == os.path.realpath(run_folder):
        return None
    return Path(load)


def run_around(path: Path) -> Path | None:
    """The run RUN, one that has saved, if a path is a part of it: RUN/latest, RUN/checkpoints or something in there."""
    inside = (run for run in path.parents if path == run / LATEST or path.is_relative_to(run / FOLDER))
    return next((run for run in inside if has_saved(run)), None)


def check_outside(what: str, path: Path) -> None:
    """UsageError for a flag's value that is to be made within a run: what lies in a step folder goes with that."""
    run = run_around(path.absolute()) or run_around(Path(os.path.realpath(path)))  # unlike resolve, never an error
    if run is not None:
        raise usage_error(what, path, f"is a part of the run {run}", "name a folder outside of its checkpoints")


def named_by_latest(run_folder: Path) -> str | None:
    """What `latest` says, a character for a byte, and its beginning alone if that is longer than any name; None where
    there is no such file. Raises Unreadable where it may not be read: then it is not known which step was complete."""
    latest = run_folder / LATEST
    try:
        if not stat.S_ISREG(latest.stat().st_mode):
            return None
        with latest.open("rb") as handle:
            content = handle.read(_LONGEST_NAME + 1).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # of the run folder, which there cannot be
            return None
        rule = f"cannot be read ({error.strerror}), and it says which step was complete"
        raise Unreadable(str(usage_error("file", latest, rule, "see to its permissions and to the disk"))) from None
    return content[:_LONGEST_NAME].decode("latin-1") + "..." * (len(content) > _LONGEST_NAME)
