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
from megatron_allattn.checkpoint.run_folder import CONFIG, METRICS, OUTCOME, End, Outcome, read_outcome
from megatron_allattn.config.durations import clock
from megatron_allattn.config.errors import one_line

QUIET_SECONDS = 60.0
"""Without a record, after which it is told how long ago the last one was, and the lock is looked at."""

How = Literal["starting", "running", "quiet", "gone"] | End


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
    if (outcome := read_outcome(folder)) is not None:
        return _ended(outcome)
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


def _ended(outcome: Outcome) -> Standing:
    at = "" if outcome.step is None else f" at step {outcome.step:,}"
    words = "ended by its guard" if outcome.how == "guard" else outcome.how
    return Standing(outcome.how, f"{words}{at}: {one_line(outcome.reason)}")


def _age_of_config(folder: Path) -> float:
    ages = [time.time() - path.stat().st_mtime for name in (CONFIG, LOCK) if (path := folder / name).exists()]
    return min(ages, default=0.0)
