"""How long before the end of its time a job has to be told to stop: `--signal=B:USR1@SECONDS`.

Between the signal and the end of the job lie the step under way and a save (with --async-save a second one, which was
under way), and the time in which SLURM looks at its clock (it looks about every 30 s, and may be a minute early). So

    margin = 2 × (longest step + longest save) + 60 s, to the next whole minute

of what was measured in the run folder (training/pace.py). Before anything was measured a batch script asks for
`DEFAULT`: the ten minutes that --stop-deadline-minutes leaves a run for the same, and a minute for SLURM.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_allattn.config.errors import UsageError
from megatron_allattn.training.pace import longest_save, longest_step

DEFAULT = 660
CLOCK = 60.0


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


def notes(found: Measured | None, asked: int | None, deadline_minutes: float) -> Sequence[str]:
    """What is to be said of the margin that a batch script asks for, and of --stop-deadline-minutes.

    asked: seconds; None: the script has no --signal line, so that a job ends without a warning.
    """
    lines = []
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
