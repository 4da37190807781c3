"""Rules that join sections: what contradicts, what would have no effect, and what must divide the world size.

`check_run` looks at the configuration alone, right after parsing; `check_world` also at the number of processes, once
it is known. With W processes, TP × PP of them hold one replica of the model, so DP = W / (TP × PP) replicas share the
batch: global_batch_size = DP × micro_batch_size × accumulation steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_allattn.config.errors import flag, usage_error
from megatron_allattn.config.model import ModelConfig
from megatron_allattn.config.run import ParallelConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How the streams of one step are spread: every number counts streams or processes."""

    data_parallel_size: int
    """Replicas of the model (DP)."""

    micro_batch_size: int
    """Streams of one replica in one forward pass."""

    accumulation_steps: int
    """Forward passes of one replica in one step."""


@dataclass(frozen=True, kw_only=True)
class _NoEffect:
    """A flag that does nothing under a condition."""

    fields: tuple[str, ...]
    condition: Callable[[RunConfig], bool]
    reason: str
    fix: str


_NO_EFFECT = (
    _NoEffect(
        fields=("span_loss", "span_ramp", "span_normalization"),
        condition=lambda run: not run.model.adaptive_span,
        reason="has no effect with --no-adaptive-span: the span is fixed",
        fix="leave one of the two out",
    ),
    _NoEffect(
        fields=("pipeline_partition",),
        condition=lambda run: (
            run.parallel.pipeline_model_parallel_size == 1 or run.parallel.pipeline_layers is not None
        ),
        reason="has no effect without a pipeline, or with --pipeline-layers",
        fix="leave it out",
    ),
    _NoEffect(
        fields=("sequence_parallel", "shard_caches", "balance_heads"),
        condition=lambda run: run.parallel.tensor_model_parallel_size == 1,
        reason="has no effect with --tensor-model-parallel-size 1: there is nothing to share",
        fix="leave it out",
    ),
    _NoEffect(
        fields=("balance_heads",),
        condition=lambda run: not run.model.adaptive_span or run.model.span_normalization == "window",
        reason="has no effect where every head costs the same: with --no-adaptive-span or --span-normalization window",
        fix="leave it out",
    ),
    _NoEffect(
        fields=("balance_heads",),
        condition=lambda run: run.training.attention_backend == "eager",
        reason="has no effect with --attention-backend eager, for which every head costs the same",
        fix="leave it out or choose another backend",
    ),
    _NoEffect(
        fields=("adam_beta1", "adam_beta2", "adam_eps"),
        condition=lambda run: run.optimizer.optimizer != "adam",
        reason="has no effect with --optimizer adagrad",
        fix="leave it out or choose --optimizer adam",
    ),
    _NoEffect(
        fields=("min_lr", "lr_decay_iters"),
        condition=lambda run: run.optimizer.lr_decay_style == "constant",
        reason="has no effect with --lr-decay-style constant",
        fix="leave it out or choose linear or cosine",
    ),
    _NoEffect(
        fields=("min_lr",),
        condition=lambda run: run.optimizer.lr_decay_style == "plateau",
        reason="has no effect with --lr-decay-style plateau: the rate ends at a tenth of --lr",
        fix="leave it out or choose linear or cosine",
    ),
    _NoEffect(
        fields=("lr_decay_iters",),
        condition=lambda run: (
            run.optimizer.lr_decay_style == "plateau"
            and (run.optimizer.lr_decay_iters or 0) >= run.training.train_iters
        ),
        reason="has no effect: the run ends before the rate drops",
        fix="give a step below --train-iters or leave it out",
    ),
    _NoEffect(
        fields=("plateau_patience", "plateau_threshold", "plateau_iters"),
        condition=lambda run: run.optimizer.lr_decay_style != "plateau",
        reason="has no effect without --lr-decay-style plateau",
        fix="leave it out or add that",
    ),
    _NoEffect(
        fields=("adaptive_div_value",),
        condition=lambda run: run.model.adaptive_cutoffs is None,
        reason="has no effect without --adaptive-cutoffs",
        fix="leave it out or add the cut-offs",
    ),
    _NoEffect(
        fields=("recompute_granularity",),
        condition=lambda run: (
            run.training.recompute_granularity == "selective" and run.training.attention_backend == "eager"
        ),
        reason="has no effect with --attention-backend eager, which keeps more than queries, keys and values",
        fix="choose full or another backend",
    ),
    _NoEffect(
        fields=("save_retain_interval",),
        condition=lambda run: run.checkpoint.keep_latest_k == 0,
        reason="has no effect without --keep-latest-k: all checkpoints are kept",
        fix="add that or leave it out",
    ),
    _NoEffect(
        fields=("load_fallback", "override"),
        condition=lambda run: run.checkpoint.load is None,
        reason="has no effect without --load",
        fix="leave it out or give a run folder",
    ),
    _NoEffect(
        fields=("save_interval", "async_save", "keep_latest_k"),
        condition=lambda run: run.checkpoint.save is None,
        reason="has no effect without --save: nothing is saved",
        fix="add --save DIR or leave it out",
    ),
)


def check_run(config: RunConfig, explicit: frozenset[str]) -> None:
    """Checks the rules between sections.

    Args:
        explicit: the flags given on the command line ("--min-lr"); only those are refused for having no effect, a
            recipe's value is not.

    Raises:
        UsageError: two values contradict, or a given flag would be ignored.
    """
    _check_schedule(config)
    _check_stages(config)
    _check_heads(config)
    sections = (config.model, config.parallel, config.optimizer, config.training, config.checkpoint)
    for rule in _NO_EFFECT:
        for name in rule.fields:
            if flag(name) in explicit and rule.condition(config):
                value = next(getattr(section, name) for section in sections if hasattr(section, name))
                raise usage_error(flag(name), value, rule.reason, rule.fix)


def _check_schedule(config: RunConfig) -> None:
    """The decay has room after the warm-up, and a plateau can be seen."""
    optimizer, style = config.optimizer, config.optimizer.lr_decay_style
    if style == "plateau" and not config.training.eval_interval:
        raise usage_error(
            "--lr-decay-style",
            style,
            "follows the evaluations on the validation split, and --eval-interval is 0",
            "add --eval-interval or choose another style",
        )
    end = optimizer.lr_decay_iters or config.training.train_iters
    is_bound = style in ("linear", "cosine") or (style == "plateau" and optimizer.lr_decay_iters is not None)
    if is_bound and optimizer.lr_warmup_iters >= end:
        happens = "starts at the latest" if style == "plateau" else "has ended"
        raise usage_error(
            "--lr-warmup-iters",
            optimizer.lr_warmup_iters,
            f"must be below the {end} steps after which the {style} decay {happens}",
            "shorten the warm-up, raise --train-iters or --lr-decay-iters, or choose --lr-decay-style constant",
        )


def _check_stages(config: RunConfig) -> None:
    """Every pipeline stage has a layer, and every layer a stage."""
    layers, parallel = config.model.num_layers, config.parallel
    if parallel.pipeline_model_parallel_size > layers:
        raise usage_error(
            "--pipeline-model-parallel-size",
            parallel.pipeline_model_parallel_size,
            f"every stage needs a layer, and --num-layers is {layers}",
            f"give at most {layers}",
        )
    if parallel.pipeline_layers is not None and sum(parallel.layers_of_stages) != layers:
        raise usage_error(
            "--pipeline-layers",
            parallel.pipeline_layers,
            f"together they are {sum(parallel.layers_of_stages)} layers, --num-layers is {layers}",
            "give every layer a stage",
        )


def _check_heads(config: RunConfig) -> None:
    """Heads may be dealt in another order only where nothing reads them side by side."""
    if config.parallel.balance_heads and config.model.variant == "single-head":
        raise usage_error(
            "--balance-heads",
            True,
            "the persistent vectors of --variant single-head meet the heads side by side, in their order",
            "leave it out or choose another variant",
        )


def batch_shape(config: RunConfig, world_size: int) -> BatchShape:
    """How the batch is spread over `world_size` processes that `check_world` has accepted."""
    parallel, training = config.parallel, config.training
    data_parallel_size = world_size // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    share = training.global_batch_size // data_parallel_size
    micro_batch_size = training.micro_batch_size or share
    return BatchShape(
        data_parallel_size=data_parallel_size,
        micro_batch_size=micro_batch_size,
        accumulation_steps=share // micro_batch_size,
    )


def check_world(config: RunConfig, world_size: int) -> None:
    """Checks that model and batch divide evenly over `world_size` processes.

    Raises:
        UsageError: the processes do not form whole replicas, or heads, vectors, units or batch do not divide.
    """
    parallel, training = config.parallel, config.training
    check_shards(config.model, parallel.tensor_model_parallel_size)
    check_replicas(parallel, world_size)
    if parallel.sequence_parallel and training.seq_length % parallel.tensor_model_parallel_size:
        raise usage_error(
            "--seq-length",
            training.seq_length,
            f"must be a multiple of --tensor-model-parallel-size {parallel.tensor_model_parallel_size} with "
            "--sequence-parallel",
            "change it or leave --sequence-parallel out",
        )
    data_parallel_size = world_size // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    unit = data_parallel_size * (training.micro_batch_size or 1)
    if training.global_batch_size % unit:
        micro = f" × --micro-batch-size {training.micro_batch_size}" if training.micro_batch_size else ""
        raise usage_error(
            "--global-batch-size",
            training.global_batch_size,
            f"must be a multiple of {unit} ({data_parallel_size} data-parallel replicas{micro})",
            f"the next one is {-(-training.global_batch_size // unit) * unit}",
        )


def check_replicas(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a number of processes that does not form whole replicas."""
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
    }
    replica = math.prod(sizes.values())
    if world_size % replica:
        *others, (last, size) = [(name, size) for name, size in sizes.items() if size > 1]
        raise usage_error(
            " ".join([*(f"{name} {size}" for name, size in others), last]),
            size,
            f"{world_size} process does not form a replica of {replica} processes"
            if world_size == 1
            else f"{world_size} processes do not form replicas of {replica}",
            f"start {replica} processes or a multiple of it, or change {'the sizes' if others else 'the size'}",
        )


def check_shards(model: ModelConfig, tensor_size: int) -> None:
    """Everything that tensor parallelism cuts into equal shards divides: heads, and vectors or units of one set."""
    heads, split = model.num_context_heads, model.variant == "head-split"
    if heads % tensor_size:
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        raise usage_error(
            "--tensor-model-parallel-size",
            tensor_size,
            f"must divide {'half of ' if split else ''}--num-attention-heads {model.num_attention_heads}"
            f"{' with --variant head-split' if split else ''}",
            f"possible are {', '.join(map(str, legal))}",
        )
    for name in ("feed_forward_size", *(("persistent_memory_size",) if model.variant == "single-head" else ())):
        size = getattr(model, name)
        if size % tensor_size:
            raise usage_error(
                flag(name),
                size,
                f"must be a multiple of --tensor-model-parallel-size {tensor_size} with --variant {model.variant}",
                f"the next one is {-(-size // tensor_size) * tensor_size}",
            )


def check_vocabulary(model: ModelConfig, vocab_size: int) -> None:
    """Checks the model against the vocabulary, once the data is open and before anything is built.

    Raises:
        UsageError: a cluster of the adaptive input and softmax would hold no word.
    """
    if model.cutoffs and model.cutoffs[-1] >= vocab_size:
        raise usage_error(
            "--adaptive-cutoffs",
            model.adaptive_cutoffs,
            f"each must be below the vocabulary size {vocab_size}, so that every cluster holds words",
            f"give cut-offs up to {vocab_size - 1}, or leave the flag out",
        )
