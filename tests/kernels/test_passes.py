"""Passes over rows of scores in PyTorch, against their definition."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_allattn.kernels.dropout import DropoutRows, tile_columns
from megatron_allattn.kernels.passes import Rows, TorchPasses
from megatron_allattn.kernels.workspace import Workspace
from megatron_allattn.parallel.random import keep_mask, row_keys

CPU = torch.device("cpu")
LIMITS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}
PROBABILITY = 0.3


def torch_passes() -> TorchPasses:
    return TorchPasses(Workspace())


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(tiles: int, tile: int, span: int, persistent: int, **others) -> Rows:
    """Rows without bias and dropout, of one stream whose earlier positions all exist."""
    rows = Rows(span, tile, None, None, None, first=0, length=tiles * tile, known=span)
    return replace(rows, **others)


def dropout(count: int, span: int, persistent: int) -> DropoutRows:
    keys = row_keys(2**40 + 3, 7, torch.arange(count, dtype=torch.int32))
    return DropoutRows(keys, tile_columns(span, persistent, CPU), PROBABILITY)


def band_of(context: Tensor, tile: int) -> Tensor:
    """[R, S] by position, [R / T, T, S + T − 1], zero off the band, by loops."""
    count, span = context.shape
    band = context.new_zeros(count // tile, tile, span + tile - 1)
    for row in range(count):
        band[row // tile, row % tile, row % tile : row % tile + span] = context[row]
    return band


def by_hand(rows: Rows, scores: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax, and what becomes of it, in float64: context [R, S] is added to the scores [R, S + N]."""
    scores = scores.clone()
    scores[:, : rows.span] += context
    if rows.bias is not None:
        scores[:, : len(rows.bias)] += rows.bias
    for row in range(len(scores)):
        for column in range(rows.span):
            if rows.span - column > (rows.first + row) % rows.length + rows.known:
                scores[row, column] = -torch.inf
    softmax = scores.softmax(-1).nan_to_num(0.0)
    kept = softmax
    if rows.factors is not None:
        kept = torch.cat([kept[:, : rows.span] * rows.factors, kept[:, rows.span :]], dim=1)
        kept = kept / (kept.sum(-1, keepdim=True) + 1e-8)
    if rows.dropout is not None:
        columns = torch.arange(-rows.span, scores.shape[1] - rows.span, dtype=torch.int32)
        kept = kept * keep_mask(rows.dropout.rows[:, None], columns, rows.dropout.probability)
    return softmax, kept


SHAPES = [(1, 1, 2, 0), (2, 3, 4, 5), (3, 5, 32, 1), (4, 64, 96, 33)]  # tiles, rows of a tile, S, N
KINDS = ["plain", "bias", "dropout", "first tokens", "first tokens and nothing else", "everything"]


def problem(kind: str, shape: tuple[int, int, int, int]) -> Rows:
    tiles, tile, span, persistent = shape
    rows = rows_of(*shape)
    bias = numbers(max(1, span // 2), seed=3)
    bias[0] = -torch.inf if span + persistent > 1 else 0.0
    drop = dropout(tiles * tile, span, persistent)
    others = {
        "plain": {},
        "bias": {"bias": bias},
        "dropout": {"dropout": drop},
        "first tokens": {"known": 1},
        "first tokens and nothing else": {"known": 0, "length": tile},
        "everything": {"bias": bias, "dropout": drop, "known": 1, "first": 1, "length": tiles * tile + 2},
    }
    return replace(rows, **others[kind])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factors", [False, True], ids=["", "factors"])
def test_passes_of_pytorch_do_what_is_said(kind: str, shape: tuple[int, int, int, int], factors: bool) -> None:
    tiles, tile, span, persistent = shape
    rows = problem(kind, shape)
    if factors:
        rows = replace(rows, factors=torch.linspace(0, 1, span, dtype=torch.float64), bias=None)
    scores, context = numbers(tiles * tile, span + persistent).requires_grad_(), numbers(tiles * tile, span, seed=2)
    softmax, kept = by_hand(rows, scores, context)
    passes, band, out = torch_passes(), band_of(context, tile), torch.empty_like(scores)
    found = scores.detach().clone()
    passes.weights(rows, found, band, out)
    torch.testing.assert_close(found, softmax.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(out, kept.detach(), rtol=1e-13, atol=1e-14)
    assert torch.equal(band, band_of(out[:, :span], tile))
    for both in (False, True):
        grads, of_context = numbers(*scores.shape, seed=6), numbers(tiles * tile, span, seed=7)
        whole = torch.cat([of_context + both * grads[:, :span], grads[:, span:]], dim=1)
        (expected,) = torch.autograd.grad(kept, scores, whole, retain_graph=True)
        band = band_of(of_context, tile)
        through, of_edge = passes.gradients(rows, found, grads, band, both)
        expected = expected.nan_to_num(0.0)
        torch.testing.assert_close(grads, expected, rtol=1e-11, atol=1e-13)
        assert torch.equal(band, band_of(grads[:, :span], tile)) and of_edge is None
        if rows.bias is not None:
            torch.testing.assert_close(through, expected[:, : len(rows.bias)].sum(0), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_what_is_not_a_number_is_not_hidden(dtype: torch.dtype, bad: float) -> None:
    scores, band = torch.zeros(4, 7, dtype=dtype), torch.zeros(2, 2, 5, dtype=dtype)
    scores[1, 2], scores[3, 6] = bad, bad
    torch_passes().weights(rows_of(2, 2, 4, 3), scores, band, scores)
    assert scores.isnan().all(-1).tolist() == [False, True, False, True]
    assert scores.isnan().any(-1).tolist() == [False, True, False, True]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("tiles", "tile", "span"), [(1, 1, 1), (1, 5, 3), (3, 4, 9), (3, 4, 4), (4, 7, 2), (2, 3, 13)])
def test_adding_windows_is_the_transpose_of_taking_them(tiles: int, tile: int, span: int, dtype: torch.dtype) -> None:
    length = span + tiles * tile
    parts = numbers(tiles, span + tile - 1, 3).to(dtype)
    expected = numbers(length, 3, seed=2).to(dtype).double()
    for g in range(tiles):
        for i in range(span + tile - 1):
            expected[g * tile + i] += parts[g, i].double()
    whole = numbers(length + 2, 5, seed=9).to(dtype)
    whole[1:-1, 1:4] = numbers(length, 3, seed=2).to(dtype)
    before = whole.clone()
    torch_passes().add_windows(whole[1:-1, 1:4], parts, tile)  # rows and columns of something larger
    torch.testing.assert_close(whole[1:-1, 1:4].double(), expected, rtol=LIMITS[dtype], atol=4 * LIMITS[dtype])
    whole[1:-1, 1:4] = before[1:-1, 1:4]
    assert torch.equal(whole, before)
