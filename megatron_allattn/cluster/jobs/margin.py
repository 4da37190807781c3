"""How long before the end of its time a job has to be told to stop: `--signal=B:USR1@SECONDS`.

Between the signal and the end of the job lie the step under way and a save (with --async-save a second one, which was
under way), and the time in which SLURM looks at its clock (it looks about every 30 s, and may be a minute early). So

    margin = 2 × (longest step + longest save) + 60 s, to the next whole minute

of what was measured in the run folder (training/pace.py). Before anything was measured a batch script asks for
`DEFAULT`: the ten minutes that --stop-deadline-minutes leaves a run for the same, and a minute for SLURM.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.training.pace import longest_save, longest_step

DEFAULT = 660
CLOCK = 60.0
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of a run's longest save and step."""

    save: float
    step: float

    @property
    def margin(self) -> int:
        """Seconds, a whole number of minutes."""
        return 60 * math.ceil((2 * (self.save + self.step) + CLOCK) / 60)

    @property
    def told(self) -> str:
        return f"the longest save has taken {self.save:.1f} s and the longest step {self.step:.1f} s"


def measured(run_folder: Path) -> Measured | None:
    """What was measured in a run folder, None where no save has ended."""
    save = longest_save(run_folder)
    if save is None:
        return None
    try:
        return Measured(save=save, step=longest_step(run_folder) or 0.0)
    except UsageError:  # records that pretrain.py itself will refuse, with more to say
        return Measured(save=save, step=0.0)


def notes(
    found: Measured | None, asked: int | None, deadline_minutes: float, limit: int | None = None
) -> Sequence[str]:
    """What is to be said of the margin that a batch script asks for, and of --stop-deadline-minutes.

    asked: seconds; None: the script has no --signal line, so that a job ends without a warning. limit: seconds that the
    job has, None where there is no limit.
    """
    lines = []
    if asked is not None and limit is not None and 2 * asked > limit:
        lines.append(f"of the {limit} s of its time (--time) the job keeps {asked} s for its end: give it more")
    if asked is None:
        lines.append("there is no --signal=B:USR1@SECONDS: nothing is saved when the job's time is up")
    if found is None:
        return lines
    if asked is not None and found.margin > asked:
        lines.append(
            f"{found.told}: --signal=B:USR1@{asked} may be too late for a save; ask for {found.margin} s "
            "(launch/submit.py does), or a save may be lost when the job's time is up"
        )
    if found.margin - CLOCK > 60 * deadline_minutes:
        lines.append(
            f"{found.told}: --stop-deadline-minutes {deadline_minutes:g} may end a run before it is saved; "
            f"give {-(-found.margin // 60)}"
        )
    return lines


def check_time(asked: int, limit: int, time: str) -> None:
    """Refuse a job that would be told to stop as soon as it begins: it would live again and again.

    asked: seconds before its end; limit: seconds that it has; time: the same as it was given. Raises UsageError.
    """
    if asked >= limit:
        rule = f"is {limit} s, and the job would be told to stop {asked} s before its end"
        later = "a later signal (--signal-seconds; beside sbatch's own --signal the variable SIGNAL_SECONDS)"
        raise usage_error("--time", time, rule, f"give it more time, or {later}")


def seconds(time: str) -> int:
    """A limit as sbatch takes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    Raises UsageError.
    """
    match = _TIME.fullmatch(time)
    if match is None:
        raise usage_error(
            "--time", time, "is no time as sbatch takes it", "give 24:00:00 (hours:minutes:seconds) or 2-12"
        )
    days, *parts = match.groups()
    first, second, third = (int(part) if part is not None else None for part in parts)
    assert first is not None
    if days is not None:
        return 86_400 * int(days) + 3600 * first + 60 * (second or 0) + (third or 0)
    if third is not None:
        return 3600 * first + 60 * (second or 0) + third
    return 60 * first + (second or 0)
