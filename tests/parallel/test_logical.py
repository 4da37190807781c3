"""Logical tensors: cut, padded and joined."""

import math

import pytest
import torch

from megatron_allattn.parallel.groups import ALONE, Group
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_of, logical_parameter

CONSTANT = Init("constant", 0.0)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_join_to_the_whole(parts: int, dim: int) -> None:
    full = torch.arange(5 * 6).view(5, 6)
    logical = LogicalTensor("x", (5, 6), dim, CONSTANT)
    shards = [logical.shard(full, rank, parts) for rank in range(parts)]
    assert {tuple(shard.shape) for shard in shards} == {logical.local_shape(parts)}
    assert torch.equal(logical.join(shards), full)


def test_a_cut_that_does_not_divide_is_padded_with_zeros() -> None:
    full = torch.arange(1, 6)
    logical = LogicalTensor("vocabulary", (5,), 0, CONSTANT)
    assert [logical.shard(full, rank, 4).tolist() for rank in range(4)] == [[1, 2], [3, 4], [5, 0], [0, 0]]
    assert logical.numel == 5


def test_a_tensor_without_a_cut_is_whole_everywhere() -> None:
    full = torch.arange(6).view(2, 3)
    logical = LogicalTensor("norm", (2, 3), None, CONSTANT)
    assert all(torch.equal(logical.shard(full, rank, 3), full) for rank in range(3))
    assert torch.equal(logical.join([full, full + 1]), full)


def test_a_parameter_knows_what_it_is_and_whether_it_is_cut() -> None:
    pair = Group(ranks=(0, 1), rank=1, handle=None)
    cut, whole = LogicalTensor("w", (4, 3), 0, CONSTANT), LogicalTensor("b", (4,), None, CONSTANT)
    marks = {}
    for logical, group in ((cut, pair), (whole, pair), (cut, ALONE)):
        parameter = logical_parameter(logical, group)
        assert logical_of(parameter) is logical
        marks[logical.name, group.size] = (tuple(parameter.shape), parameter.tensor_model_parallel)
    assert marks == {("w", 2): ((2, 3), True), ("b", 2): ((4,), False), ("w", 1): ((4, 3), False)}


def test_draws_have_their_distribution_and_depend_on_seed_and_name_alone() -> None:
    normal, uniform = Init("normal", 0.5), Init("uniform", 0.3)
    x, y = normal.draw(1, "a", (200, 100)), uniform.draw(1, "a", (200, 100))
    assert abs(x.var().item() / 0.25 - 1) < 5 * math.sqrt(2 / x.numel())
    assert abs(x.mean().item()) < 5 * 0.5 / math.sqrt(x.numel())
    assert abs(y.var().item() / (0.3**2 / 3) - 1) < 5 * math.sqrt(0.8 / y.numel())
    assert -0.3 <= y.min() < -0.2999 and 0.2999 < y.max() <= 0.3
    assert Init("constant", 1.5).draw(1, "a", (2,)).tolist() == [1.5, 1.5]
    assert torch.equal(x, normal.draw(1, "a", (200, 100)))
    for seed, name in ((2, "a"), (1, "b")):
        correlation = (normal.draw(seed, name, (200, 100)) * x).mean().item() / 0.25
        assert abs(correlation) < 5 / math.sqrt(x.numel())
