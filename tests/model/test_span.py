"""Spans: windows and cache lengths by hand, the span loss, what is logged."""

import pytest
import torch

from megatron_allattn.model.span import AdaptiveSpan, add_span_loss, cache_length, span_in_tokens, window_length
from megatron_allattn.parallel.groups import ALONE


@pytest.mark.parametrize(
    ("z", "max_span", "ramp", "window"),
    [
        (0.0, 256, 32, 64),  # looks back 32: 224 positions to spare, 3 whole chunks of 64
        (0.125, 256, 32, 64),  # 32 + 32 = 64: 192 to spare, exactly 3 chunks
        (0.126, 256, 32, 128),  # ceil(32.256) = 33, one more than fits
        (0.25, 256, 32, 128),
        (0.375, 256, 32, 128),  # 96 + 32 = 128
        (0.376, 256, 32, 192),
        (1.0, 256, 32, 256),
        (0.9, 256, 32, 256),  # min(256, 231 + 32)
        (0.0, 24, 6, 24),  # less than a chunk to spare
        (0.0, 100, 32, 36),  # windows end at L, not at multiples of 64
        (0.04, 100, 32, 36),  # 4 + 32 = 36
        (0.05, 100, 32, 100),
        (0.0, 8192, 32, 64),
        (0.5, 8192, 32, 4160),  # 4128 to spare 4064 = 63·64 + 32
    ],
)
def test_window(z: float, max_span: int, ramp: int, window: int) -> None:
    assert window_length(z, max_span, ramp) == window


@pytest.mark.parametrize("z", [i / 97 for i in range(98)])
def test_a_window_holds_everything_a_head_can_see(z: float) -> None:
    for max_span, ramp in ((256, 32), (100, 32), (8192, 32), (24, 6)):
        window = window_length(z, max_span, ramp)
        first_unseen = z * max_span + ramp + 1  # the mask is zero from this distance on
        assert window >= min(max_span, first_unseen - 1)
        assert window <= max_span and (max_span - window) % 64 == 0


def test_a_cache_keeps_one_chunk_more_than_the_window_and_never_more_than_the_span() -> None:
    assert [cache_length(*c) for c in ((64, 256), (192, 256), (256, 256), (36, 100), (24, 24))] == [
        128,
        256,
        256,
        100,
        24,
    ]


def test_spans_in_tokens() -> None:
    z = torch.tensor([[0.0, 0.25], [0.9, 1.0]])
    found = span_in_tokens(z, max_span=256, ramp=32)
    torch.testing.assert_close(found, torch.tensor([[32.0, 96.0], [256.0, 256.0]], dtype=torch.float64))


def test_the_span_loss_is_a_constant_gradient_and_nothing_else() -> None:
    hidden = torch.randn(2, 3, requires_grad=True)
    z = torch.rand(4, 1, 1, requires_grad=True)
    output = add_span_loss(hidden, z, 0.125)
    assert torch.equal(output, hidden)
    (output * 3.0).sum().backward()
    assert torch.equal(hidden.grad, torch.full((2, 3), 3.0))
    assert torch.equal(z.grad, torch.full((4, 1, 1), 0.125))  # whatever flows through the hidden states


def test_a_span_loss_that_its_type_cannot_hold_is_infinite_as_any_gradient() -> None:
    z, hidden = torch.rand(4, 1, 1, dtype=torch.float16, requires_grad=True), torch.randn(2, 3, dtype=torch.float16)
    add_span_loss(hidden.requires_grad_(), z, 1e5).sum().backward()
    assert z.grad is not None and z.grad.isinf().all()


def test_spans_start_at_zero_and_forward_returns_a_copy() -> None:
    span = AdaptiveSpan("span", 4, ALONE)
    span.z.data.fill_(0.5)
    copy = span()
    assert torch.equal(copy, span.z) and copy.data_ptr() != span.z.data_ptr()
    logical = span.z.logical
    assert (logical.name, logical.shape, logical.shard_dim) == ("span", (4, 1, 1), 0)
    assert torch.equal(logical.init.draw(1, "span", (4, 1, 1)), torch.zeros(4, 1, 1))
