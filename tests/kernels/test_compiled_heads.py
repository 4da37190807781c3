"""Compiled heads beyond what test_blocked.py asks of both kinds: threads, scratch memory, extremes, failures."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_allattn.kernels import compiled_heads, eager
from megatron_allattn.kernels.blocked import Blocked, project, whole_tiles
from megatron_allattn.kernels.blocked_call import BlockedCall
from megatron_allattn.kernels.compiled import load_library
from megatron_allattn.kernels.compiled_heads import CompiledHeads
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.kernels.workspace import Workspace
from megatron_allattn.parallel import products
from tests.support.attention_problems import answer, assert_same, converted, gradients, make
from tests.support.slow_attention import Problem

DROPOUT = (0.3, 2**35 + 3, 17, [4, 0, 2, 9])
TYPES = list(compiled_heads.ROWS)


@pytest.fixture(autouse=True)
def bfloat16_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every machine."""
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)


@pytest.fixture
def library() -> ctypes.CDLL:
    library, how = load_library()
    if library is None:
        pytest.skip(how)
    return library


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def everything(attend: Blocked, problem: Problem) -> dict[str, Tensor]:
    output = answer(attend, problem)
    return {"output": output.detach(), **gradients(output, problem)}


def odd(**changes: object) -> Problem:
    """Four heads, nothing a multiple of anything."""
    return make(**{
        "batch": 4, "num_heads": 4, "size": 5, "persistent": 33, "max_span": 61, "z": [0.1, 0.9, 0.5, 0.0],
        "block_length": 130, "cache_length": 29, "dropout": DROPOUT, "normalization": "span", **changes,
    })  # fmt: skip


def call_of(problem: Problem) -> BlockedCall:
    def described(block: Tensor, *rest: Any) -> Any:
        return BlockedCall(whole_tiles(block), *rest, workspace=Workspace())

    return cast("BlockedCall", answer(described, problem))


@pytest.mark.parametrize("position_values", ["none", "shared"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@torch.no_grad()
def test_bits_do_not_depend_on_the_number_of_threads(
    library: ctypes.CDLL, dtype: torch.dtype, position_values: str
) -> None:
    """Up to the number of heads; of the products before and after them PyTorch's may."""
    problem = converted(odd(position_values=position_values), dtype)
    call = call_of(problem)
    projected = project(call.block, call.weights)
    dy, found = torch.randn_like(projected.q), []
    for count in (1, 2, 3, 4):
        heads, grads = CompiledHeads(library, call), call.zero_gradients()
        with threads(count):
            y, of = heads.forward(projected), heads.backward(projected, dy, grads)
        found.append([y, *vars(of).values(), *vars(grads).values()])
    for other in found[1:]:
        assert all(torch.equal(one, same) for one, same in zip(other, found[0], strict=True))


@pytest.mark.parametrize("num_heads", [1, 2])
def test_more_threads_than_heads(library: ctypes.CDLL, num_heads: int) -> None:
    problem = odd(num_heads=num_heads, z=[0.6, 0.3][:num_heads])
    with threads(3):
        assert_same(Blocked(library), problem, eager.attend)


class Poisoned(Workspace):
    """Whose fresh memory is not a number, read as any type."""

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        found = super().take(name, shape, dtype, device)
        found.view(-1).view(torch.uint8).fill_(0xFF)
        return found


@pytest.mark.parametrize("position_values", ["none", "shared"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("persistent", [0, 1, 33])
@pytest.mark.parametrize("size", [1, 5, 16])
def test_nothing_is_read_that_was_not_written(
    library: ctypes.CDLL, size: int, persistent: int, dtype: torch.dtype, position_values: str
) -> None:
    problem = converted(odd(size=size, persistent=persistent, position_values=position_values, cached=3), dtype)
    poisoned = Blocked(library)
    poisoned.workspace = Poisoned()
    found, expected = everything(poisoned, problem), everything(Blocked(library), problem)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(tensor.isfinite().all() for tensor in expected.values())


def weights_on(library: ctypes.CDLL, scores: Tensor) -> Tensor:
    """The softmax of one row of scores [N]: a token that sees persistent vectors alone, with these keys.

    The gradient of a persistent value is the weight on it, times that of the output.
    """
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    values = torch.zeros(1, len(scores), 1, requires_grad=True)
    weights = LayerWeights(one, zero, zero, scores.view(1, 1, -1), values, None, torch.zeros(1, 1, 1))
    settings = AttentionSettings(1, 1, "none", "mask", 0.0, "span")
    state = BlockState(1, 0, torch.zeros(1, dtype=torch.int32), 0, None, (1,))
    Blocked(library)(torch.ones(1, 1, 1), torch.zeros(1, 0, 1), weights, settings, state).sum().backward()
    assert values.grad is not None
    return values.grad.flatten()


def test_the_exponential_is_near_over_its_whole_range(library: ctypes.CDLL) -> None:
    below = torch.linspace(-100, 0, 4001)
    found = weights_on(library, below).double()
    ratio, true = found / found[-1], below.double().exp()
    above = below > -80  # weights themselves stay above the smallest float
    assert ((ratio - true).abs() / true)[above].max() < 5e-7
    assert ratio[below < -88].max() < 1e-37
    assert found.sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_what_is_not_a_number_is_not_hidden(library: ctypes.CDLL, bad: float) -> None:
    scores = torch.zeros(40)
    scores[7] = bad
    assert weights_on(library, scores).isnan().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_that_is_not_a_number_shows_in_its_own_stream(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    problem = converted(odd(), dtype)
    problem.block.data[2, 129] = torch.nan
    bad = answer(Blocked(library), problem).isnan()
    assert bad[2, 129].all() and not bad[[0, 1, 3]].any()


def test_a_product_that_fails_is_an_error(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(compiled_heads._Arguments):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            self.described.hidden = -1

    monkeypatch.setattr(compiled_heads, "_Arguments", Wrong)
    for count in (1, 2):
        with threads(count), pytest.raises(RuntimeError, match=r"^a head of attention failed: .*negative"):
            answer(Blocked(library), odd())


@pytest.mark.parametrize("name", ["cache", "position", "persistent_key", "persistent_value", "query", "key", "value"])
def test_a_tensor_of_another_type_is_refused(library: ctypes.CDLL, name: str) -> None:
    """Its memory would be read as the block's type."""
    problem = odd()
    setattr(problem, name, getattr(problem, name).detach().float())
    with pytest.raises((ValueError, RuntimeError), match=r"[Ff]loat"):
        answer(Blocked(library), problem)


def test_autocast_is_refused(library: ctypes.CDLL) -> None:
    problem = converted(odd(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"bfloat16 on cpu: with a block of"):
        answer(Blocked(library), problem)
