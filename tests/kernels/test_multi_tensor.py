"""Norms and updates of many tensors, in every form that some device takes, against plain arithmetic in float64."""

import pytest
import torch

from megatron_allattn.kernels import multi_tensor
from megatron_allattn.kernels.multi_tensor import ROW, AdamStep, adagrad_, adagrad_foreach, adamw_, squared_norms

SIZES = (1, ROW - 1, ROW, 3 * ROW + 5, 7)


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_squared_norms_of_any_size(dtype: torch.dtype) -> None:
    found = squared_norms(given := tensors(1, dtype))
    expected = torch.stack([tensor.double().square().sum() for tensor in given])
    torch.testing.assert_close(found, expected, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)


def test_squared_norms_of_awkward_tensors() -> None:
    half = torch.full((10,), 300.0, dtype=torch.float16)  # its squares are beyond float16
    assert squared_norms([half]).item() == pytest.approx(900_000.0)
    assert squared_norms([torch.empty(0), torch.ones(2, 3).t()]).tolist() == pytest.approx([0.0, 6.0])


def test_a_long_norm_is_as_exact_as_float64() -> None:
    long = torch.rand(1 << 20)
    exact = long.double().square().sum()
    assert abs(squared_norms([long])[0] / exact - 1) < 1e-7 < abs(long.norm().double().square() / exact - 1)


@pytest.mark.parametrize("update", [adagrad_, adagrad_foreach], ids=["fused", "foreach"])
def test_adagrad_has_a_rate_for_each_tensor(update, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_tensor, "BUCKET", ROW + 1)  # buckets of several, one and a larger tensor
    given, grads, sums = tensors(2), tensors(3), [tensor.abs() for tensor in tensors(4)]
    rates = [0.1, 0.0, 0.3, 0.4, 0.5]
    expected_sums = [total.double() + grad.double() ** 2 for total, grad in zip(sums, grads, strict=True)]
    expected = [
        tensor.double() - rate * grad.double() / (total.sqrt() + 1e-3)
        for tensor, grad, total, rate in zip(given, grads, expected_sums, rates, strict=True)
    ]
    update(given, grads, sums, rates, 1e-3)
    for found, wanted in zip(given + sums, expected + expected_sums, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_gradients_may_lie_in_any_order() -> None:
    grad = torch.arange(6.0).view(3, 2).t()
    p, q = torch.zeros(2, 3), torch.zeros(2, 3)
    adagrad_([p], [grad], [torch.zeros(2, 3)], [1.0], 0.5)
    torch.testing.assert_close(p, -grad / (grad + 0.5))
    state = [[torch.zeros(2, 3)] for _ in range(2)]
    adamw_([q], [grad], *state, AdamStep(1.0, (0.5, 0.5), 0.5, 0.0, 1))
    torch.testing.assert_close(q, -grad / (grad + 0.5))
