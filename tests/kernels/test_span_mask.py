"""The soft span mask, by hand."""

import torch

from megatron_allattn.kernels.interface import span_mask


def test_values_at_every_distance() -> None:
    # R = 4, L = 10, z = 0.3: one up to z·L + 1 = 4, then down by a quarter a token, zero from 8 on
    mask = span_mask(torch.tensor([[[0.3]]], dtype=torch.float64), torch.arange(1, 11), max_span=10, ramp=4)
    expected = torch.tensor([1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(mask[0, 0], expected, rtol=0, atol=1e-15)


def test_every_head_has_its_own_span() -> None:
    mask = span_mask(torch.tensor([0.0, 1.0]).view(2, 1, 1), torch.tensor([10, 1]), max_span=8, ramp=2)
    assert mask.shape == (2, 1, 2)
    assert mask.flatten().tolist() == [0.0, 1.0, 0.5, 1.0]


def test_the_clamp_passes_gradient_at_both_ends_and_not_beyond() -> None:
    z = torch.zeros(1, 1, 1, dtype=torch.float64, requires_grad=True)
    distances = torch.tensor([1, 2, 5, 6])  # R = 4: the mask is 1, 0.75, 0 and (below zero) 0
    for index, slope in enumerate([10 / 4, 10 / 4, 10 / 4, 0.0]):
        (gradient,) = torch.autograd.grad(span_mask(z, distances, max_span=10, ramp=4)[0, 0, index], z)
        assert gradient.item() == slope
