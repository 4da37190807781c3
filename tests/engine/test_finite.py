"""What is not finite is found, wherever it stands and of whatever type."""

import pytest
import torch

from megatron_allattn.engine.finite import PIECE, is_finite

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_one_element_is_found(dtype: torch.dtype, wrong: float) -> None:
    values = torch.randn(PIECE + 9).to(dtype)
    assert is_finite(values)
    for where in (0, 7, PIECE - 1, PIECE, PIECE + 8):
        one = values.clone()
        one[where] = wrong
        assert not is_finite(one) and not is_finite(one.view(-1, 1)), where


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert is_finite(torch.tensor([largest, -largest], dtype=dtype).repeat(100))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.uint8, torch.int64], ids=str)
def test_tensors_of_any_shape_are_looked_at(dtype: torch.dtype) -> None:
    assert all(is_finite(torch.ones(shape, dtype=dtype)) for shape in ((), (0,), (3, 0), (2, 3, 4)))
