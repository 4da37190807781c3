"""Backends in bfloat16 on a CPU without instructions for it: bit for bit what float32 gives, rounded."""

from collections.abc import Callable

import pytest
import torch

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.cached import CachedAttention
from megatron_allattn.kernels.registry import Attend, make_blocked
from megatron_allattn.parallel import products
from tests.support.attention_problems import NORMALIZATIONS, answer, converted, gradients, make
from tests.support.slow_attention import Problem

HALF = torch.bfloat16
DROPOUT = (0.3, 2**35 + 3, 17, [4, 0, 2, 9])
BACKENDS: dict[str, Callable[[], Attend]] = {
    "eager": lambda: eager.attend,
    "heads of PyTorch": lambda: Blocked(None),
    "heads of this machine": lambda: make_blocked(torch.device("cpu")),
}


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)


def both(**changes: object) -> tuple[Problem, Problem]:
    """A problem in bfloat16, and the same numbers in float32."""
    half = converted(make(**{"batch": 4, "persistent": 7, "max_span": 41, "block_length": 67, **changes}), HALF)
    return half, converted(half, torch.float32)


@pytest.mark.parametrize("keep_projections", [True, False])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training(backend: str, dropout: object, normalization: str, keep_projections: bool) -> None:
    half, wide = both(dropout=dropout, normalization=normalization)
    attend = BACKENDS[backend]()
    found, expected = (answer(attend, problem, keep_projections=keep_projections) for problem in (half, wide))
    assert torch.equal(found, expected.to(HALF))
    # The output's gradient in float32 is that in bfloat16, whatever its factors are in float32.
    factors = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).sin().to(HALF).view_as(found)
    own = gradients(found, half)
    through = torch.autograd.grad(
        expected, [getattr(wide, name) for name in own], factors.float(), allow_unused=True, materialize_grads=True
    )
    for (name, gradient), other in zip(own.items(), through, strict=True):
        assert torch.equal(gradient, other.to(HALF)), name


@pytest.mark.parametrize("blocks", [(1,) * 9, (5, 1, 3)], ids=str)
@torch.no_grad()
def test_kept_keys_and_values(blocks: tuple[int, ...]) -> None:
    half, wide = both(block_length=sum(blocks), cache_length=0, cached=0, normalization="span")
    kept = [CachedAttention(make_blocked(torch.device("cpu"))) for _ in range(2)]
    passed = 0
    for length in blocks:
        rows = slice(passed, passed + length)
        found, expected = (
            answer(attend, Problem(**{**vars(problem), "block": problem.block[:, rows], "cached": passed}))
            for attend, problem in zip(kept, (half, wide), strict=True)
        )
        assert torch.equal(found, expected.to(HALF))
        passed += length
