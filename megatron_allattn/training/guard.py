"""What a run does about steps that go wrong: it counts those that were left out, and tells of losses that jump.

A step whose loss or gradient is not finite leaves no trace in the state (engine/finite.py). One such step is bad luck
or bad text, which the run survives; many in a row are a model or a host that is lost, and end it.
"""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from megatron_allattn.engine.finite import NotFinite

SEEN = 32  # losses of the last steps
NEEDED = 8  # of them before any loss can be called a jump
JUMP = 1.5  # times their median


class Guard:
    """limit: steps in a row that may be left out before the run ends; the others: those of a checkpoint.

    in_a_row: steps left out since the last update; losses: what the next loss is compared with.
    """

    def __init__(self, limit: int, in_a_row: int = 0, losses: Iterable[float] = ()) -> None:
        self._limit = limit
        self.in_a_row = in_a_row
        self.losses: deque[float] = deque(losses, SEEN)

    def jump(self, loss: float) -> float | None:
        """The median of the last losses, if this one is far above it. It is one of them from then on."""
        typical = median(self.losses) if len(self.losses) >= NEEDED else math.inf
        self.losses.append(loss)
        return typical if loss > JUMP * typical else None

    def count(self, step: int, not_finite: str | None) -> None:
        """Count a step; not_finite: why it was left out, if it was. Raises NotFinite where there are too many."""
        self.in_a_row = 0 if not_finite is None else self.in_a_row + 1
        if self.in_a_row >= self._limit:
            times = f" for {self._limit} steps in a row" if self._limit > 1 else ""
            raise NotFinite(
                f"step {step}: {not_finite}. No update is made{times} (--max-nonfinite-steps {self._limit}): look at "
                "that host and go on from the last checkpoint, or begin anew at a smaller --lr"
            )
