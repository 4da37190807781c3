"""Groups of ranks that are not there: what is written down of each collective, and what they leave in tensors."""

import pytest
import torch
import torch.distributed as dist

from megatron_allattn.parallel.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    gather_shards,
    gather_to_first,
    reduce_scatter,
)
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.silent import Script, silent_groups

LAYOUT = Layout(tensor_size=2, data_size=4)


def test_every_collective_is_written_down_and_leaves_this_ranks_own() -> None:
    script = Script()
    groups = silent_groups(LAYOUT, 5, script)
    tensor = torch.arange(6.0)
    assert all_reduce(tensor.clone(), groups.tensor).equal(tensor)
    all_reduce_max(tensor.clone(), groups.data)
    parts = all_gather(tensor, groups.data)
    assert len(parts) == 4 and all(part.equal(tensor) for part in parts)
    assert reduce_scatter(tensor.clone(), groups.tensor, 0).equal(tensor[:3])
    assert [(one.group, one.operation, one.num_bytes, one.shape, one.dtype) for one in script.calls] == [
        ("tensor", "all_reduce", 24, (6,), "float32"),
        ("data", "all_reduce (max)", 24, (6,), "float32"),
        ("data", "all_gather", 96, (6,), "float32"),
        ("tensor", "reduce_scatter", 24, (3,), "float32"),
    ]


def test_groups_are_those_of_the_layout_and_of_one_rank_none() -> None:
    groups = silent_groups(LAYOUT, 5, Script())
    assert (groups.world.ranks, groups.world.rank) == (tuple(range(8)), 5)
    assert (groups.tensor.ranks, groups.tensor.rank) == ((4, 5), 1)
    assert (groups.data.ranks, groups.data.rank) == ((1, 3, 5, 7), 2)
    assert (groups.pipeline.ranks, groups.pipeline.handle) == ((5,), None)
    assert not dist.is_initialized()


def test_backward_is_written_down_too_on_tensors_without_memory() -> None:
    script = Script()
    group = silent_groups(LAYOUT, 0, script).tensor
    part = torch.empty(2, 3, device="meta", requires_grad=True)
    whole = gather_shards(part, group, dim=1)
    assert whole.shape == (2, 6)
    with script.within(7, "backward"):
        whole.backward(torch.empty_like(whole))
    assert [(one.operation, one.shape, one.place) for one in script.calls] == [
        ("all_gather", (2, 3), ""),
        ("reduce_scatter", (2, 3), "micro-batch 7, backward"),
    ]


def test_an_operation_that_it_does_not_know_is_an_error() -> None:
    group = silent_groups(LAYOUT, 0, Script()).tensor
    with pytest.raises((RuntimeError, ValueError)):
        gather_to_first(torch.zeros(2), group)
    with pytest.raises(RuntimeError):
        dist.all_to_all_single(torch.zeros(2), torch.zeros(2), group=group.handle)
