"""The small modules of a layer, by hand: persistent vectors, positions, feed-forward, LayerNorm."""

import torch

from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.block import LayerNorm
from megatron_allattn.model.persistent import PersistentMemory
from megatron_allattn.model.position import PositionEmbedding
from megatron_allattn.model.variants import FeedForward
from megatron_allattn.parallel.groups import ALONE


def test_persistent_vectors_are_scaled_when_used() -> None:
    memory = PersistentMemory("p", num_heads=2, head_size=4, size=9, group=ALONE)
    memory.key.data.fill_(0.5)
    memory.value.data.fill_(-1.5)
    key, value = memory()
    assert torch.equal(key, torch.full((2, 4, 9), 1.0))  # · √4
    assert torch.equal(value, torch.full((2, 9, 4), -4.5))  # · √9
    (key.sum() + value.sum()).backward()
    assert torch.equal(memory.key.grad, torch.full((2, 4, 9), 2.0))
    assert torch.equal(memory.value.grad, torch.full((2, 9, 4), 3.0))


def test_the_position_table_is_handed_on_as_a_copy() -> None:
    position = PositionEmbedding("position", head_size=3, max_span=5, group=ALONE)
    position.key.data.normal_()
    table = position()
    assert torch.equal(table, position.key) and table.data_ptr() != position.key.data_ptr()
    table.sum().backward()
    assert torch.equal(position.key.grad, torch.ones(1, 3, 5))


def test_feed_forward_by_hand() -> None:
    layer = FeedForward("ff", hidden_size=2, size=3, group=ALONE)
    layer.inner.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    layer.inner.bias.data.copy_(torch.tensor([0.0, 1.0, -10.0]))
    layer.outer.weight.data.copy_(torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 7.0]]))
    layer.outer.bias.data.copy_(torch.tensor([100.0, 200.0]))
    # inner: (2, 4, -5) → ReLU (2, 4, 0) → outer (2 + 8, -2 + 2) + bias
    assert layer(torch.tensor([2.0, 3.0])).tolist() == [110.0, 200.0]


def test_layer_norm_by_hand() -> None:
    norm = LayerNorm("norm", 4, FusedOps("torch"), eps=0.0)
    norm.weight.data.copy_(torch.tensor([1.0, 1.0, 2.0, 1.0]))
    norm.bias.data.copy_(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    found = norm(torch.tensor([1.0, -1.0, 1.0, -1.0]))  # mean 0, variance 1 already
    assert found.tolist() == [1.0, -1.0, 2.0, 4.0]
