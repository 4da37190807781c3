"""Normalization `span` where scores are large: what the mask hides outweighs what it shows by any factor.

z·L is whole, so that the mask's last distance is 0 and has a gradient.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.interface import LARGEST_HIDDEN
from megatron_allattn.kernels.registry import make_blocked
from tests.support.attention_problems import answer, converted, gradients, make
from tests.support.layouts import rest
from tests.support.slow_attention import Problem, slow_attend
from tests.support.triton_answers import Answer, Question, ask

BACKENDS = {
    "eager": lambda: eager.attend,
    "compiled": lambda: make_blocked(torch.device("cpu")),
    "pytorch": lambda: Blocked(None),
}
LIMITS = {torch.float64: 1e-11, torch.float32: 2e-5}
ASKED = [
    *((backend, dtype, limit) for backend in BACKENDS for dtype, limit in LIMITS.items()),
    ("triton", torch.float32, 1e-5),
]
KINDS = {
    "plain": {},
    "no persistent vectors": {"persistent": 0},
    "dropout": {"dropout": (0.3, 2**40 + 5, 9, [7, 3])},
    "masked": {"cached": 4, "empty_cache": "mask"},
    "position values": {"position_values": "shared"},
}
# one more is what the host finds where z·L is whole as float32 rounds it, and not exactly
TOLD = {"spans told": (4, 7, 10), "one more told": (5, 8, 11), "spans unknown": None}
CASES = [(*asked, kind, told) for asked in ASKED for kind in KINDS for told in TOLD if asked[0] != "triton"]
OF_TRITON = [  # the interpreter takes a second for one
    (*ASKED[-1], kind, told) for kind in KINDS for told in TOLD if kind == "plain" or told == "spans told"
]
BEYOND, LOW = "beyond the bound", "far below 0"


def problem(scale: float, **options) -> Problem:
    """z·L of 0, 3 and 6; scores times `scale`."""
    made = make(z=(0.0, 0.25, 0.5), block_length=37, size=16, normalization="span", **options)
    return converted(replace(made, query=made.query.detach() * scale), torch.float64)


def low_problem() -> Problem:
    """Every score is some 200 below 0, and persistent vectors are an odd number."""
    made, one = problem(1.0, persistent=5), torch.eye(48, dtype=torch.float64)
    assert made.persistent_key is not None
    low = replace(
        made,
        block=made.block.detach().abs(),
        cache=made.cache.abs(),
        query=40 * one,
        key=-one,
        persistent_key=-made.persistent_key.detach().abs(),
        position=-made.position.detach().abs(),
    )
    return converted(low, torch.float64)


@cache
def truth(scale: float, kind: str) -> Answer:
    """Output and gradients by loops, the gradients without a bound."""
    made = problem(scale, **KINDS[kind])
    output = slow_attend(made)
    return output.detach(), gradients(output, made)


@cache
def low_truth() -> Answer:
    made = low_problem()
    output = slow_attend(made)
    return output.detach(), gradients(output, made)


@pytest.fixture(scope="module")
def of_triton(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Triton's answers to what is asked here in every run, from its interpreter."""
    pytest.importorskip("triton")
    questions: dict[str, Question] = {
        name: (converted(made, torch.float32), TOLD["spans told"])
        for name, made in ((BEYOND, problem(30.0)), (LOW, low_problem()))
    }
    questions |= _questions(OF_TRITON[:1])
    return ask(questions, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def more_of_triton(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """The rest."""
    return ask(_questions(OF_TRITON[1:]), tmp_path_factory.mktemp("triton"))


def _questions(cases: list[tuple[Any, ...]]) -> dict[str, Question]:
    return {
        f"{kind}, {told}": (converted(problem(8.0, **KINDS[kind]), torch.float32), TOLD[told])
        for *_, kind, told in cases
    }


@pytest.fixture
def answered(request: pytest.FixtureRequest) -> Callable[..., Answer]:
    """Output and gradients by a backend; name: of the question, among those put to Triton."""

    def answered(backend: str, name: str, own: Problem, spans: tuple[int, ...] | None) -> Answer:
        if backend == "triton":
            few = name in (BEYOND, LOW, *_questions(OF_TRITON[:1]))
            answers: dict[str, Answer] = request.getfixturevalue("of_triton" if few else "more_of_triton")
            return answers[name]
        output = answer(BACKENDS[backend](), own, spans)
        return output, gradients(output, own)

    return answered


@pytest.mark.parametrize(
    ("backend", "dtype", "limit", "kind", "told"), [*CASES, OF_TRITON[0], *rest(*OF_TRITON[1:])], ids=str
)
def test_output_and_gradients(
    answered: Callable[..., Answer], backend: str, dtype: torch.dtype, limit: float, kind: str, told: str
) -> None:
    """Scores so large that a mask of 1e-8 would show, while the weight of what is hidden is below its bound."""
    made = problem(8.0, **KINDS[kind])
    expected, true = truth(8.0, kind)
    found, grads = answered(backend, f"{kind}, {told}", converted(made, dtype), TOLD[told])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=limit * expected.abs().max().item())
    assert grads.keys() == true.keys()
    for name, gradient in grads.items():
        bound = limit * true[name].abs().max().item()
        torch.testing.assert_close(gradient.double(), true[name], rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(grads["span"].double(), true["span"], rtol=10 * limit, atol=0)  # of every head


@pytest.mark.parametrize(("backend", "dtype", "limit"), ASKED, ids=str)
def test_beyond_the_bound_outputs_are_exact_and_the_gradient_is_the_bounded_one(
    answered: Callable[..., Answer], backend: str, dtype: torch.dtype, limit: float
) -> None:
    made = problem(30.0)
    expected, true = truth(30.0, "plain")
    found, grads = answered(backend, BEYOND, converted(made, dtype), TOLD["spans told"])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5 * limit * expected.abs().max().item())
    bounded = gradients(answer(eager.attend, made), made)["span"]
    assert bounded.abs().max() < 1e3 * math.exp(LARGEST_HIDDEN) < 1e-3 * true["span"].abs().max()
    torch.testing.assert_close(grads["span"].double(), bounded, rtol=0, atol=20 * limit * bounded.abs().max().item())


@pytest.mark.parametrize(("backend", "dtype", "limit"), ASKED, ids=str)
def test_scores_far_below_0(answered: Callable[..., Answer], backend: str, dtype: torch.dtype, limit: float) -> None:
    """What is not there, behind the last vector or position, has no score of 0: e^200 would be infinite."""
    made, (expected, true) = low_problem(), low_truth()
    found, grads = answered(backend, LOW, converted(made, dtype), TOLD["spans told"])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5 * limit * expected.abs().max().item())
    for name, gradient in grads.items():
        bound = 20 * limit * true[name].abs().max().item()
        torch.testing.assert_close(gradient.double(), true[name], rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
