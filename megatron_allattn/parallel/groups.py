"""The process groups of a run. The only place that makes them, so that each one gets the run's time-out.

`torch.distributed.new_group` ignores the default group's time-out (30 minutes otherwise), so it is passed explicitly.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_allattn.parallel.layout import Layout


@dataclass(frozen=True)
class Group:
    """A set of ranks that talk to each other; `handle` is None for a single rank (every collective is then a no-op)."""

    ranks: tuple[int, ...]
    rank: int  # position of this process in `ranks`
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


ALONE = Group(ranks=(0,), rank=0, handle=None)


@dataclass(frozen=True)
class Groups:
    """The groups this process belongs to.

    `world` spans all ranks, `tensor` the shards, `data` the replicas, `pipeline` the stages; `ends` is the first and
    the last stage, which may share a table of the vocabulary (this rank alone on a stage between them). `saving` has
    all ranks again, for tensors in host memory and for another thread than that of the others.
    """

    layout: Layout
    rank: int
    world: Group
    tensor: Group
    data: Group
    pipeline: Group = ALONE
    ends: Group = ALONE
    saving: Group = ALONE


def single_process_groups() -> Groups:
    """Groups of a process that runs alone; needs no initialized `torch.distributed`."""
    return Groups(layout=Layout(), rank=0, world=ALONE, tensor=ALONE, data=ALONE)


def close_groups() -> None:
    """Leave all process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_groups(
    layout: Layout, timeout: timedelta, saving_timeout: timedelta | None = None, backend: str | None = None
) -> Groups:
    """Make every process group of `layout`. Collective: all ranks of the initialized default group call it together.

    saving_timeout: of the group `saving`, if it is another; backend: of the other groups, if not the default group's.

    Raises ValueError when the default group's size is not the layout's.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size != layout.world_size:
        raise ValueError(f"world size {world_size}: the layout {layout} needs {layout.world_size} ranks")
    everyone = [list(range(world_size))]
    world = _join(everyone, rank, timeout, backend)
    return Groups(
        layout=layout,
        rank=rank,
        world=world,
        saving=_join(everyone, rank, saving_timeout or timeout, "gloo"),
        tensor=_join(_distinct(layout.tensor_group, world_size), rank, timeout, backend),
        data=_join(_distinct(layout.data_group, world_size), rank, timeout, backend),
        **(_pipeline_groups(layout, rank, timeout, backend) if layout.pipeline_size > 1 else {}),
    )


def _pipeline_groups(layout: Layout, rank: int, timeout: timedelta, backend: str | None) -> dict[str, Group]:
    pipelines = _distinct(layout.pipeline_group, layout.world_size)
    ends = _distinct(layout.ends_group, layout.world_size)
    return {"pipeline": _join(pipelines, rank, timeout, backend), "ends": _join(ends, rank, timeout, backend)}


def _distinct(group_of, world_size: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for rank in range(world_size):
        if (ranks := group_of(rank)) not in groups:
            groups.append(ranks)
    return groups


def _join(partition: list[list[int]], rank: int, timeout: timedelta, backend: str | None = None) -> Group:
    """Make one process group per set of the partition (every rank must take part in each) and return this rank's."""
    mine = None
    for ranks in partition:
        handle = dist.new_group(ranks, timeout=timeout, backend=backend)
        if rank in ranks:
            mine = Group(ranks=tuple(ranks), rank=ranks.index(rank), handle=handle)
    assert mine is not None, f"rank {rank} is in no set of {partition}"
    return mine


def limit_waiting(seconds: float, groups: Groups) -> None:
    """Give every process group of this process this time-out, also those that a library has made without one; not
    `saving`, which has its own."""
    for group in list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []:
        if group is not groups.saving.handle:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
