"""Whether every weight is somewhere: each element of each logical tensor held, updated and given a gradient by exactly
the ranks that the layout says.

What the network consists of is counted from a network that nobody shares; which of it a rank holds is asked of the rank
itself, by having it cut the numbers of a tensor's rows as it cuts the tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_allattn.cluster.rehearsal.mismatch import Mismatch, describe
from megatron_allattn.cluster.rehearsal.roles import Role
from megatron_allattn.config import RunConfig
from megatron_allattn.model.network import Part, logical_tensors
from megatron_allattn.model.parameter_groups import parameter_groups
from megatron_allattn.model.traffic_update import clips_tensors
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.logical import LogicalTensor


@dataclass(frozen=True)
class Owned:
    """What has been found to be owned."""

    tensors: int
    elements: int


def check_ownership(
    run: RunConfig, vocab_size: int, layout: Layout, parts: Sequence[Part], roles: Mapping[tuple[int, int], Role]
) -> Owned:
    """Raises Mismatch with the weight and the ranks where one is not owned as it must be.

    parts: what every stage holds; roles: by place in the tensor group and stage.
    """
    whole = logical_tensors(run.model, vocab_size)
    known = {logical.name for logical in whole}
    held = {}
    for place, role in roles.items():
        _check_rank(run, layout, role)
        held[place] = {logical.name for logical, _ in role.network.logical_parameters()}
        if strange := sorted(held[place] - known):
            raise Mismatch(f"{describe(layout, role.rank)} holds {strange[0]}, which the network does not have")
    for logical in whole:
        stages = _stages(logical, run, parts)
        if not stages or (logical.name.startswith("layers.") and len(stages) > 1):
            raise Mismatch(f"{logical.name}: {len(stages)} of {len(parts)} stages have its layer, and one must")
        for stage in range(layout.pipeline_size):
            shards = [roles[tensor, stage] for tensor in range(layout.tensor_size)]
            holders = [role for tensor, role in enumerate(shards) if logical.name in held[tensor, stage]]
            _check_holders(logical, layout, shards, holders, belongs=stage in stages)
            if holders and logical.shard_dim is not None:
                _check_rows(logical, holders)
    return Owned(len(whole), sum(logical.numel for logical in whole))


def _check_rank(run: RunConfig, layout: Layout, role: Role) -> None:
    """Every weight that a rank holds has its shape, gets a gradient and is in one of the optimizer's groups."""
    who, network = describe(layout, role.rank), role.network
    for logical, parameter in network.logical_parameters():
        expected = logical.local_shape(layout.tensor_size)
        if tuple(parameter.shape) != expected:
            raise Mismatch(f"{who} holds {list(parameter.shape)} of {logical.name}, its part is {list(expected)}")
    for slot, names in role.without_gradient.items():
        rule = "its replicas' averages would not match"
        raise Mismatch(f"{names[0]} gets no gradient on {who} in micro-batch {slot}: {rule}")
    grouped = [
        id(parameter)
        for group in parameter_groups(network, one_tensor_each=clips_tensors(run))
        for parameter in group["params"]
    ]
    for logical, parameter in network.logical_parameters():
        if (count := grouped.count(id(parameter))) != 1:
            raise Mismatch(f"{logical.name} is in {count} groups of the optimizer on {who}: it must be updated once")


def _check_holders(
    logical: LogicalTensor, layout: Layout, shards: Sequence[Role], holders: Sequence[Role], *, belongs: bool
) -> None:
    """All of a stage's shards hold a tensor, or none, as the layout says."""
    if belongs and len(holders) < len(shards):
        lacking = next(role for role in shards if role not in holders)
        raise Mismatch(f"{logical.name}: {describe(layout, lacking.rank)} does not hold it, and its stage should")
    if holders and not belongs:
        raise Mismatch(f"{logical.name}: {describe(layout, holders[0].rank)} holds it, and its stage should not")


def _check_rows(logical: LogicalTensor, holders: Sequence[Role]) -> None:
    """Each row of the dimension that is cut is on one shard; so every rank cuts the rows' numbers, from 1 on."""
    assert logical.shard_dim is not None
    count = logical.shape[logical.shard_dim]
    numbers, logical_rows = torch.arange(1, count + 1), replace(logical, shape=(count,), shard_dim=0)
    rows = torch.cat([role.network.shard(logical_rows, numbers) for role in holders])
    times = rows.bincount(minlength=count + 1)[1:]  # 0 is padding
    if len(wrong := (times != 1).nonzero()):
        row = int(wrong[0])
        ranks = f"ranks {holders[0].rank} to {holders[-1].rank}"
        raise Mismatch(f"{logical.name}: row {row} of {count} is on {int(times[row])} of {ranks}, and must be on one")


def _stages(logical: LogicalTensor, run: RunConfig, parts: Sequence[Part]) -> set[int]:
    """The stages on which the layout has a tensor."""
    kind, _, rest = logical.name.partition(".")
    last, tied = len(parts) - 1, not run.model.untie_embeddings_and_output_weights
    if kind == "layers":
        layer = int(rest.partition(".")[0])
        return {stage for stage, part in enumerate(parts) if layer in part.layers}
    if kind == "embedding":
        return {0, last} if tied else {0}
    return {last} if kind == "output" else set(range(len(parts)))
