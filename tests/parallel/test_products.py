"""Products in bfloat16 where there are no instructions for it: of float32 copies, rounded once, the copies not kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_allattn.parallel import products
from megatron_allattn.parallel.products import linear, product_type, widen

HALF = torch.bfloat16
TYPES = [torch.float64, torch.float32, torch.float16, HALF]


def instructions(monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: there)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_only_bfloat16_on_a_cpu_without_instructions_is_widened(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, there: bool, device: str
) -> None:
    instructions(monkeypatch, there=there)
    tensor = torch.zeros(3, dtype=dtype, device=device)
    wide = dtype == HALF and not there and device == "cpu"
    assert product_type(tensor) == (torch.float32 if wide else dtype)
    assert (widen(tensor) is tensor) != wide


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("built", [True, False])
def test_a_pytorch_without_onednn_has_no_such_instructions(
    monkeypatch: pytest.MonkeyPatch, built: bool, there: bool
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: built)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: there)
    assert products.multiplies_bfloat16() == (built and there)


def inputs(shape: tuple[int, ...], *, bias: bool, dtype: torch.dtype = HALF) -> tuple[list[Tensor], Tensor]:
    """x, weight, perhaps bias, and the gradient of the output; all representable in bfloat16."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(HALF).to(dtype)

    given = [numbers(*shape, 33), numbers(17, 33), *([numbers(17)] if bias else [])]
    return [one.requires_grad_() for one in given], numbers(*shape, 17)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (70,), (3, 25), (0,)], ids=str)
def test_output_and_gradients_are_those_in_float64_rounded(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], bias: bool
) -> None:
    instructions(monkeypatch, there=False)
    given, dy = inputs(shape, bias=bias)
    exact, exact_dy = inputs(shape, bias=bias, dtype=torch.float64)
    y, true = linear(*given), F.linear(*exact)
    found, expected = torch.autograd.grad(y, given, dy), torch.autograd.grad(true, exact, exact_dy)
    for one, other in zip((y, *found), (true, *expected), strict=True):
        assert one.dtype == HALF
        # Half a step of 8 bits, and a little: a sum in float32 may round to the other neighbour.
        torch.testing.assert_close(one.double(), other, rtol=2**-8 * 1.01, atol=1e-5)


def test_what_is_kept_for_backward_is_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions(monkeypatch, there=False)
    given, _ = inputs((6,), bias=True)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(*given)
    assert kept == [tensor.data_ptr() for tensor in given]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_with_instructions_it_is_pytorch_s_own(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    instructions(monkeypatch, there=True)
    given, dy = inputs((3, 25), bias=True, dtype=dtype)
    y, own = linear(*given), F.linear(*given)
    assert torch.equal(y, own)
    for one, other in zip(torch.autograd.grad(y, given, dy), torch.autograd.grad(own, given, dy), strict=True):
        assert torch.equal(one, other)
