"""The learning rate of every step: a function of the step and, for a plateau, of when it was reached."""

import math

from megatron_allattn.config import OptimizerConfig, TrainingConfig


def learning_rate(config: OptimizerConfig, train_iters: int, step: int, dropped_at: int | None = None) -> float:
    """The rate of update number `step` (from 1).

    Linear warm-up to --lr over --lr-warmup-iters steps; then constant, or down to --min-lr along a line or half a
    cosine that ends at --lr-decay-iters (--train-iters if left out) and stays there, or, with a plateau, a tenth of
    --lr in the steps after `dropped_at` (`training.plateau` finds it; None while it is not known).
    """
    if step < config.lr_warmup_iters:
        return config.lr * step / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    if config.lr_decay_style == "plateau":
        return config.lr if dropped_at is None or step <= dropped_at else config.lr / 10
    end = config.lr_decay_iters or train_iters
    done = min(1.0, (step - config.lr_warmup_iters) / (end - config.lr_warmup_iters))
    left = 1.0 - done if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left


def schedule_notes(optimizer: OptimizerConfig, training: TrainingConfig) -> list[str]:
    """What a schedule is too long for: a warm-up, or a plateau, that --train-iters does not leave room for."""
    iters, warmup, interval = training.train_iters, optimizer.lr_warmup_iters, training.eval_interval
    notes = []
    if warmup >= iters:
        share = f"{iters / warmup:.1%} of --lr"
        notes.append(f"all {iters:,} steps are warm-up (--lr-warmup-iters {warmup:,}): the last one has {share}")
    if optimizer.lr_decay_style == "plateau" and (optimizer.lr_decay_iters or iters) >= iters:
        after = iters // interval - min(iters, warmup) // interval
        needed = optimizer.plateau_patience + (0 if warmup >= interval else 1)  # the first one has to be the best
        if after < needed:
            notes.append(
                f"the learning rate will not be divided by 10: that takes {needed} evaluations after the warm-up "
                f"(--plateau-patience {optimizer.plateau_patience}), --train-iters {iters:,} leaves room for {after}"
            )
    return notes
