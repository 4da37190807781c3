"""All ways to lay a run over N nodes of G devices that its own rules allow.

Enumerated are TP, PP, the ZeRO stage, the micro-batch size, recomputation and, with TP, sequence parallelism and shared
caches; what a flag has fixed stays. Whether a choice is legal is decided by config/rules.py alone, as for a run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from megatron_allattn.config import RunConfig, UsageError
from megatron_allattn.config.rules import check_run, check_world

FLAGS = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "zero_stage": "--zero-stage",
    "sequence_parallel": "--sequence-parallel",
    "shard_caches": "--shard-caches",
    "micro_batch_size": "--micro-batch-size",
    "recompute_granularity": "--recompute-granularity",
}
"""What is chosen, and the flag that fixes it."""


@dataclass(frozen=True)
class Choice:
    """One value for each of `FLAGS`."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    zero_stage: int
    sequence_parallel: bool
    shard_caches: bool
    micro_batch_size: int
    recompute_granularity: str

    def apply(self, run: RunConfig) -> RunConfig:
        """The run with it. Raises UsageError for what the sections refuse."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        parallel = replace(
            run.parallel,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            zero_stage=self.zero_stage,
            sequence_parallel=self.sequence_parallel,
            shard_caches=self.shard_caches,
        )
        training = replace(
            run.training,
            micro_batch_size=self.micro_batch_size,
            recompute_granularity=self.recompute_granularity,  # type: ignore[arg-type]
        )
        return replace(run, parallel=parallel, training=training)

    def flags(self, run: RunConfig) -> list[str]:
        """As pretrain.py takes them, but for what the run has by itself."""
        given = []
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            section = run.parallel if hasattr(run.parallel, name) else run.training
            if value == getattr(section, name):
                continue
            given += (
                [flag if value else flag.replace("--", "--no-", 1)]
                if value in (True, False) and isinstance(value, bool)
                else [flag, str(value)]
            )
        return given


def choices(
    run: RunConfig, nodes: int, gpus_per_node: int, explicit: frozenset[str] = frozenset()
) -> dict[Choice, RunConfig]:
    """Every legal layout of a run over nodes × gpus_per_node processes, by what was chosen for it. Those with tensor
    groups within a node come first.

    explicit: flags that the user gave ("--zero-stage"), whose values stay.
    """
    world_size = nodes * gpus_per_node
    found = {one: _laid(one, run, world_size, explicit) for one in _all(run, world_size, explicit)}
    legal = {one: laid for one, laid in found.items() if laid is not None}
    order = sorted(legal, key=lambda one: gpus_per_node % one.tensor_model_parallel_size != 0)
    return {one: legal[one] for one in order}


def _all(run: RunConfig, world_size: int, explicit: frozenset[str]) -> Iterator[Choice]:
    def fixed(name: str) -> bool:
        return FLAGS[name] in explicit or (name == "zero_stage" and run.parallel.deepspeed_config is not None)

    def of(name: str, values: list) -> list:
        section = run.parallel if hasattr(run.parallel, name) else run.training
        return [getattr(section, name)] if fixed(name) else values

    half = run.training.bf16 or run.training.fp16
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    micro = [
        size for size in range(1, run.training.global_batch_size + 1) if run.training.global_batch_size % size == 0
    ]
    for tensor, pipeline in product(
        of("tensor_model_parallel_size", divisors), of("pipeline_model_parallel_size", divisors)
    ):
        if world_size % (tensor * pipeline) or pipeline > run.model.num_layers:
            continue
        replicas = world_size // (tensor * pipeline)
        # of one replica there is nothing to cut; in half precision stage 0 runs as 1
        stages = [1] if pipeline > 1 else [1, 2, 3]
        stages = [0] if replicas == 1 else stages if half else [0, *stages]
        yes_and_no = [False, True] if tensor > 1 else [False]
        for zero, sequence, share, size, again in product(
            of("zero_stage", stages),
            of("sequence_parallel", yes_and_no),
            of("shard_caches", yes_and_no),
            of("micro_batch_size", micro),
            of("recompute_granularity", ["none", "selective", "full"]),
        ):
            if size is not None:
                yield Choice(tensor, pipeline, zero, sequence, share, size, again)


def _laid(choice: Choice, run: RunConfig, world_size: int, explicit: frozenset[str]) -> RunConfig | None:
    """The run with a choice, None where that is not legal."""
    try:
        laid = choice.apply(run)
        check_run(laid, explicit)
        check_world(laid, world_size)
    except UsageError:
        return None
    eager = laid.training.attention_backend == "eager"
    return None if eager and laid.training.recompute_granularity == "selective" else laid
