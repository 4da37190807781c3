"""Whether every rank's part fits into its GPU, and what takes how much of it (cluster/planning/memory.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_allattn.cluster.planning.devices import GB, Device, device_named
from megatron_allattn.cluster.planning.memory import RankMemory, rank_memory
from megatron_allattn.cluster.rehearsal.mismatch import describe
from megatron_allattn.config import RunConfig, UsageError
from megatron_allattn.model.network import Part
from megatron_allattn.model.partition import first_reach
from megatron_allattn.parallel.layout import Layout

USUAL = "a100-80"
"""What memory is counted for where no GPU is named: only the backend of attention depends on it."""


@dataclass(frozen=True)
class StageMemory:
    """Of a stage the rank that needs most, as training starts; longest: what it needs once every head looks back as
    far as it can, equal where spans are fixed."""

    rank: int
    part: Part
    start: RankMemory
    longest: RankMemory


@dataclass(frozen=True)
class Memory:
    """Of all stages; device: whose memory it is held against, None where no GPU is named; unknown: why it cannot be
    predicted, where nothing is held against it: then there are no stages."""

    stages: tuple[StageMemory, ...]
    device: Device | None
    unknown: str = ""


def find_memory(
    run: RunConfig, vocab_size: int, layout: Layout, parts: Sequence[Part], gpu: str | None, processes: int
) -> Memory:
    """Predict it for every stage and replica; shards need the same, since their heads look back equally far.

    processes: on a node, which share its memory where there is no GPU.

    Raises UsageError for a GPU that is not known, or one whose memory nothing can be held against.
    """
    try:
        return _find(run, vocab_size, layout, parts, gpu, processes)
    except UsageError as error:
        if gpu is not None:
            raise
        return Memory((), None, str(error))


def _find(
    run: RunConfig, vocab_size: int, layout: Layout, parts: Sequence[Part], gpu: str | None, processes: int
) -> Memory:
    device, longest = device_named(gpu or USUAL).of_node(processes), run.model.max_attention_span
    farthest = [[longest] * run.model.num_context_heads for _ in range(run.model.num_layers)]

    def needs(rank: int, reach: Sequence[Sequence[int]]) -> RankMemory:
        return rank_memory(run, vocab_size, layout.world_size, rank, reach, device, parts=parts)

    stages = []
    for stage, part in enumerate(parts):
        ranks = [layout.rank(data=data, pipeline=stage) for data in range(layout.data_size)]
        start = {rank: needs(rank, first_reach(run.model)) for rank in ranks}
        most = max(ranks, key=lambda rank: start[rank].total)
        stages.append(StageMemory(most, part, start[most], needs(most, farthest)))
    return Memory(tuple(stages), None if gpu is None else device)


def check_memory(memory: Memory, layout: Layout) -> None:
    """Raises UsageError where a rank does not fit into its GPU as training starts."""
    if memory.device is None:
        return
    there, worst = memory.device.memory_bytes, max(memory.stages, key=lambda stage: stage.start.total)
    if worst.start.total <= there:
        return
    parts = sorted(worst.start.parts.items(), key=lambda part: -part[1])
    largest, size = parts[0]
    who, over = describe(layout, worst.rank), worst.start.total - there
    if size > there:
        rule = f"{who} needs {size / GB:,.1f} GB for {largest} alone, {memory.device.name} has {there / GB:,.1f} GB"
    else:
        shares = ", ".join(f"{name} {value / GB:,.1f}" for name, value in parts if value >= GB // 20)
        rule = f"{who} needs {worst.start.total / GB:,.1f} GB ({shares}), {over / GB:,.1f} GB more than it has"
    raise UsageError(f"--gpu {memory.device.name}: {rule}; {WAYS[largest]}")


WAYS = {
    "weights": "raise --tensor-model-parallel-size or --pipeline-model-parallel-size, or give --zero-stage 3",
    "gradients": "raise --tensor-model-parallel-size or --pipeline-model-parallel-size, or give --zero-stage 2",
    "optimizer": "raise --zero-stage, start more processes, or give --deepspeed-config zero1-offload.json",
    "caches": "give a smaller --global-batch-size or --max-attention-span, start more processes, or share caches by "
    "--tensor-model-parallel-size and --shard-caches",
    "activations": "give a smaller --micro-batch-size, --sequence-parallel or --recompute-granularity full",
    "buffers": "give a DeepSpeed JSON with smaller buckets",
}
"""What makes each part smaller."""
