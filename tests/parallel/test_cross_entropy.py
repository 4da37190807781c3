"""Cross-entropy of several softmaxes in blocks against PyTorch's, and what it holds in memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_allattn.benchmark.tensor_bytes import profiled_peak
from megatron_allattn.parallel.cross_entropy import LogitBlock, vocabulary_parallel_cross_entropy
from megatron_allattn.parallel.groups import ALONE

WIDTH = 5


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def block_of(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, own: Tensor | None = None) -> LogitBlock:
    """A block on one rank; targets that are not its `own` are anywhere in it."""
    own = torch.ones_like(targets, dtype=torch.bool) if own is None else own
    return LogitBlock(hidden, weight, bias, len(bias), targets.masked_fill(~own, 0), own)


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """One softmax over given logits [n, V]."""
    size = logits.shape[1]
    block = block_of(logits, torch.eye(size, dtype=logits.dtype), logits.new_zeros(size), targets)
    return vocabulary_parallel_cross_entropy([[block]], ALONE)[0]


def check(losses: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Equal values, and equal gradients for unequal weights of the rows."""
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-13)
    weights = torch.linspace(-1, 2, len(losses), dtype=torch.float64)
    found = torch.autograd.grad((losses * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, rtol=1e-11, atol=1e-13)


def test_one_softmax_in_one_block() -> None:
    hidden, weight, bias = random(30, WIDTH), random(41, WIDTH, seed=4), random(41, seed=5)
    targets = torch.arange(30) * 7 % 41
    losses = vocabulary_parallel_cross_entropy([[block_of(hidden, weight, bias, targets)]], ALONE)[0]
    expected = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none")
    check(losses, expected, [hidden, weight, bias])


def test_several_softmaxes_in_blocks_equal_whole_ones() -> None:
    """Softmaxes of two blocks that share their hidden states, of one block, and of no row."""
    targets = [torch.tensor([0, 9, 10, 12, 4, 11]), torch.tensor([6, 0]), torch.zeros(0, dtype=torch.long)]
    hidden = [random(len(rows), WIDTH, seed=seed) for seed, rows in enumerate(targets)]
    tables = [(random(size, WIDTH, seed=size), random(size, seed=size + 50)) for size in (10, 3, 7, 4)]
    first = targets[0] < 10
    head = [
        block_of(hidden[0], *tables[0], targets[0], first),
        block_of(hidden[0], *tables[1], targets[0] - 10, ~first),
    ]
    tails = [[block_of(*parts)] for parts in zip(hidden[1:], *zip(*tables[2:], strict=True), targets[1:], strict=True)]
    losses = torch.cat(vocabulary_parallel_cross_entropy([head, *tails], ALONE))
    logits = [torch.cat([F.linear(hidden[0], *table) for table in tables[:2]], dim=1)]
    logits += [F.linear(rows, *table) for rows, table in zip(hidden[1:], tables[2:], strict=True)]
    expected = [F.cross_entropy(*pair, reduction="none") for pair in zip(logits, targets, strict=True)]
    check(losses, torch.cat(expected), [*hidden, *[tensor for table in tables for tensor in table]])


def test_gradients_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_allattn.parallel.cross_entropy.PIECE", 100)  # two rows
    logits, targets = random(7, 41), torch.arange(7)
    check(losses_of(logits, targets), F.cross_entropy(logits, targets, reduction="none"), [logits])


def test_backward_works_once() -> None:
    logits = random(3, 4)
    loss = losses_of(logits, torch.tensor([0, 1, 2])).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    assert [losses_of(logits, torch.tensor([target])).item() for target in range(3)] == [0.0, 1e4, 2e4]


@pytest.mark.parametrize("training", [True, False], ids=["step", "forward"])
def test_there_is_one_copy_of_the_logits(training: bool) -> None:
    rows, size = 256, 20_000
    hidden, weight, bias = (torch.zeros(shape, requires_grad=True) for shape in ((rows, 2), (size, 2), (size,)))

    def step() -> None:
        block = block_of(hidden, weight, bias, torch.arange(rows))
        with torch.set_grad_enabled(training):
            loss = vocabulary_parallel_cross_entropy([[block]], ALONE)[0].mean()
        if training:
            loss.backward()

    peak = profiled_peak(lambda: None, step)
    assert 4 * rows * size <= peak < 1.1 * 4 * rows * size
