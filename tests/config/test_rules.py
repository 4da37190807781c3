"""Rules between sections, and between the configuration and the number of processes."""

import dataclasses
from typing import Any

import pytest

from megatron_allattn.config import (
    BatchShape,
    RunConfig,
    UsageError,
    batch_shape,
    check_run,
    check_world,
)
from megatron_allattn.config.run import SECTIONS


def run(**values: Any) -> RunConfig:
    """A configuration from flat field names."""
    sections = {
        name: section(**{f.name: values.pop(f.name) for f in dataclasses.fields(section) if f.name in values})
        for name, section in SECTIONS.items()
    }
    assert not values, f"unknown fields {values}"
    return RunConfig(**sections)


@pytest.mark.parametrize(
    ("values", "explicit", "message"),
    [
        ({"adaptive_span": False}, "--span-loss", "--span-loss 1e-06: has no effect with --no-adaptive-span"),
        ({"adaptive_span": False}, "--span-ramp", "--span-ramp 32: has no effect with --no-adaptive-span"),
        (
            {"adaptive_span": False},
            "--span-normalization",
            "--span-normalization span: has no effect with --no-adaptive-span: the span is fixed",
        ),
        ({"optimizer": "adagrad"}, "--adam-beta1", "--adam-beta1 0.9: has no effect with --optimizer adagrad"),
        ({"optimizer": "adagrad"}, "--adam-beta2", "--adam-beta2 0.999: has no effect with --optimizer adagrad"),
        ({"optimizer": "adagrad"}, "--adam-eps", "--adam-eps 1e-08: has no effect with --optimizer adagrad"),
        ({"min_lr": 1e-5}, "--min-lr", "--min-lr 1e-05: has no effect with --lr-decay-style constant"),
        ({"lr_decay_iters": 9}, "--lr-decay-iters", "--lr-decay-iters 9: has no effect with --lr-decay-style constant"),
        (
            {"min_lr": 1e-5, "lr_decay_style": "plateau", "eval_interval": 5},
            "--min-lr",
            "--min-lr 1e-05: has no effect with --lr-decay-style plateau: the rate ends at a tenth of --lr",
        ),
        (
            {"lr_decay_iters": 80, "train_iters": 80, "lr_decay_style": "plateau", "eval_interval": 5},
            "--lr-decay-iters",
            "--lr-decay-iters 80: has no effect: the run ends before the rate drops; give a step below --train-iters",
        ),
        ({"plateau_patience": 3}, "--plateau-patience", "--plateau-patience 3: has no effect without --lr-decay-style"),
        ({"plateau_threshold": 0.0}, "--plateau-threshold", "--plateau-threshold 0.0: has no effect without --lr-"),
        (
            {"plateau_iters": 9, "lr_decay_style": "cosine"},
            "--plateau-iters",
            "--plateau-iters 9: has no effect without --lr-decay-style plateau; leave it out or add that",
        ),
        ({}, "--adaptive-div-value", "--adaptive-div-value 4: has no effect without --adaptive-cutoffs"),
        (
            {"recompute_granularity": "selective", "attention_backend": "eager"},
            "--recompute-granularity",
            "--recompute-granularity selective: has no effect with --attention-backend eager, which keeps",
        ),
        (
            {"adaptive_span": False, "tensor_model_parallel_size": 2, "balance_heads": True},
            "--balance-heads",
            "--balance-heads True: has no effect where every head costs the same: with --no-adaptive-span or",
        ),
        (
            {"span_normalization": "window", "tensor_model_parallel_size": 2, "balance_heads": True},
            "--balance-heads",
            "--balance-heads True: has no effect where every head costs the same: with --no-adaptive-span or",
        ),
        (
            {"attention_backend": "eager", "tensor_model_parallel_size": 2, "balance_heads": True},
            "--balance-heads",
            "--balance-heads True: has no effect with --attention-backend eager, for which every head costs",
        ),
        ({"save_interval": 5}, "--save-interval", "--save-interval 5: has no effect without --save"),
    ],
)
def test_a_given_flag_without_effect_is_refused_a_recipes_value_is_not(
    values: dict[str, Any], explicit: str, message: str
) -> None:
    config = run(**values)
    check_run(config, frozenset({"--lr"}))
    with pytest.raises(UsageError) as caught:
        check_run(config, frozenset({"--lr", explicit}))
    assert str(caught.value).startswith(message)


def test_the_same_flags_are_accepted_where_they_act() -> None:
    flags = {
        "--span-loss",
        "--span-ramp",
        "--span-normalization",
        "--adam-beta1",
        "--adam-eps",
        "--min-lr",
        "--lr-decay-iters",
    }
    config = run(lr_decay_style="linear", min_lr=1e-5, lr_decay_iters=50, save="d", save_interval=5)
    check_run(config, frozenset(flags | {"--save-interval"}))


def test_heads_that_are_read_side_by_side_are_not_balanced() -> None:
    """Whether a recipe says so or the command line."""
    values = {"tensor_model_parallel_size": 2, "balance_heads": True}
    check_run(run(variant="head-split", **values), frozenset({"--balance-heads"}))
    with pytest.raises(UsageError, match=r"^--balance-heads True: the persistent vectors of --variant single-head"):
        check_run(run(variant="single-head", **values), frozenset())


def test_a_plateau_is_seen_by_evaluations() -> None:
    flags = frozenset({"--plateau-patience", "--plateau-threshold", "--plateau-iters", "--lr-decay-iters"})
    check_run(run(lr_decay_style="plateau", eval_interval=5, lr_decay_iters=70, train_iters=80), flags)
    with pytest.raises(UsageError) as caught:
        check_run(run(lr_decay_style="plateau"), frozenset())
    assert str(caught.value) == (
        "--lr-decay-style plateau: follows the evaluations on the validation split, and --eval-interval is 0; "
        "add --eval-interval or choose another style"
    )


def test_a_plateau_may_come_at_any_time_after_the_warm_up() -> None:
    """Without a latest step the warm-up may be longer than the run, as with a constant rate."""
    check_run(run(lr_decay_style="plateau", eval_interval=5, lr_warmup_iters=50, train_iters=30), frozenset())
    with pytest.raises(UsageError, match=r"^--lr-warmup-iters 50: must be below the 50 steps after which the plateau"):
        check_run(run(lr_decay_style="plateau", eval_interval=5, lr_warmup_iters=50, lr_decay_iters=50), frozenset())


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_a_decay_must_have_room_after_the_warm_up(style: str) -> None:
    check_run(run(lr_decay_style=style, lr_warmup_iters=99, train_iters=100), frozenset())
    with pytest.raises(
        UsageError, match=f"^--lr-warmup-iters 100: must be below the 100 steps after which the {style}"
    ):
        check_run(run(lr_decay_style=style, lr_warmup_iters=100, train_iters=100), frozenset())
    with pytest.raises(UsageError, match=r"^--lr-warmup-iters 60: must be below the 50 steps"):
        check_run(run(lr_decay_style=style, lr_warmup_iters=60, lr_decay_iters=50, train_iters=100), frozenset())


def test_a_constant_rate_may_warm_up_longer_than_the_run() -> None:
    check_run(run(optimizer="adagrad", lr_warmup_iters=50, train_iters=30), frozenset({"--lr-warmup-iters"}))


@pytest.mark.parametrize(
    ("values", "world_size", "expected"),
    [
        ({}, 1, (1, 16, 1)),
        ({}, 4, (4, 4, 1)),
        ({"tensor_model_parallel_size": 2}, 4, (2, 8, 1)),
        ({"micro_batch_size": 2}, 4, (4, 2, 2)),
        ({"micro_batch_size": 1, "tensor_model_parallel_size": 4}, 4, (1, 1, 16)),
        ({"global_batch_size": 64, "micro_batch_size": 8, "tensor_model_parallel_size": 2}, 8, (4, 8, 2)),
    ],
)
def test_batch_shape_covers_the_global_batch(
    values: dict[str, Any], world_size: int, expected: tuple[int, int, int]
) -> None:
    config = run(**values)
    check_world(config, world_size)
    shape = batch_shape(config, world_size)
    assert dataclasses.astuple(shape) == expected
    assert shape == BatchShape(
        data_parallel_size=expected[0], micro_batch_size=expected[1], accumulation_steps=expected[2]
    )
    assert expected[0] * expected[1] * expected[2] == config.training.global_batch_size


@pytest.mark.parametrize(
    ("values", "world_size", "message"),
    [
        (
            {"tensor_model_parallel_size": 3},
            3,
            "--tensor-model-parallel-size 3: must divide --num-attention-heads 4; possible are 1, 2, 4",
        ),
        (
            {"tensor_model_parallel_size": 4},
            6,
            "--tensor-model-parallel-size 4: 6 processes do not form replicas of 4; start 4 processes or a multiple",
        ),
        (
            {"tensor_model_parallel_size": 2},
            1,
            "--tensor-model-parallel-size 2: 1 process does not form a replica of 2 processes; start 2 processes",
        ),
        (
            {"pipeline_model_parallel_size": 2},
            3,
            "--pipeline-model-parallel-size 2: 3 processes do not form replicas of 2; start 2 processes or a multiple "
            "of it, or change the size",
        ),
        (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            2,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2: 2 processes do not form replicas of 4; "
            "start 4 processes or a multiple of it, or change the sizes",
        ),
        (
            {"tensor_model_parallel_size": 4, "num_attention_heads": 4, "sequence_parallel": True, "seq_length": 30},
            4,
            "--seq-length 30: must be a multiple of --tensor-model-parallel-size 4 with --sequence-parallel; "
            "change it or leave --sequence-parallel out",
        ),
        (
            {"global_batch_size": 16},
            3,
            "--global-batch-size 16: must be a multiple of 3 (3 data-parallel replicas); the next one is 18",
        ),
        (
            {"global_batch_size": 16, "micro_batch_size": 8},
            4,
            "--global-batch-size 16: must be a multiple of 32 (4 data-parallel replicas × --micro-batch-size 8); "
            "the next one is 32",
        ),
        (
            {
                "variant": "transformer",
                "feed_forward_size": 50,
                "persistent_memory_size": 0,
                "tensor_model_parallel_size": 4,
            },
            4,
            "--feed-forward-size 50: must be a multiple of --tensor-model-parallel-size 4 with --variant transformer; "
            "the next one is 52",
        ),
        (
            {
                "variant": "ff-attn",
                "feed_forward_size": 50,
                "persistent_memory_size": 0,
                "tensor_model_parallel_size": 4,
            },
            4,
            "--feed-forward-size 50: must be a multiple of --tensor-model-parallel-size 4 with --variant ff-attn; "
            "the next one is 52",
        ),
        (
            {"variant": "single-head", "persistent_memory_size": 9, "tensor_model_parallel_size": 2},
            2,
            "--persistent-memory-size 9: must be a multiple of --tensor-model-parallel-size 2 with --variant "
            "single-head; the next one is 10",
        ),
        (
            {"variant": "head-split", "num_attention_heads": 8, "tensor_model_parallel_size": 8},
            8,
            "--tensor-model-parallel-size 8: must divide half of --num-attention-heads 8 with --variant head-split; "
            "possible are 1, 2, 4",
        ),
    ],
)
def test_what_does_not_divide_over_the_processes_is_refused(
    values: dict[str, Any], world_size: int, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_world(run(**values), world_size)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("variant", ["all-attn", "attn-split", "head-split"])
def test_vectors_of_heads_need_not_divide(variant: str) -> None:
    check_world(run(variant=variant, persistent_memory_size=9, tensor_model_parallel_size=2), 2)
