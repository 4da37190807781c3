"""The eager backend against token-by-token loops: outputs and gradients, in float64."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from megatron_allattn.kernels.eager import attend
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.parallel.random import DropoutKeys
from tests.support.slow_attention import Problem, slow_attend

BATCH, BLOCK, HEADS, SIZE, PERSISTENT, SPAN, RAMP = 2, 5, 3, 4, 6, 12, 3
HIDDEN = HEADS * SIZE
TENSORS = ("block", "query", "key", "value", "persistent_key", "persistent_value", "span", "position")

PLAIN = {"cache_length": SPAN, "window": SPAN, "cached": 100}
CASES = {
    "full cache": {},
    "a window below the span": {"window": 7},
    "a cache longer than the window": {"window": 4, "cache_length": 9},
    "a short cache of zeros that are attended to": {"cache_length": 3},
    "an empty cache that is attended to": {"cache_length": 0, "cached": 0},
    "an empty cache that is masked": {"cache_length": 0, "cached": 0, "empty_cache": "mask"},
    "a cache that is partly filled, masked": {"cached": 4, "empty_cache": "mask"},
    "a cache longer than what it holds and the window, masked": {"window": 5, "cached": 2, "empty_cache": "mask"},
    "a short cache, masked": {"cache_length": 3, "empty_cache": "mask"},
    "no persistent vectors": {"persistent": 0},
    "nothing to look at for the first token": {"persistent": 0, "cache_length": 0, "cached": 0, "empty_cache": "mask"},
    "position values": {"position_values": "shared", "window": 7},
    "position values, masked": {"position_values": "shared", "cached": 4, "empty_cache": "mask"},
    "fixed span": {"adaptive": False},
    "fixed span, masked": {"adaptive": False, "cached": 1, "empty_cache": "mask"},
    "fixed span, a short cache": {"adaptive": False, "cache_length": 2},
    "dropout": {"dropout": (0.3, 2**40 + 5, 9, [7, 3]), "heads": [3, 4, 5], "layer": 2},
    "dropout, window and mask": {"dropout": (0.5, 11, 2**31, [0, 1]), "window": 6, "cached": 3, "empty_cache": "mask"},
    "one token": {"block_length": 1},
    "a window of one": {"window": 1},
}


def make(**changes) -> Problem:
    """A problem of random numbers; keyword arguments as in CASES."""
    options = {**PLAIN, "persistent": PERSISTENT, "adaptive": True, "block_length": BLOCK, **changes}
    cache_length, persistent = options.pop("cache_length"), options.pop("persistent")
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    span = torch.rand((HEADS, 1, 1), generator=generator, dtype=torch.float64) * 0.7
    problem = Problem(
        block=normal(BATCH, options.pop("block_length"), HIDDEN),
        cache=normal(BATCH, cache_length, HIDDEN),
        query=normal(HIDDEN, HIDDEN) / 3,
        key=normal(HIDDEN, HIDDEN) / 3,
        value=normal(HIDDEN, HIDDEN) / 3,
        persistent_key=normal(HEADS, SIZE, persistent) if persistent else None,
        persistent_value=normal(HEADS, persistent, SIZE) if persistent else None,
        span=span if options.pop("adaptive") else None,
        position=normal(1, SIZE, SPAN),
        heads=options.pop("heads", [0, 1, 2]),
        ramp=RAMP,
        **options,
    )
    for name in TENSORS:
        if (tensor := getattr(problem, name)) is not None:
            tensor.requires_grad_()
    return problem


def eager(problem: Problem) -> Tensor:
    """The backend's answer."""
    weights = LayerWeights(
        query=problem.query,
        key=problem.key,
        value=problem.value,
        persistent_key=problem.persistent_key,
        persistent_value=problem.persistent_value,
        span=problem.span,
        position_key=problem.position,
    )
    keys, probability = None, 0.0
    if problem.dropout is not None:
        probability, seed, step, streams = problem.dropout
        keys = DropoutKeys(seed, step, torch.tensor(streams, dtype=torch.int32))
    settings = AttentionSettings(
        max_span=problem.max_span,
        ramp=problem.ramp,
        position_values=problem.position_values,
        empty_cache=problem.empty_cache,
        dropout=probability,
    )
    heads = torch.tensor(problem.heads, dtype=torch.int32)
    state = BlockState(problem.window, problem.cached, heads, problem.layer, keys)
    return attend(problem.block, problem.cache, weights, settings, state)


def gradients(output: Tensor, problem: Problem) -> dict[str, Tensor]:
    """Of a weighted sum of the output, by tensor; zero where nothing arrives."""
    tensors = {name: getattr(problem, name) for name in TENSORS if getattr(problem, name) is not None}
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    grads = torch.autograd.grad(
        (output * weights).sum(), list(tensors.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(tensors, grads, strict=True))


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_outputs_and_gradients_equal_those_of_the_loops(changes) -> None:
    problem = make(**changes)
    found, expected = eager(problem), slow_attend(problem)
    assert found.shape == (BATCH, problem.block.shape[1], HIDDEN)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    true = gradients(expected, problem)
    for name, gradient in gradients(found, problem).items():
        torch.testing.assert_close(
            gradient, true[name], rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("z", [0.0, 0.25, 0.5])
def test_gradient_on_the_border_of_the_mask(z: float) -> None:
    # z·L is whole, so at x = z·L + 1 the mask is exactly 1 and at x = z·L + 1 + R exactly 0: the clamp passes both
    problem = make()
    problem.span = torch.full((HEADS, 1, 1), z, dtype=torch.float64, requires_grad=True)
    found, expected = gradients(eager(problem), problem), gradients(slow_attend(problem), problem)
    torch.testing.assert_close(found["span"], expected["span"], rtol=1e-11, atol=1e-12)
    assert found["span"].abs().min() > 1e-6


@pytest.mark.parametrize("changes", [{}, {"position_values": "shared", "cached": 4, "empty_cache": "mask"}], ids=str)
def test_gradients_equal_finite_differences(changes) -> None:
    problem = make(**changes)

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
    problem = make(window=7)
    half = replace(problem, **{f.name: _half(getattr(problem, f.name)) for f in fields(problem)})
    exact = replace(half, **{f.name: _double(getattr(half, f.name)) for f in fields(problem)})
    found, expected = eager(half), slow_attend(exact)
    assert found.dtype == torch.bfloat16
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-2  # a bfloat16 number has 8 bits


def _half(value):
    return value.detach().bfloat16() if isinstance(value, Tensor) else value


def _double(value):
    return value.double() if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": torch.zeros(BATCH + 1, 3, HIDDEN)}, r"cache \(3, 3, 12\): a block \(2, 5, 12\) needs \[2, C, 12\]"),
        ({"cache": torch.zeros(BATCH, 3, HIDDEN + 1)}, r"cache \(2, 3, 13\)"),
        ({"query": torch.zeros(HIDDEN - SIZE, HIDDEN)}, r"query weight \(8, 12\): 3 heads of 4 need \[12, 12\]"),
        ({"window": SPAN + 1}, "window 13: it must be in 1 … 12, the maximum span"),
        ({"window": 0}, "window 0: it must be in 1 … 12"),
    ],
)
def test_shapes_that_mean_nothing_are_refused(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eager(replace(make(), **change))
