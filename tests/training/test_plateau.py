"""The plateau rule against sequences worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron_allattn.config import OptimizerConfig
from megatron_allattn.training.plateau import Plateau
from megatron_allattn.training.schedules import learning_rate


def config(**settings: Any) -> OptimizerConfig:
    rule = {"plateau_patience": 2, "plateau_threshold": 0.1, "plateau_iters": 30}
    return OptimizerConfig(lr=0.07, lr_decay_style="plateau", **(rule | settings))


def follow(settings: OptimizerConfig, losses: list[float], interval: int = 10) -> list[Plateau]:
    """The state after each evaluation, with `interval` steps between two of them."""
    states, state = [], Plateau()
    for step in range(1, interval * len(losses) + 1):
        state = state.after(settings, step, None if step % interval else losses[step // interval - 1])
        if step % interval == 0:
            states.append(state)
    return states


def test_two_evaluations_that_are_not_better() -> None:
    """2.95 is not below 3.0 - 0.1, 2.8 is; 2.75 and 2.71 are not below 2.8 - 0.1: dropped after step 60."""
    states = follow(config(), [4.0, 3.0, 2.95, 2.8, 2.75, 2.71, 1.0])
    assert [(state.best, state.count, state.dropped_at) for state in states] == [
        (4.0, 0, None),
        (3.0, 0, None),
        (3.0, 1, None),
        (2.8, 0, None),
        (2.8, 1, None),
        (2.8, 2, 60),
        (2.8, 2, 60),  # what comes later changes nothing
    ]
    assert states[-1].why_dropped(config()) == "no evaluation better than 2.8000 nats in 2"


def test_small_improvements_add_up_to_a_better_one() -> None:
    """Each is 0.06 below the one before: every second one is 0.12 below the best."""
    states = follow(config(), [3.0 - 0.06 * n for n in range(9)])
    assert [state.count for state in states] == [0, 1, 0, 1, 0, 1, 0, 1, 0]


def test_exactly_the_threshold_is_not_better() -> None:
    assert [s.count for s in follow(config(plateau_threshold=0.5), [2.0, 1.5, 1.25])] == [0, 1, 0]
    assert [s.count for s in follow(config(plateau_threshold=0.0), [2.0, 2.0])] == [0, 1]


def test_evaluations_during_the_warm_up_do_not_count() -> None:
    """The warm-up ends with step 30; the low value of step 10 stays the best."""
    states = follow(config(lr_warmup_iters=30), [1.0, 2.0, 2.0, 2.0, 2.0])
    assert [(state.best, state.count, state.dropped_at) for state in states] == [
        (1.0, 0, None),
        (1.0, 0, None),
        (1.0, 0, None),
        (1.0, 1, None),
        (1.0, 2, 50),
    ]


def test_a_loss_that_is_not_a_number_is_not_better() -> None:
    states = follow(config(plateau_patience=3), [math.nan, 2.0, math.nan, 1.9, math.nan])
    assert [(state.best, state.count) for state in states] == [(None, 1), (2.0, 0), (2.0, 1), (2.0, 2), (2.0, 3)]
    lost = follow(config(), [math.nan, math.nan])[-1]
    assert (lost.best, lost.dropped_at) == (None, 20)
    assert lost.why_dropped(config()) == "no evaluation that is a number in 2"


def test_the_latest_step_drops_the_rate_of_a_run_that_still_improves() -> None:
    """Step 25 lies between two evaluations: the published code's relaunch at a fixed step."""
    settings = config(lr_decay_iters=25)
    states = follow(settings, [4.0, 3.0, 2.0])
    assert [state.dropped_at for state in states] == [None, None, 25]
    assert states[-1].why_dropped(settings) == "--lr-decay-iters 25"
    assert follow(config(lr_decay_iters=25), [2.0, 2.0, 2.0])[-1].dropped_at == 25  # the patience would be 30
    assert follow(config(lr_decay_iters=35), [2.0, 2.0, 2.0])[-1].dropped_at == 30


def test_a_tenth_of_the_rate_from_the_next_step_to_the_end() -> None:
    settings = config(lr_warmup_iters=4)
    rates = [learning_rate(settings, 1000, step, dropped_at=60) for step in (1, 4, 5, 60, 61, 90)]
    assert rates == [0.07 / 4, 0.07, 0.07, 0.07, 0.07 / 10, 0.07 / 10]
    assert learning_rate(settings, 1000, 500) == 0.07
    dropped = Plateau(best=2.0, count=2, dropped_at=60)
    assert [Plateau().last_step(settings, 1000), dropped.last_step(settings, 1000)] == [1000, 90]
    assert dropped.last_step(settings, 80) == 80
    assert dropped.last_step(replace(settings, lr_decay_style="cosine"), 1000) == 1000  # changed with --override


def test_why_a_run_ended() -> None:
    dropped = Plateau(best=2.0, count=2, dropped_at=60)
    assert dropped.why_ended(config(), 1000) == "reached --plateau-iters 30 after the plateau of step 60"
    assert dropped.why_ended(config(), 80) == "reached --train-iters 20 of --plateau-iters 30 steps after the plateau"
    without = "reached --train-iters without a plateau: the learning rate was never divided by 10"
    assert Plateau().why_ended(config(), 80) == without
    assert Plateau().why_ended(OptimizerConfig(), 80) == "reached --train-iters"


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_other_styles_have_no_plateau(style: Any) -> None:
    settings = OptimizerConfig(lr_decay_style=style, plateau_patience=1, lr_decay_iters=5)
    assert follow(settings, [1.0, 2.0, 3.0])[-1] == Plateau()
