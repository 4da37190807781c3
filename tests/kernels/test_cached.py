"""Kept keys and values against one pass over all tokens: by loops, and by the eager backend where they are too slow."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.cached import SLACK, CachedAttention
from megatron_allattn.kernels.registry import Attend, make_blocked
from megatron_allattn.model.span import look_back
from megatron_allattn.parallel import products
from tests.support.attention_problems import answer, make
from tests.support.slow_attention import Problem, slow_attend


def cached_attention() -> CachedAttention:
    return CachedAttention(make_blocked(torch.device("cpu")))


CASES = {
    "plain": {},
    "the paper's normalization": {"normalization": "window"},
    "a window below the span": {"window": 7},
    "the paper's normalization, a window below the span": {"normalization": "window", "window": 7},
    "an empty cache that is masked": {"empty_cache": "mask"},
    "the paper's normalization, an empty cache that is masked": {"normalization": "window", "empty_cache": "mask"},
    "no persistent vectors": {"persistent": 0},
    "nothing to look at for the first token": {"persistent": 0, "empty_cache": "mask"},
    "position values": {"position_values": "shared", "empty_cache": "mask"},
    "position values, no persistent vectors": {"position_values": "shared", "persistent": 0},
    "fixed span": {"adaptive": False},
    "fixed span, masked": {"adaptive": False, "empty_cache": "mask", "normalization": "window"},
    "one head": {"num_heads": 1},
    "spans from 0 to all": {"z": [0.0, 1.0, 0.26], "ramp": 2},
    "a window of one": {"window": 1},
}


def text(blocks: Sequence[int], **changes) -> Problem:
    """A problem whose tokens have nothing before them."""
    return make(**{"block_length": sum(blocks), "cache_length": 0, "cached": 0, "normalization": "span", **changes})


def spans_of(problem: Problem) -> tuple[int, ...]:
    if problem.span is None:
        return (problem.window,) * len(problem.heads)
    return tuple(look_back(z, problem.window, problem.max_span, problem.ramp) for z in problem.span.flatten().tolist())


@torch.no_grad()
def in_blocks(attend: Attend, problem: Problem, blocks: Sequence[int]) -> Tensor:
    """The answer to each block after the other."""
    found, spans = [], spans_of(problem)
    for block in problem.block.split(list(blocks), dim=1):
        passed = sum(one.shape[1] for one in found)
        found.append(answer(attend, replace(problem, block=block, cached=passed), spans))
    return torch.cat(found, dim=1)


def check(problem: Problem, blocks: Sequence[int], expected: Tensor) -> None:
    torch.testing.assert_close(in_blocks(cached_attention(), problem, blocks), expected, rtol=0, atol=1e-13)


@cache
@torch.no_grad()
def by_loops(case: str) -> Tensor:
    return slow_attend(text((16,), **CASES[case]))


@pytest.mark.parametrize("blocks", [(1,) * 16, (5, 1, 1, 2, 7), (16,), (1, 13, 1, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_blocks_one_after_the_other_are_one_pass(case: str, blocks: tuple[int, ...]) -> None:
    check(text(blocks, **CASES[case]), blocks, by_loops(case))


@pytest.mark.parametrize("changes", [{}, {"normalization": "window"}, {"empty_cache": "mask"}], ids=str)
@pytest.mark.parametrize(
    "blocks", [(1,) * 300, (200, *(1,) * (SLACK + 3), 30), (3, *(1,) * SLACK, 2, *(1,) * SLACK, 90, 1)], ids=len
)
def test_rows_that_move_back_to_the_front_are_the_same(blocks: tuple[int, ...], changes: dict) -> None:
    """Spans below, at and beyond the room behind them, and blocks longer than some spans and shorter than others."""
    problem = text(blocks, max_span=160, num_heads=4, z=[0.0, 0.1, 0.38, 1.0], ramp=3, **changes)
    assert spans_of(problem) == (4, 20, SLACK + 1, 160)
    check(problem, blocks, in_blocks(eager.attend, problem, (sum(blocks),)))


def test_vectors_that_are_none_are_as_no_tensor_of_them() -> None:
    problem = text((1, 3), persistent=0, empty_cache="mask")
    none = torch.zeros(len(problem.heads), problem.position.shape[1], 0, dtype=torch.float64)
    empty = replace(problem, persistent_key=none, persistent_value=none.transpose(1, 2))
    check(empty, (1, 3), in_blocks(cached_attention(), problem, (1, 3)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.03)])
def test_other_precisions(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)  # test_widened.py is about the other case
    expected = by_loops("plain")
    for blocks in ((16,), (1,) * 16):
        found = in_blocks(cached_attention(), text(blocks, dtype=dtype), blocks)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


def test_streams_go_on_from_copies_of_one_beginning() -> None:
    blocks, beginning = (6, *(1,) * 5, 4), 7
    problem = text(blocks, batch=3)
    problem.block.data[:, :beginning] = problem.block.data[:1, :beginning].clone()
    with torch.no_grad():
        expected = slow_attend(problem)
    cached, start = cached_attention(), problem.block[:1, :beginning].detach()
    in_blocks(cached, replace(problem, block=start, cache=problem.cache[:1]), (6, 1))
    cached.repeat(3)
    found = []
    for first, last in ((7, 8), (8, 9), (9, 15)):
        step = replace(problem, block=problem.block[:, first:last].detach(), cached=first)
        found.append(answer(cached, step, spans_of(problem)))
    torch.testing.assert_close(torch.cat(found, dim=1), expected[:, beginning:], rtol=0, atol=1e-13)


class _Operations(TorchDispatchMode):
    """Counts what runs, views left out."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not operation.is_view
        return operation(*args, **(kwargs or {}))


def test_a_token_takes_few_operations_for_all_heads_together() -> None:
    counts = []
    for num_heads in (2, 12):
        problem = text((9,), num_heads=num_heads)
        cached, spans = cached_attention(), spans_of(problem)
        in_blocks(cached, replace(problem, block=problem.block[:, :8]), (8,))
        with _Operations() as operations:
            answer(cached, replace(problem, block=problem.block[:, 8:], cached=8), spans)
        counts.append(operations.count)
    assert counts[0] == counts[1] <= 30


def work(problem: Problem, passed: int) -> tuple[int, int]:
    """FLOPs of the token after `passed` ones, and elements of the keys that are kept."""
    cached, spans = cached_attention(), spans_of(problem)
    in_blocks(cached, replace(problem, block=problem.block[:, :1].expand(-1, passed, -1)), (passed // 2,) * 2)
    with FlopCounterMode(display=False) as counter:
        answer(cached, replace(problem, block=problem.block[:, :1], cached=passed), spans)
    (layer,) = cached._layers.values()
    return counter.get_total_flops(), layer.keys.numel()


def test_a_token_costs_what_the_spans_say_however_many_came_before() -> None:
    short = text((1,), max_span=4000, num_heads=4, z=[0.0, 0.001, 0.01, 0.1])
    assert work(short, 20) == work(short, 3000)
    rows = sum(spans_of(short)) + 4 * SLACK
    assert work(short, 20)[1] == 2 * rows * 4  # streams, rows of all heads, head size
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        answer(eager.attend, replace(short, cache=short.block[:, :1].detach().expand(-1, 4000, -1), cached=4000))
    assert counter.get_total_flops() > 10 * work(short, 20)[0]


def test_what_it_is_not_for_is_refused() -> None:
    problem = text((4,))
    with pytest.raises(AssertionError, match="no dropout"):
        answer(cached_attention(), replace(problem, dropout=(0.5, 1, 1, [0, 1])))
    with pytest.raises(AssertionError, match="7 tokens have passed, 0 of them through here"):
        answer(cached_attention(), replace(problem, cached=7))
