"""Every variant over two and four tensor-parallel ranks: equal to one process, and no more messages than it needs."""

from contextlib import ExitStack
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.parallel.groups import ALONE, Group
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of
from tests.support.variants import STREAMS, VARIANTS, blocks, build, dropout_of, model_of, two_blocks


def everything(variant: str) -> ModelConfig:
    """Dropout of every kind, positions on the value side, empty positions masked."""
    return model_of(variant, position_values="shared", empty_cache="mask", **dropout_of(variant))


@cache
def single(variant: str) -> tuple[Tensor, dict[str, Tensor]]:
    return two_blocks(build(everything(variant), ALONE), dropout=True)


def _sharded(rank: int, world_size: int, config: ModelConfig, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    return two_blocks(build(config, groups_of(world_size, 1).tensor, backend), dropout=True)


@pytest.mark.parametrize(("size", "backend"), [(2, "eager"), (4, "blocked")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradients_equal_those_of_one_process(
    variant: str, size: int, backend: str, pools: WorkerPools
) -> None:
    expected, gradients = single(variant)
    # replicated tensors are compared on each rank
    for losses, found in pools(size).run(_sharded, everything(variant), backend):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_dropout_acts(variant: str) -> None:
    """So that equal losses above mean equal masks."""
    plain, _ = two_blocks(build(model_of(variant), ALONE), dropout=True)
    for rate in dropout_of(variant):
        losses, _ = two_blocks(build(model_of(variant, **{rate: 0.3}), ALONE), dropout=True)
        assert (losses - plain).abs().max() > 1e-3, rate


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
PER_LAYER = {  # forward and backward: all-reduces, all-gathers, reduce-scatters
    "all-attn": ((1, 0, 0), (1, 0, 0)),
    "attn-split": ((1, 0, 0), (1, 0, 0)),
    "head-split": ((1, 0, 0), (1, 0, 0)),
    "no-persistent": ((1, 0, 0), (1, 0, 0)),
    # queries out and outputs back, and per query one number for the softmax in backward, two forward
    "single-head": ((1, 2, 1), (2, 1, 1)),
    "ff-attn": ((2, 1, 0), (3, 0, 0)),
    "transformer": ((2, 0, 0), (2, 0, 0)),
}


def _count(rank: int, world_size: int, config: ModelConfig) -> tuple[list[int], list[int]]:
    """How often each collective is called in one forward and in one backward pass."""
    network = build(config, groups_of(world_size, 1).tensor)
    slot = CacheSlot(range(config.num_layers), len(STREAMS), config.hidden_size, torch.float64, torch.device("cpu"))
    context = BlockContext(windows=(6,) * config.num_layers, cache=slot, dropout_keys=None)
    with ExitStack() as stack:
        counted = [stack.enter_context(patch.object(dist, name, wraps=getattr(dist, name))) for name in COLLECTIVES]
        loss = network(blocks()[0][0], context, blocks()[0][1]).mean()
        forward = [function.call_count for function in counted]
        loss.backward()
        return forward, [function.call_count - before for function, before in zip(counted, forward, strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_collectives_per_layer_and_direction(variant: str, pools: WorkerPools) -> None:
    one, three = (pools(2).run(_count, model_of(variant, num_layers=layers))[0] for layers in (1, 3))
    for direction, expected in enumerate(PER_LAYER[variant]):
        extra = [more - fewer for more, fewer in zip(three[direction], one[direction], strict=True)]
        assert extra == [2 * number for number in expected], ("forward", "backward")[direction]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_of_every_layout_join_to_the_same_initial_weights(variant: str, size: int) -> None:
    whole = {logical.name: parameter for logical, parameter in build(model_of(variant), ALONE).logical_parameters()}
    groups = [Group(ranks=tuple(range(size)), rank=rank, handle=None) for rank in range(size)]
    networks = [build(model_of(variant), group) for group in groups]
    for parts in zip(*(network.logical_parameters() for network in networks), strict=True):
        logical = parts[0][0]
        assert torch.equal(logical.join([parameter.detach() for _, parameter in parts]), whole[logical.name])
