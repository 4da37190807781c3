"""Column- and row-parallel layers against one plain matrix product, and how often layers talk."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.collectives import copy_to_shards
from megatron_allattn.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_allattn.parallel.logical import Init, logical_of
from megatron_allattn.parallel.residual import Residual
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of

IN, MIDDLE, OUT = 6, 8, 5
INIT = Init("uniform", 0.5)


def _names() -> dict[str, tuple[int, ...]]:
    return {"a.weight": (MIDDLE, IN), "a.bias": (MIDDLE,), "b.weight": (OUT, MIDDLE), "b.bias": (OUT,)}


def _pair(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """b(tanh(a(x))) with a cut over columns and b over rows: output, gradients of x and of every weight, joined."""
    group = groups_of(world_size, 1).tensor
    a = ColumnParallelLinear("a", IN, MIDDLE, group, INIT, bias=True).double()
    b = RowParallelLinear("b", MIDDLE, OUT, Residual(group), INIT, bias=True).double()
    parameters = [*a.parameters(), *b.parameters()]
    for parameter in parameters:
        logical = logical_of(parameter)
        full = INIT.draw(1, logical.name, logical.shape).double()
        parameter.data.copy_(logical.shard(full, group.rank, group.size))
    x = INIT.draw(1, "x", (2, 3, IN)).double().requires_grad_()
    y = b(torch.tanh(a(copy_to_shards(x, group))))
    y.square().sum().backward()
    result = {"y": y.detach(), "x": x.grad}
    for parameter in parameters:
        shards = [torch.empty_like(parameter.grad) for _ in range(world_size)]
        dist.all_gather(shards, parameter.grad.contiguous(), group=group.handle)
        result[logical_of(parameter).name] = logical_of(parameter).join(shards)
    return result


@pytest.mark.parametrize("size", [2, 4])
def test_a_column_and_row_pair_equals_the_plain_products(pools: WorkerPools, size: int) -> None:
    weights = {name: INIT.draw(1, name, shape).double().requires_grad_() for name, shape in _names().items()}
    x = INIT.draw(1, "x", (2, 3, IN)).double().requires_grad_()
    y = F.linear(
        torch.tanh(F.linear(x, weights["a.weight"], weights["a.bias"])), weights["b.weight"], weights["b.bias"]
    )
    y.square().sum().backward()
    expected = {"y": y.detach(), "x": x.grad, **{name: weight.grad for name, weight in weights.items()}}
    for found in pools(size).run(_pair):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-13, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}"
            )


def _count(rank: int, world_size: int, num_layers: int, feed_forward_size: int) -> tuple[int, int]:
    """All-reduces of one forward and of one backward pass of a network."""
    config = ModelConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=2,
        persistent_memory_size=0 if feed_forward_size else 4,
        max_attention_span=6,
        span_ramp=2,
        variant="transformer" if feed_forward_size else "all-attn",
        feed_forward_size=feed_forward_size,
    )
    network = Network(config, 11, groups_of(2, 1).tensor, FusedOps("torch"))
    initialize(network, 1)
    slot = CacheSlot(range(num_layers), 2, 8, torch.float32, torch.device("cpu"))
    context = BlockContext(windows=(6,) * num_layers, cache=slot, dropout_keys=None)
    tokens = torch.arange(8).view(2, 4)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        loss = network(tokens, context, tokens + 1).mean()
        forward = counted.call_count
        loss.backward()
        return forward, counted.call_count - forward


@pytest.mark.parametrize(("feed_forward_size", "per_layer"), [(0, 1), (16, 2)], ids=["all-attention", "transformer"])
def test_all_reduces_per_layer_and_direction(pools: WorkerPools, feed_forward_size: int, per_layer: int) -> None:
    """Outside the layers: the embedding's one and the cross-entropy's two forward, and backward those of the output
    layer's input and of the shared position table."""
    for num_layers in (1, 2, 5):
        counts = pools(2).run(_count, num_layers, feed_forward_size)
        assert counts == [(3 + num_layers * per_layer, 2 + num_layers * per_layer)] * 2
