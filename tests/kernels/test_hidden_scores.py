"""Normalization `span` where scores are large: what the mask hides outweighs what it shows by any factor.

z·L is whole, so that the mask's last distance is 0 and has a gradient.
"""

import math
from dataclasses import replace

import pytest
import torch

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.interface import LARGEST_HIDDEN
from megatron_allattn.kernels.registry import Attend, make_blocked
from tests.support.attention_problems import answer, converted, gradients, make
from tests.support.slow_attention import slow_attend

BACKENDS = {
    "eager": lambda: eager.attend,
    "compiled": lambda: make_blocked(torch.device("cpu")),
    "pytorch": lambda: Blocked(None),
}
LIMITS = {torch.float64: 1e-11, torch.float32: 2e-5}
KINDS = {
    "plain": {},
    "no persistent vectors": {"persistent": 0},
    "dropout": {"dropout": (0.3, 2**40 + 5, 9, [7, 3])},
    "masked": {"cached": 4, "empty_cache": "mask"},
    "position values": {"position_values": "shared"},
}


def problem(scale: float, **options):
    """z·L of 0, 3 and 6; scores times `scale`."""
    made = make(z=(0.0, 0.25, 0.5), block_length=37, normalization="span", **options)
    return converted(replace(made, query=made.query.detach() * scale), torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("told", [True, False], ids=["spans told", "spans unknown"])
def test_output_and_gradients(backend: str, dtype: torch.dtype, kind: str, told: bool) -> None:
    """Scores so large that a mask of 1e-8 would show, while the weight of what is hidden is below its bound."""
    made = problem(8.0, **KINDS[kind])
    expected = slow_attend(made)
    truth = gradients(expected, made)
    attend: Attend = BACKENDS[backend]()
    own = converted(made, dtype)
    found = answer(attend, own, (4, 7, 10) if told else None)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=LIMITS[dtype] * expected.abs().max().item())
    for name, gradient in gradients(found, own).items():
        bound = LIMITS[dtype] * truth[name].abs().max().item()
        torch.testing.assert_close(
            gradient.double(), truth[name], rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_beyond_the_bound_outputs_are_exact_and_the_gradient_is_the_bounded_one(
    backend: str, dtype: torch.dtype
) -> None:
    made = problem(30.0)
    expected, own = slow_attend(made), converted(made, dtype)
    found = answer(BACKENDS[backend](), own, (4, 7, 10))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5 * LIMITS[dtype] * expected.abs().max().item())
    of_span = gradients(found, own)["span"].double()
    bounded = gradients(answer(eager.attend, made), made)["span"]
    unbounded = gradients(expected, made)["span"]
    assert bounded.abs().max() < 1e3 * math.exp(LARGEST_HIDDEN) < 1e-3 * unbounded.abs().max()
    torch.testing.assert_close(of_span, bounded, rtol=0, atol=20 * LIMITS[dtype] * bounded.abs().max().item())
