"""A whole job before it is queued: every rank built, one step of all of them, who owns what, and memory.

Nothing is written, no process is started, no data is read. What would fail or hang is a UsageError in one line.
"""

from dataclasses import dataclass

from megatron_allattn.cluster.rehearsal.memory import Memory, check_memory, find_memory
from megatron_allattn.cluster.rehearsal.ownership import Owned, check_ownership
from megatron_allattn.cluster.rehearsal.replay import Counts, replay
from megatron_allattn.cluster.rehearsal.roles import Role, rehearse_role
from megatron_allattn.config import RECIPES, RunConfig, UsageError, check_vocabulary, check_world, usage_error
from megatron_allattn.engine.deepspeed_engine import check_zero_settings
from megatron_allattn.model.network import Part
from megatron_allattn.model.partition import first_reach, stage_parts
from megatron_allattn.model.span import cache_length, window_of_reach
from megatron_allattn.parallel.layout import Layout


@dataclass(frozen=True)
class Report:
    """What was checked. roles: how many ranks were built, one for every place in the tensor group and stage; ran: how
    many of the `slots` micro-batches of each."""

    layout: Layout
    parts: tuple[Part, ...]
    slots: int
    ran: int
    roles: int
    owned: Owned
    met: Counts
    memory: Memory


def vocabulary_of(run: RunConfig) -> tuple[int, str]:
    """The size of a run's vocabulary, without its data, and who says so. Raises UsageError where nobody does."""
    if run.data.vocab_size is not None:
        return run.data.vocab_size, "--vocab-size"
    if run.recipe in RECIPES:
        return RECIPES[run.recipe].vocab_size, f"of the recipe {run.recipe}"
    rule = "how large the vocabulary is only a recipe says, since no data is read"
    raise UsageError(f"--dry-run: {rule}; add --vocab-size N")


def check_nodes(world_size: int, gpus_per_node: int | None) -> None:
    """Raises UsageError: the processes do not fill their nodes."""
    if gpus_per_node is not None and world_size > gpus_per_node and world_size % gpus_per_node:
        rule = f"{world_size} processes leave the last of {-(-world_size // gpus_per_node)} nodes short"
        fix = f"give --world-size {-(-world_size // gpus_per_node) * gpus_per_node}, or another number for a node"
        raise usage_error("--gpus-per-node", gpus_per_node, rule, fix)


def rehearse(
    run: RunConfig,
    vocab_size: int,
    world_size: int,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
) -> Report:
    """Check a run over `world_size` processes. gpu: of cluster/planning/devices.py, whose memory must suffice.

    Raises UsageError for what would fail or hang: flag, value, rule and way out, or ranks and place.
    """
    check_world(run, world_size)
    check_nodes(world_size, gpus_per_node)
    check_vocabulary(run.model, vocab_size)
    check_zero_settings(run, world_size)
    parallel, model = run.parallel, run.model
    layout = Layout.from_world(world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
    reach = first_reach(model)
    parts = stage_parts(parallel, model, vocab_size, reach, run.training.seq_length)
    memory = find_memory(run, vocab_size, layout, parts, gpu, gpus_per_node or world_size)
    check_memory(memory, layout)
    span = model.max_attention_span
    cached = [cache_length(window_of_reach(max(layer), span), span) for layer in reach]
    roles: dict[tuple[int, int], Role] = {}
    for stage in range(layout.pipeline_size):
        for tensor in range(layout.tensor_size):
            rank = layout.rank(tensor=tensor, pipeline=stage)
            roles[tensor, stage] = rehearse_role(run, vocab_size, layout, rank, parts, cached)
    owned = check_ownership(run, vocab_size, layout, parts, roles)
    calls = {rank: roles[layout.tensor_rank(rank), layout.pipeline_rank(rank)].calls for rank in range(world_size)}
    met = replay(layout, calls)
    first = roles[0, 0]
    return Report(layout, tuple(parts), first.slots, first.ran, len(roles), owned, met, memory)
