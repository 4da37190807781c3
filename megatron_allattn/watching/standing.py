"""How a run stands, from outside: under way, ended and how, or gone without a word.

An end that the run knows of is in outcome.json. Of one that it does not (kill -9, a lost node) there are two signs: no
record comes any more, and nobody holds the run folder's lock. The lock is asked for only where no record has come for a
while: who asks holds it for a moment. On file systems whose locks do not reach this host nobody seems to hold it.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_allattn.checkpoint.lock import NAME as LOCK
from megatron_allattn.checkpoint.lock import is_held
from megatron_allattn.checkpoint.run_folder import METRICS, OUTCOME
from megatron_allattn.config.durations import clock
from megatron_allattn.config.errors import UsageError, one_line
from megatron_allattn.config.json_files import read_json_object

CONFIG = "config.json"
QUIET_SECONDS = 60.0
"""Without a record, after which it is told how long ago the last one was, and the lock is looked at."""

How = Literal["starting", "running", "quiet", "gone", "done", "stopped", "guard", "failed"]
_ENDS: dict[str, How] = {"done": "done", "stopped": "stopped", "guard": "guard", "failed": "failed"}


@dataclass(frozen=True)
class Standing:
    """How a run stands, and the line that says so."""

    how: How
    text: str


def is_run(folder: Path) -> bool:
    """Whether a folder has anything of a run, be it one that is about to begin."""
    return any((folder / name).exists() for name in (CONFIG, METRICS, OUTCOME, LOCK))


def standing(folder: Path) -> Standing:
    """How the run of this folder stands now. Raises UsageError: its outcome.json cannot be read."""
    if (end := _ended(folder)) is not None:
        return end
    try:
        age, what = time.time() - os.stat(folder / METRICS).st_mtime, "record"
    except FileNotFoundError:
        age, what = _age_of_config(folder), "sign of it"
        if age <= QUIET_SECONDS:
            return Standing("starting", "starting: no record yet")
    if age <= QUIET_SECONDS:
        return Standing("running", "running")
    minutes = f"no {what} for {clock(age)}"
    if is_held(folder):
        return Standing("quiet", f"running, {minutes}: evaluating, saving or starting, or it stands still")
    return Standing("gone", f"{minutes} and no lock held: it has ended without a word (killed?), or runs out of reach")


def _ended(folder: Path) -> Standing | None:
    if not (folder / OUTCOME).exists():
        return None
    found = read_json_object("file", folder / OUTCOME, "remove it, or name another run")
    told, step, reason = (found.get(name) for name in ("outcome", "step", "reason"))
    how = _ENDS.get(told) if isinstance(told, str) else None
    if how is None:
        raise UsageError(f"file {folder / OUTCOME}: has outcome {told!r:.40}, expected one of {', '.join(_ENDS)}")
    at = f" at step {step:,}" if type(step) is int else ""
    words = {"guard": "ended by its guard"}.get(how, how)
    return Standing(how, f"{words}{at}: {one_line(str(reason))}")


def _age_of_config(folder: Path) -> float:
    ages = [time.time() - path.stat().st_mtime for name in (CONFIG, LOCK) if (path := folder / name).exists()]
    return min(ages, default=0.0)
