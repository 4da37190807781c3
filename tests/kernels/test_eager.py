"""The eager backend against token-by-token loops: outputs and gradients, in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_allattn.kernels.eager import attend
from tests.support.attention_problems import (
    CASES,
    NORMALIZATIONS,
    SPAN,
    TENSORS,
    answer,
    compare,
    converted,
    gradients,
    make,
    truth,
)
from tests.support.slow_attention import Problem, slow_attend

BATCH, BLOCK, HEADS, HIDDEN = 2, 5, 3, 12


def eager(problem: Problem) -> Tensor:
    return answer(attend, problem)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_those_of_the_loops(case: str, normalization: str) -> None:
    problem = make(**CASES[case], normalization=normalization)
    found = eager(problem)
    assert found.shape == (BATCH, problem.block.shape[1], HIDDEN)
    compare(found, gradients(found, problem), *truth(case, normalization), tolerance=1e-12)


def test_the_two_normalizations_differ_by_the_1e_8_alone() -> None:
    """Where the window holds little that the span masks, the 1e-8 is all that is left, and it shows."""
    span, window = (truth("full cache", normalization)[0] for normalization in NORMALIZATIONS)
    assert 1e-10 < (span - window).abs().max() < 1e-6


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("z", [0.0, 0.25, 0.5])
def test_gradient_on_the_border_of_the_mask(z: float, normalization: str) -> None:
    # z·L is whole, so at x = z·L + 1 the mask is exactly 1 and at x = z·L + 1 + R exactly 0: the clamp passes both
    problem = make(z=[z] * HEADS, normalization=normalization)
    found, expected = gradients(eager(problem), problem), gradients(slow_attend(problem), problem)
    torch.testing.assert_close(found["span"], expected["span"], rtol=1e-11, atol=1e-12)
    assert found["span"].abs().min() > 1e-6


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("changes", [{}, {"position_values": "shared", "cached": 4, "empty_cache": "mask"}], ids=str)
def test_gradients_equal_finite_differences(changes, normalization: str) -> None:
    problem = make(**changes, normalization=normalization)

    def of_tensors(*tensors: Tensor) -> Tensor:
        return eager(replace(problem, **dict(zip(TENSORS, tensors, strict=True))))

    assert torch.autograd.gradcheck(of_tensors, tuple(getattr(problem, name) for name in TENSORS), fast_mode=True)


def test_a_token_sees_those_before_it_but_neither_itself_nor_later_ones() -> None:
    problem = make(adaptive=False)
    problem.query = torch.zeros_like(problem.query)  # every position weighs the same; a token's own query says nothing
    for token in range(BLOCK):
        (gradient,) = torch.autograd.grad(eager(problem)[:, token].sum(), problem.block)
        assert (gradient.abs().amax(dim=(0, 2)) > 0).tolist() == [position < token for position in range(BLOCK)]


def test_bfloat16_stays_near_float64_and_keeps_its_type() -> None:
    half = make(window=7, dtype=torch.bfloat16)
    found, expected = eager(half), slow_attend(converted(half, torch.float64))
    assert found.dtype == torch.bfloat16
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-2  # a bfloat16 number has 8 bits


@pytest.mark.parametrize(
    ("change", "spans", "message"),
    [
        (
            {"cache": torch.zeros(BATCH + 1, 3, HIDDEN)},
            None,
            r"cache \(3, 3, 12\): a block \(2, 5, 12\) needs \[2, C, 12\]",
        ),
        ({"cache": torch.zeros(BATCH, 3, HIDDEN + 1)}, None, r"cache \(2, 3, 13\)"),
        ({"query": torch.zeros(HIDDEN - 4, HIDDEN)}, None, r"query weight \(8, 12\): 3 heads of 4 need \[12, 12\]"),
        ({"window": SPAN + 1}, None, "window 13: it must be in 1 … 12, the maximum span"),
        ({"window": 0}, None, "window 0: it must be in 1 … 12"),
        ({}, (3, 3), r"spans \(3, 3\): 3 heads need one each, in 1 … 12, the window"),
        ({}, (3, 0, 3), r"spans \(3, 0, 3\): 3 heads need one each"),
        ({"window": 7}, (3, 8, 3), r"spans \(3, 8, 3\): 3 heads need one each, in 1 … 7, the window"),
    ],
)
def test_shapes_that_mean_nothing_are_refused(change, spans, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        answer(attend, replace(make(), **change), spans)
