"""Learning rates against numbers worked out by hand."""

import pytest

from megatron_allattn.config import OptimizerConfig
from megatron_allattn.training.schedules import learning_rate


def rates(steps: list[int], train_iters: int = 10, **settings: object) -> list[float]:
    config = OptimizerConfig(**settings)  # type: ignore[arg-type]
    return [learning_rate(config, train_iters, step) for step in steps]


def test_constant_after_a_linear_warm_up() -> None:
    found = rates([1, 2, 4, 7, 8, 9, 10, 1000], lr=0.4, lr_warmup_iters=8)
    assert found == pytest.approx([0.05, 0.1, 0.2, 0.35, 0.4, 0.4, 0.4, 0.4], rel=1e-15)
    assert rates([1, 2], lr=0.07) == [0.07, 0.07]


def test_linear_decay_begins_where_the_warm_up_ends() -> None:
    steps = [1, 2, 4, 6, 8, 10, 11, 50]
    found = rates(steps, lr=1.0, min_lr=0.2, lr_decay_style="linear", lr_warmup_iters=2)
    assert found == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2], rel=1e-15)


def test_cosine_decay_ends_at_its_own_step() -> None:
    """cos of 0, 60, 90, 120 and 180 degrees is 1, 1/2, 0, -1/2 and -1."""
    steps = [2, 4, 5, 6, 8, 9, 10]
    found = rates(steps, lr=1.0, min_lr=0.1, lr_decay_style="cosine", lr_warmup_iters=2, lr_decay_iters=8)
    assert found == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1], rel=1e-14)


def test_the_last_step_of_a_run_has_the_smallest_rate() -> None:
    assert rates([4, 8], train_iters=8, lr=1.0, lr_decay_style="linear") == [0.5, 0.0]
