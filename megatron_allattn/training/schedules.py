"""The learning rate of every step, a function of the step alone."""

import math

from megatron_allattn.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, train_iters: int, step: int) -> float:
    """The rate of update number `step` (from 1).

    Linear warm-up to --lr over --lr-warmup-iters steps; then constant, or down to --min-lr along a line or half a
    cosine that ends at --lr-decay-iters (--train-iters if left out) and stays there.
    """
    if step < config.lr_warmup_iters:
        return config.lr * step / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    end = config.lr_decay_iters or train_iters
    done = min(1.0, (step - config.lr_warmup_iters) / (end - config.lr_warmup_iters))
    left = 1.0 - done if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left
