"""Each section refuses what breaks its own rules, and says which flag, value and rule."""

from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.config import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    UsageError,
)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (ModelConfig, {"num_layers": 0}, "--num-layers 0: must be at least 1 and at most 2147483647; the default is 4"),
        (ModelConfig, {"num_layers": 2**31}, "--num-layers 2147483648: must be at least 1 and at most 2147483647"),
        (
            TrainingConfig,
            {"micro_batch_size": 0},
            "--micro-batch-size 0: must be at least 1 and at most 2147483647; correct it or leave the flag out",
        ),
        (ModelConfig, {"num_layers": 2.0}, "--num-layers 2.0: must be an integer; the default is 4"),
        (ModelConfig, {"num_layers": True}, "--num-layers True: must be an integer"),
        (ModelConfig, {"num_layers": None}, "--num-layers None: must be an integer"),
        (
            ModelConfig,
            {"hidden_size": 130},
            "--hidden-size 130: must be a multiple of --num-attention-heads 4; the next",
        ),
        (ModelConfig, {"adaptive_span": 1}, "--adaptive-span 1: must be true or false"),
        (ModelConfig, {"span_loss": float("nan")}, "--span-loss nan: must be a finite number"),
        (ModelConfig, {"span_loss": -1e-9}, "--span-loss -1e-09: must be at least 0"),
        (ModelConfig, {"span_ramp": 0}, "--span-ramp 0: must be at least 1"),
        (ModelConfig, {"max_attention_span": 0}, "--max-attention-span 0: must be at least 1"),
        (ModelConfig, {"persistent_memory_size": -1}, "--persistent-memory-size -1: must be at least 0"),
        (ModelConfig, {"attention_dropout": 1.0}, "--attention-dropout 1.0: must be at least 0 and below 1"),
        (ModelConfig, {"embedding_dropout": -0.1}, "--embedding-dropout -0.1: must be at least 0 and below 1"),
        (
            ModelConfig,
            {"attention_dropout": 1e-5},
            "--attention-dropout 1e-05: dropout has a resolution of 1/16384, at which this is 0; "
            "give 0, or at least 1/16384 (6.103515625e-05)",
        ),
        (ModelConfig, {"embedding_dropout": 2**-15}, "--embedding-dropout 3.0517578125e-05: dropout has a resolution"),
        (
            ModelConfig,
            {"attention_dropout": 0.99997},
            "--attention-dropout 0.99997: dropout has a resolution of 1/16384, at which this is 1; "
            "give at most 16383/16384 (0.99993896484375)",
        ),
        (
            ModelConfig,
            {"variant": "transformer", "feed_forward_size": 8, "feed_forward_dropout": 1e-6},
            "--feed-forward-dropout 1e-06: dropout has a resolution of 1/16384",
        ),
        (ModelConfig, {"span_normalization": "none"}, "--span-normalization none: must be one of span, window"),
        (ModelConfig, {"position_values": "both"}, "--position-values both: must be one of none, shared"),
        (
            ModelConfig,
            {"feed_forward_size": 8},
            "--feed-forward-size 8: --variant all-attn has no feed-forward sublayer",
        ),
        (ModelConfig, {"variant": "transformer"}, "--variant transformer: its feed-forward sublayer has no width"),
        (
            ModelConfig,
            {"variant": "transformer", "feed_forward_size": 8, "persistent_memory_size": 1},
            "--persistent-memory-size 1: --variant transformer has a feed-forward sublayer instead",
        ),
        (ParallelConfig, {"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size 0: must be at least 1"),
        (ParallelConfig, {"pipeline_model_parallel_size": 0}, "--pipeline-model-parallel-size 0: must be at least 1"),
        (
            ParallelConfig,
            {"pipeline_model_parallel_size": 2, "zero_stage": 3},
            "--pipeline-model-parallel-size 2: ZeRO 3 cuts gradients",
        ),
        (
            ParallelConfig,
            {"pipeline_model_parallel_size": 2, "pipeline_layers": "2,x"},
            "--pipeline-layers 2,x: its parts must be numbers from 1 on",
        ),
        (
            ParallelConfig,
            {"pipeline_model_parallel_size": 2, "pipeline_layers": "2,0"},
            "--pipeline-layers 2,0: its parts must be numbers from 1 on",
        ),
        (
            ParallelConfig,
            {"pipeline_model_parallel_size": 2, "pipeline_layers": "2"},
            "--pipeline-layers 2: --pipeline-model-parallel-size 2 has 2 stages, it has 1",
        ),
        (ParallelConfig, {"zero_stage": 4}, "--zero-stage 4: must be at least 0 and at most 3"),
        (ParallelConfig, {"distributed_timeout_minutes": 0}, "--distributed-timeout-minutes 0.0: must be above 0"),
        (OptimizerConfig, {"optimizer": "sgd"}, "--optimizer sgd: must be one of adam, adagrad"),
        (OptimizerConfig, {"lr": 0}, "--lr 0.0: must be above 0"),
        (OptimizerConfig, {"lr": float("inf")}, "--lr inf: must be a finite number"),
        (OptimizerConfig, {"lr": 10**400}, "--lr 1000000000"),
        (OptimizerConfig, {"lr": "1e-3"}, "--lr 1e-3: must be a number"),
        (OptimizerConfig, {"lr_warmup_iters": -1}, "--lr-warmup-iters -1: must be at least 0"),
        (OptimizerConfig, {"clip_grad": -1}, "--clip-grad -1.0: must be at least 0"),
        (OptimizerConfig, {"weight_decay": -1}, "--weight-decay -1.0: must be at least 0"),
        (OptimizerConfig, {"adam_beta1": 1}, "--adam-beta1 1.0: must be at least 0 and below 1"),
        (OptimizerConfig, {"adam_beta2": -0.5}, "--adam-beta2 -0.5: must be at least 0 and below 1"),
        (OptimizerConfig, {"adam_eps": 0}, "--adam-eps 0.0: must be above 0"),
        (
            OptimizerConfig,
            {"lr": 1e-4, "min_lr": 1e-3, "lr_decay_style": "cosine"},
            "--min-lr 0.001: must not exceed --lr 0.0001",
        ),
        (DataConfig, {"vocab_size": 0}, "--vocab-size 0: must be at least 1"),
        (
            DataConfig,
            {"tokenizer_type": "bpe"},
            "--tokenizer-type bpe: must be one of byte, char, word, sentencepiece, null",
        ),
        (DataConfig, {"tokenizer_model": ""}, "--tokenizer-model '': must be a path"),
        (TrainingConfig, {"seq_length": 0}, "--seq-length 0: must be at least 1"),
        (TrainingConfig, {"seed": -1}, "--seed -1: must be at least 0"),
        (TrainingConfig, {"bf16": True, "fp16": True}, "--bf16 --fp16: a run has one precision"),
        (
            TrainingConfig,
            {"attention_backend": "flash"},
            "--attention-backend flash: must be one of auto, eager, blocked, triton; the default is auto",
        ),
        (
            TrainingConfig,
            {"global_batch_size": 16, "micro_batch_size": 3},
            "--global-batch-size 16: must be a multiple of --micro-batch-size 3",
        ),
        (TrainingConfig, {"eval_interval": -1}, "--eval-interval -1: must be at least 0"),
        (CheckpointConfig, {"save_interval": -1}, "--save-interval -1: must be at least 0"),
        (LoggingConfig, {"log_interval": 0}, "--log-interval 0: must be at least 1"),
    ],
)
def test_bad_values_are_refused_with_flag_value_and_rule(section: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        section(**values)
    assert str(caught.value).startswith(message)


def test_legal_edges_are_accepted() -> None:
    model = ModelConfig(num_layers=1, persistent_memory_size=0, attention_dropout=0, hidden_size=132)
    assert (model.num_layers, model.persistent_memory_size, model.hidden_size) == (1, 0, 132)
    assert ModelConfig(attention_dropout=2**-14).attention_dropout == 1 / 16384
    assert ModelConfig(attention_dropout=1 - 2**-14, embedding_dropout=2**-15 * 1.01).embedding_dropout > 0
    baseline = ModelConfig(variant="transformer", feed_forward_size=48, persistent_memory_size=0)
    assert (baseline.variant, baseline.feed_forward_size) == ("transformer", 48)
    assert OptimizerConfig(clip_grad=0, adam_beta1=0).clip_grad == 0.0
    assert TrainingConfig(seed=2**63 - 1, micro_batch_size=16).seed == 9223372036854775807


def test_a_constant_rate_does_not_look_at_the_rate_it_never_decays_to() -> None:
    assert OptimizerConfig(lr=1e-5, min_lr=1e-4, lr_decay_style="constant").lr == 1e-5


def test_lossless_conversions_are_made_in_place() -> None:
    optimizer = OptimizerConfig(lr=1)
    assert type(optimizer.lr) is float
    assert optimizer == OptimizerConfig(lr=1.0)
    checkpoint = CheckpointConfig(save="runs/a")  # type: ignore[arg-type]
    assert checkpoint.save == Path("runs/a")


def test_long_and_unprintable_values_make_one_printable_line() -> None:
    with pytest.raises(UsageError) as caught:
        OptimizerConfig(optimizer="\x1b[31madam\n" + "x" * 500)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(r"--optimizer \x1b[31madam xxx")
    assert message.isprintable()
    assert len(message) < 200
