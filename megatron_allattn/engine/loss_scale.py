"""float16's loss scale, which is DeepSpeed's, and what becomes of a step whose gradient overflows.

The loss is multiplied by the scale before backward. Where any gradient is then too large for float16, on any rank, all
ranks leave out the update and the scale is halved (of the first two in a row, the second time only); after 1000 steps
without that it is doubled. Such a step is a step all the same: the data moves on, the caches take its hidden states
(which forward has made, without the scale) and the learning rate follows the number of steps. Adam counts updates.
"""

from dataclasses import asdict, dataclass
from typing import Any

SETTINGS = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
"""DeepSpeed's own defaults, fixed here."""


@dataclass(frozen=True)
class LossScaleState:
    """What a checkpoint holds, as in DeepSpeed's scaler."""

    cur_scale: float
    cur_iter: int
    last_overflow_iter: int
    cur_hysteresis: int


class LossScale:
    """The loss scale of one of DeepSpeed's ZeRO optimizers, equal on all ranks."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        zero.loss_scaler.raise_error_at_min_scale = False  # the engine ends the run, with a message

    @property
    def scale(self) -> float:
        return float(self._zero.loss_scaler.cur_scale)

    @property
    def smallest(self) -> bool:
        """Whether it cannot be lowered any more."""
        return self.scale <= self._zero.loss_scaler.min_scale

    def state(self) -> dict[str, Any]:
        scaler = self._zero.loss_scaler
        return asdict(LossScaleState(**{name: getattr(scaler, name) for name in LossScaleState.__dataclass_fields__}))

    def load(self, state: dict[str, Any]) -> None:
        for name, value in asdict(LossScaleState(**state)).items():
            setattr(self._zero.loss_scaler, name, value)
