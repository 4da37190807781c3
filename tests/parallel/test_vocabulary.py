"""Vocabulary-parallel embedding, output and cross-entropy against the plain ones, also where V does not divide."""

import pytest
import torch
import torch.nn.functional as F

from megatron_allattn.parallel.collectives import all_gather
from megatron_allattn.parallel.groups import ALONE, Group
from megatron_allattn.parallel.logical import Init, logical_of
from megatron_allattn.parallel.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelOutput,
    gather_logits,
    vocabulary_parallel_cross_entropy,
    vocabulary_range,
)
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of

HIDDEN = 6
NORMAL = Init("normal", 1.0)


def shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    return {
        "embedding.weight": (vocab_size, HIDDEN),
        "output.weight": (vocab_size, HIDDEN),
        "output.bias": (vocab_size,),
    }


def ids(vocab_size: int, seed: int) -> torch.Tensor:
    """[3, 40] token ids, the first and the last of the vocabulary among them."""
    drawn = torch.randint(vocab_size, (3, 40), generator=torch.Generator().manual_seed(seed))
    drawn[0, :2] = torch.tensor([0, vocab_size - 1])
    return drawn


def _sharded(rank: int, world_size: int, vocab_size: int) -> dict:
    """Token ids → vectors → logits → loss over the shards; gradients joined, and those of padding rows apart."""
    group = groups_of(world_size, 1).tensor
    embedding = VocabularyParallelEmbedding("embedding", vocab_size, HIDDEN, group, NORMAL).double()
    output = VocabularyParallelOutput("output", HIDDEN, vocab_size, group, NORMAL).double()
    parameters = [*embedding.parameters(), *output.parameters()]
    for parameter in parameters:
        logical = logical_of(parameter)
        full = NORMAL.draw(1, logical.name, logical.shape).double()
        parameter.data.copy_(logical.shard(full, group.rank, group.size))
    hidden = embedding(ids(vocab_size, 1))
    hidden.retain_grad()
    logits = output(hidden)
    losses = vocabulary_parallel_cross_entropy(logits, ids(vocab_size, 2), vocab_size, group)
    (losses * _weights()).sum().backward()
    own = vocabulary_range(vocab_size, group)
    result = {
        "hidden": hidden.detach(),
        "hidden gradient": hidden.grad,
        "logits": gather_logits(logits, vocab_size, group),
        "losses": losses.detach(),
        "padding": [parameter.grad[own[1] - own[0] :].abs().sum().item() for parameter in parameters],
        "padding probability": logits.detach().exp()[..., own[1] - own[0] :].sum().item(),
        "rows": len(output.bias),
    }
    for parameter in parameters:
        logical = logical_of(parameter)
        result[logical.name] = logical.join(all_gather(parameter.grad, group))
    return result


def _weights() -> torch.Tensor:
    return torch.linspace(-1, 2, 120, dtype=torch.float64).view(3, 40)


def plain(vocab_size: int) -> dict[str, torch.Tensor]:
    """The same with torch's own embedding, linear layer and cross-entropy."""
    weights = {
        name: NORMAL.draw(1, name, shape).double().requires_grad_() for name, shape in shapes(vocab_size).items()
    }
    hidden = F.embedding(ids(vocab_size, 1), weights["embedding.weight"])
    hidden.retain_grad()
    logits = F.linear(hidden, weights["output.weight"], weights["output.bias"])
    losses = F.cross_entropy(logits.flatten(0, 1), ids(vocab_size, 2).flatten(), reduction="none").view(3, 40)
    (losses * _weights()).sum().backward()
    return {
        "hidden": hidden.detach(),
        "hidden gradient": hidden.grad,
        "logits": logits.detach(),
        "losses": losses.detach(),
        **{name: weight.grad for name, weight in weights.items()},
    }


@pytest.mark.parametrize(("size", "vocab_size"), [(2, 101), (4, 101), (4, 5), (4, 2), (4, 100)])
def test_loss_and_gradients_equal_the_plain_ones(pools: WorkerPools, size: int, vocab_size: int) -> None:
    expected = plain(vocab_size)
    for found in pools(size).run(_sharded, vocab_size):
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-12, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}"
            )
        assert found["padding"] == [0.0, 0.0, 0.0]
        assert found["padding probability"] == 0.0
        assert found["rows"] == -(-vocab_size // size)


def test_one_rank_alone_equals_the_plain_ones_too() -> None:
    targets, expected = ids(101, 2), plain(101)
    logits = expected["logits"].clone().requires_grad_()
    losses = vocabulary_parallel_cross_entropy(logits, targets, 101, ALONE)
    torch.testing.assert_close(losses, expected["losses"], rtol=1e-13, atol=1e-13)
    assert torch.equal(logits, expected["logits"])  # not overwritten by the work on it
    assert torch.autograd.gradcheck(
        lambda part: vocabulary_parallel_cross_entropy(part, targets[:1, :4], 101, ALONE),
        (logits.detach()[:1, :4].requires_grad_(),),
    )


def test_ranges_cover_the_vocabulary_once() -> None:
    for vocab_size, size in ((101, 2), (101, 4), (5, 4), (2, 4), (8, 4)):
        groups = [Group(ranks=tuple(range(size)), rank=rank, handle=None) for rank in range(size)]
        rows = [row for group in groups for row in range(*vocabulary_range(vocab_size, group))]
        assert rows == list(range(vocab_size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_taken_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    targets = torch.arange(6).view(2, 3)
    found = vocabulary_parallel_cross_entropy(logits, targets, 50, ALONE)
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(2, 3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1e4, 0.0, -1e4]]])
    losses = [
        vocabulary_parallel_cross_entropy(logits, torch.tensor([[target]]), 3, ALONE).item() for target in range(3)
    ]
    assert losses == [0.0, 1e4, 2e4]
