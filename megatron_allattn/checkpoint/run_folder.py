"""A run folder from outside: whether it has saved, what is a part of it, and that it can be written.

RUN/checkpoints/step_00000100/            the steps (folder.py)
RUN/latest                                the step that was saved last
"""

import errno
import os
import re
import stat
from pathlib import Path

from megatron_allattn.config.errors import Unreadable, UsageError, usage_error

FOLDER, MARKER, LATEST = "checkpoints", "COMPLETE", "latest"
METRICS, OBSERVATIONS = "metrics.jsonl", "observations.jsonl"
OUTCOME = "outcome.json"
"""How a run has ended, beside its checkpoints: training/main.py writes it."""
STEP_NAME = re.compile(r"step_(\d{8,})")
_LONGEST_NAME = 40  # characters that are read of a `latest`, which anybody may have written


def step_name(step: int) -> str:
    """The folder's name: step 100 is step_00000100."""
    return f"step_{step:08d}"


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
