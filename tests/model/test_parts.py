"""The small modules of a layer, by hand: persistent vectors, positions, feed-forward, AddNorm."""

import math

import torch

from megatron_allattn.config import ModelConfig
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.block import AddNorm
from megatron_allattn.model.persistent import PersistentMemory, attend_to_memory
from megatron_allattn.model.position import PositionEmbedding
from megatron_allattn.model.variants import FeedForward, SoftmaxFeedForward
from megatron_allattn.parallel.groups import ALONE
from megatron_allattn.parallel.residual import Residual


def sizes(variant: str, hidden_size: int, feed_forward_size: int) -> ModelConfig:
    return ModelConfig(
        variant=variant,
        hidden_size=hidden_size,
        num_attention_heads=1,
        persistent_memory_size=0,
        feed_forward_size=feed_forward_size,
    )


def test_persistent_vectors_are_scaled_when_used() -> None:
    memory = PersistentMemory("p", num_heads=2, width=4, size=9, group=ALONE)
    memory.key.data.fill_(0.5)
    memory.value.data.fill_(-1.5)
    key, value = memory()
    assert torch.equal(key, torch.full((2, 4, 9), 1.0))  # · √4
    assert torch.equal(value, torch.full((2, 9, 4), -4.5))  # · √9
    (key.sum() + value.sum()).backward()
    assert torch.equal(memory.key.grad, torch.full((2, 4, 9), 2.0))
    assert torch.equal(memory.value.grad, torch.full((2, 9, 4), 3.0))


def test_attention_to_persistent_vectors_by_hand() -> None:
    memory = PersistentMemory("p", num_heads=2, width=1, size=4, group=ALONE)
    memory.key.data.copy_(torch.tensor([[[0.0, 0.0, 0.0, math.log(3.0)]], [[0.0, 0.0, 0.0, 0.0]]]))
    memory.value.data.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 2.0, 2.0]).view(2, 4, 1))
    query = torch.tensor([[[1.0, 7.0]]])  # one stream, one token, a number for each head
    # first head: 1, 1, 1, 3 of 6, on values 2, 4, 6, 8; second: a quarter of each on 0, 0, 4, 4
    found = attend_to_memory(memory, query, dropout=lambda a: a)
    torch.testing.assert_close(found, torch.tensor([[[6.0, 2.0]]]))
    kept = torch.tensor([1.0, 0.0, 0.0, 1.0])
    torch.testing.assert_close(attend_to_memory(memory, query, lambda a: a * kept), torch.tensor([[[26 / 6, 1.0]]]))


def test_softmax_feed_forward_by_hand() -> None:
    layer = SoftmaxFeedForward(sizes("ff-attn", hidden_size=2, feed_forward_size=4), layer=0, residual=Residual(ALONE))
    layer.persistent.key.data.zero_()
    layer.persistent.key.data[0, :, 3] = torch.tensor([0.0, math.log(3.0)])  # V's last row
    layer.persistent.value.data.copy_(torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 6.0]]]))
    # softmax of (0, 0, 0, ln 3) is 1, 1, 1, 3 of 6; the columns of U are √4 times the stored ones
    found = layer(torch.tensor([[[5.0, 1.0]]]), None)
    torch.testing.assert_close(found, torch.tensor([[[6.0, 6.0]]]))


def test_the_position_table_is_handed_on_as_a_copy() -> None:
    position = PositionEmbedding("position", head_size=3, max_span=5, group=ALONE)
    position.key.data.normal_()
    table = position()
    assert torch.equal(table, position.key) and table.data_ptr() != position.key.data_ptr()
    table.sum().backward()
    assert torch.equal(position.key.grad, torch.ones(1, 3, 5))


def test_feed_forward_by_hand() -> None:
    layer = FeedForward(sizes("transformer", hidden_size=2, feed_forward_size=3), layer=0, residual=Residual(ALONE))
    layer.inner.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    layer.inner.bias.data.copy_(torch.tensor([0.0, 1.0, -10.0]))
    layer.outer.weight.data.copy_(torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 7.0]]))
    layer.outer.bias.data.copy_(torch.tensor([100.0, 200.0]))
    # inner: (2, 4, -5) → ReLU (2, 4, 0) → outer (2 + 8, -2 + 2) + bias
    assert layer(torch.tensor([2.0, 3.0]), None).tolist() == [110.0, 200.0]


def test_add_norm_by_hand() -> None:
    norm = AddNorm("norm", 4, FusedOps("torch"), eps=0.0)
    norm.weight.data.copy_(torch.tensor([1.0, 1.0, 2.0, 1.0]))
    norm.bias.data.copy_(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    found = norm(
        torch.tensor([0.0, 1.0, 2.0, -3.0]), torch.tensor([1.0, -2.0, -1.0, 2.0])
    )  # 1, -1, 1, -1: mean 0, variance 1
    assert found.tolist() == [1.0, -1.0, 2.0, 4.0]
