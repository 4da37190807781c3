"""Vocabulary-parallel embedding and output against the plain ones, also where V does not divide."""

import pytest
import torch
import torch.nn.functional as F

from megatron_allattn.parallel.collectives import all_gather
from megatron_allattn.parallel.cross_entropy import sharded_logits, vocabulary_range
from megatron_allattn.parallel.groups import ALONE, Group
from megatron_allattn.parallel.logical import Init, logical_of
from megatron_allattn.parallel.residual import Residual
from megatron_allattn.parallel.vocabulary import VocabularyParallelEmbedding, VocabularyParallelOutput
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


def _sharded(rank: int, world_size: int, vocab_size: int, tied: bool) -> dict:
    """Token ids → vectors → loss over the shards; gradients joined, and those of padding rows apart."""
    group = groups_of(world_size, 1).tensor
    embedding = VocabularyParallelEmbedding("embedding", vocab_size, HIDDEN, group, NORMAL)
    output = VocabularyParallelOutput("output", HIDDEN, vocab_size, group, NORMAL, embedding if tied else None)
    module = torch.nn.ModuleList([embedding, output]).double()
    parameters = list(module.parameters())
    for parameter in parameters:
        logical = logical_of(parameter)
        full = NORMAL.draw(1, logical.name, logical.shape).double()
        parameter.data.copy_(logical.shard(full, group.rank, group.size))
    residual = Residual(group)
    hidden = residual.leave(embedding(ids(vocab_size, 1)))
    hidden.retain_grad()
    losses = output(residual.enter(hidden), ids(vocab_size, 2))
    (losses * _weights()).sum().backward()
    own = vocabulary_range(vocab_size, group)
    logits = sharded_logits(hidden.detach(), output.weight, output.bias, vocab_size, group).detach()
    result = {
        "hidden": hidden.detach(),
        "hidden gradient": hidden.grad,
        "log-probabilities": output(hidden),
        "losses": losses.detach(),
        "padding": [parameter.grad[own[1] - own[0] :].abs().sum().item() for parameter in parameters],
        "padding probability": logits.exp()[..., own[1] - own[0] :].sum().item(),
        "rows": len(output.bias),
    }
    for parameter in parameters:
        logical = logical_of(parameter)
        result[logical.name] = logical.join(all_gather(parameter.grad, group))
    return result


def _weights() -> torch.Tensor:
    return torch.linspace(-1, 2, 120, dtype=torch.float64).view(3, 40)


def plain(vocab_size: int, tied: bool = False) -> dict[str, torch.Tensor]:
    """The same with torch's own embedding, linear layer and cross-entropy."""
    weights = {
        name: NORMAL.draw(1, name, shape).double().requires_grad_()
        for name, shape in shapes(vocab_size).items()
        if not (tied and name == "output.weight")
    }
    hidden = F.embedding(ids(vocab_size, 1), weights["embedding.weight"])
    hidden.retain_grad()
    logits = F.linear(hidden, weights["embedding.weight" if tied else "output.weight"], weights["output.bias"])
    losses = F.cross_entropy(logits.flatten(0, 1), ids(vocab_size, 2).flatten(), reduction="none").view(3, 40)
    (losses * _weights()).sum().backward()
    return {
        "hidden": hidden.detach(),
        "hidden gradient": hidden.grad,
        "log-probabilities": logits.detach().log_softmax(dim=-1),
        "losses": losses.detach(),
        **{name: weight.grad for name, weight in weights.items()},
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 101), (4, 101), (4, 5), (4, 2), (4, 100)])
def test_loss_and_gradients_equal_the_plain_ones(pools: WorkerPools, size: int, vocab_size: int, tied: bool) -> None:
    expected = plain(vocab_size, tied)
    for found in pools(size).run(_sharded, vocab_size, tied):
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-12, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}"
            )
        assert found["padding"] == [0.0] * (2 if tied else 3)
        assert found["padding probability"] == 0.0
        assert found["rows"] == -(-vocab_size // size)
        assert not found["log-probabilities"].requires_grad


def test_ranges_cover_the_vocabulary_once() -> None:
    for vocab_size, size in ((101, 2), (101, 4), (5, 4), (2, 4), (8, 4)):
        groups = [Group(ranks=tuple(range(size)), rank=rank, handle=None) for rank in range(size)]
        rows = [row for group in groups for row in range(*vocabulary_range(vocab_size, group))]
        assert rows == list(range(vocab_size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_taken_in_float32(dtype: torch.dtype) -> None:
    output = VocabularyParallelOutput("output", 8, 50, ALONE, NORMAL)
    generator = torch.Generator().manual_seed(1)
    for parameter in output.parameters():
        parameter.data.normal_(generator=generator)
    hidden, targets = torch.randn(2, 3, 8, generator=generator).to(dtype), torch.arange(6).view(2, 3)
    output.to(dtype)
    logits = F.linear(hidden, output.weight, output.bias).float()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 3)
    for found in (output(hidden, targets), -output(hidden).gather(-1, targets[..., None])[..., 0]):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
