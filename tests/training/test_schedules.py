"""Learning rates against numbers worked out by hand."""

from typing import Any

import pytest

from megatron_allattn.config import OptimizerConfig, TrainingConfig
from megatron_allattn.training.schedules import learning_rate, schedule_notes


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


WARM = "all 8 steps are warm-up (--lr-warmup-iters {}): the last one has {} of --lr"
NEVER = (
    "the learning rate will not be divided by 10: that takes {} evaluations after the warm-up (--plateau-patience 3), "
    "--train-iters 8 leaves room for {}"
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_warmup_iters": 7}, []),
        ({"lr_warmup_iters": 8}, [WARM.format(8, "100.0%")]),
        ({"lr_warmup_iters": 1000}, [WARM.format("1,000", "0.8%")]),
        ({"lr_decay_style": "plateau"}, []),  # steps 2 (the best), 4, 6, 8
        ({"lr_decay_style": "plateau", "lr_warmup_iters": 1}, []),
        ({"lr_decay_style": "plateau", "lr_warmup_iters": 2}, []),  # the best one may be of the warm-up
        ({"lr_decay_style": "plateau", "lr_warmup_iters": 4}, [NEVER.format(3, 2)]),
        ({"lr_decay_style": "plateau", "lr_warmup_iters": 4, "lr_decay_iters": 7}, []),
        ({"lr_decay_style": "plateau", "lr_decay_iters": 8, "eval_interval": 3}, [NEVER.format(4, 2)]),
        ({"lr_decay_style": "plateau", "lr_warmup_iters": 9}, [WARM.format(9, "88.9%"), NEVER.format(3, 0)]),
    ],
    ids=str,
)
def test_what_a_schedule_is_too_long_for_is_told(settings: dict[str, Any], expected: list[str]) -> None:
    training = TrainingConfig(train_iters=8, eval_interval=settings.pop("eval_interval", 2))
    assert schedule_notes(OptimizerConfig(plateau_patience=3, **settings), training) == expected
