"""The paper's decay: when validation stops improving, a tenth of the learning rate for some more steps, then the end.

"When the loss on validation stops decreasing, we divide the learning rate by 10 for an additional 20-30k steps"
(section 5.1). Here an evaluation counts as better when it is below the best one so far by more than
--plateau-threshold; --plateau-patience evaluations in a row that are not better are a plateau. --lr-decay-iters
is the latest step for it: with a patience that is never reached, that is the fixed relaunch of the published code.
"""

import math
from dataclasses import dataclass
from typing import Self

from megatron_allattn.config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Where a run with --lr-decay-style plateau stands (of other styles: nowhere).

    best: the loss, in nats per token, that the next one has to be below; count: evaluations in a row since then that
    were not better; dropped_at: the last step at the full rate, once it is known.
    """

    best: float | None = None
    count: int = 0
    dropped_at: int | None = None

    def after(self, config: OptimizerConfig, step: int, loss: float | None) -> Self:
        """The state after a step, and after the evaluation that followed it, if there was one (`loss`, in nats).

        Evaluations during the warm-up may be the best one, but do not count towards the patience.
        """
        if config.lr_decay_style != "plateau" or self.dropped_at is not None:
            return self
        best, count = self.best, self.count
        if loss is not None:
            if not math.isnan(loss) and (best is None or loss < best - config.plateau_threshold):
                best, count = loss, 0
            elif step > config.lr_warmup_iters:
                count += 1
        latest = config.lr_decay_iters is not None and step >= config.lr_decay_iters
        reached = latest or count >= config.plateau_patience
        return type(self)(best=best, count=count, dropped_at=step if reached else None)

    def last_step(self, config: OptimizerConfig, train_iters: int) -> int:
        """The step after which the run ends, as far as is known now; --train-iters is never exceeded."""
        if config.lr_decay_style != "plateau" or self.dropped_at is None:  # another style than it was saved with
            return train_iters
        return min(train_iters, self.dropped_at + config.plateau_iters)

    def why_dropped(self, config: OptimizerConfig) -> str:
        """The reason for the decay that `dropped_at` speaks of, in words."""
        if self.count < config.plateau_patience:
            return f"--lr-decay-iters {config.lr_decay_iters}"
        rule = "that is a number" if self.best is None else f"better than {self.best:.4f} nats"
        return f"no evaluation {rule} in {self.count}"

    def why_ended(self, config: OptimizerConfig, train_iters: int) -> str:
        """Why a run that has done its last step is over, in words."""
        if config.lr_decay_style != "plateau":
            return "reached --train-iters"
        if self.dropped_at is None:
            return "reached --train-iters without a plateau: the learning rate was never divided by 10"
        steps = self.last_step(config, train_iters) - self.dropped_at
        if steps < config.plateau_iters:
            return f"reached --train-iters {steps} of --plateau-iters {config.plateau_iters} steps after the plateau"
        return f"reached --plateau-iters {steps} after the plateau of step {self.dropped_at}"
