"""Problems of one layer's attention at any size, and how a backend and its gradients are asked about them.

The cases are small enough for the loops of slow_attention.py; `truth` has their answers.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.parallel.random import DropoutKeys
from tests.support.slow_attention import Problem, slow_attend

TENSORS = ("block", "query", "key", "value", "persistent_key", "persistent_value", "span", "position")
NORMALIZATIONS = ("span", "window")

SPAN = 12
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
    "position values, no persistent vectors": {"position_values": "shared", "persistent": 0},
    "fixed span": {"adaptive": False},
    "fixed span, masked": {"adaptive": False, "cached": 1, "empty_cache": "mask"},
    "fixed span, a short cache": {"adaptive": False, "cache_length": 2},
    "dropout": {"dropout": (0.3, 2**40 + 5, 9, [7, 3]), "heads": [3, 4, 5], "layer": 2},
    "dropout, window and mask": {"dropout": (0.5, 11, 2**31, [0, 1]), "window": 6, "cached": 3, "empty_cache": "mask"},
    "one token": {"block_length": 1},
    "a window of one": {"window": 1},
}


def make(
    *,
    batch: int = 2,
    block_length: int = 5,
    num_heads: int = 3,
    size: int = 4,
    persistent: int = 6,
    max_span: int = SPAN,
    cache_length: int | None = None,
    window: int | None = None,
    cached: int = 10**6,
    ramp: int = 3,
    adaptive: bool = True,
    z: Sequence[float] | None = None,
    heads: list[int] | None = None,
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
    **options,
) -> Problem:
    """A problem of random numbers, its tensors leaves that require gradient.

    cache_length and window: the maximum span unless given; z: of every head, else below 0.7; options: Problem fields.
    """
    generator, hidden = torch.Generator().manual_seed(seed), num_heads * size

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    spans = torch.rand((num_heads, 1, 1), generator=generator, dtype=torch.float64) * 0.7
    if z is not None:
        spans = torch.tensor(z, dtype=torch.float64).view(num_heads, 1, 1)
    small = hidden**-0.5
    problem = Problem(
        block=normal(batch, block_length, hidden),
        cache=normal(batch, max_span if cache_length is None else cache_length, hidden),
        query=normal(hidden, hidden) * small,
        key=normal(hidden, hidden) * small,
        value=normal(hidden, hidden) * small,
        persistent_key=normal(num_heads, size, persistent) if persistent else None,
        persistent_value=normal(num_heads, persistent, size) if persistent else None,
        span=spans if adaptive else None,
        position=normal(1, size, max_span),
        heads=list(range(num_heads)) if heads is None else heads,
        window=max_span if window is None else window,
        cached=cached,
        ramp=ramp,
        **options,
    )
    return converted(problem, dtype)


def converted(problem: Problem, dtype: torch.dtype) -> Problem:
    """The same problem with its tensors in another type, as leaves that require gradient (the cache does not)."""
    values = dict(vars(problem))
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = value.detach().to(dtype).requires_grad_(name in TENSORS)
    return Problem(**values)


def answer(
    attend: Attend, problem: Problem, spans: tuple[int, ...] | None = None, *, keep_projections: bool = True
) -> Tensor:
    """A backend's output [B, M, H·K]; spans: how far each head is said to look."""
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
        normalization=problem.normalization,
        keep_projections=keep_projections,
    )
    heads = torch.tensor(problem.heads, dtype=torch.int32)
    state = BlockState(problem.window, problem.cached, heads, problem.layer, keys, spans)
    return attend(problem.block, problem.cache, weights, settings, state)


def gradients(output: Tensor, problem: Problem) -> dict[str, Tensor]:
    """Of a sum of the output in which every element counts differently, by tensor; zero where nothing arrives."""
    tensors = {name: getattr(problem, name) for name in TENSORS if getattr(problem, name) is not None}
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).sin().to(output.dtype).view_as(output)
    grads = torch.autograd.grad(
        (output * weights).sum(), list(tensors.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(tensors, grads, strict=True))


@cache
def truth(case: str, normalization: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of one of CASES, by loops."""
    problem = make(**CASES[case], normalization=normalization)
    output = slow_attend(problem)
    return output.detach(), gradients(output, problem)


def far(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest element (to `least` where that is smaller)."""
    difference = (found.double() - expected.double()).abs().max().item()
    return difference / max(expected.double().abs().max().item(), least, 1e-30)


def assert_same(attend: Attend, problem: Problem, reference: Attend, tolerance: float = 1e-12, **options) -> None:
    """Output and every gradient of a backend equal those of another within `tolerance` of a tensor's largest element.

    options: as of `answer`, for `attend` alone.
    """
    found, expected = answer(attend, problem, **options), answer(reference, problem)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    compare(found, gradients(found, problem), expected.detach(), gradients(expected, problem), tolerance)


def compare(
    output: Tensor, grads: dict[str, Tensor], expected: Tensor, true: dict[str, Tensor], tolerance: float
) -> None:
    """Output and gradients by tensor, each relative to its largest element; nothing may be NaN."""
    assert grads.keys() == true.keys()
    # a gradient that is zero but for rounding is compared with the size that gradients have
    size = max(gradient.double().abs().max().item() for gradient in true.values())
    differences = {"output": far(output, expected)}
    for name, gradient in true.items():
        assert grads[name].shape == gradient.shape and grads[name].dtype == gradient.dtype
        differences[name] = far(grads[name], gradient, least=1e-6 * size)
    wrong = {name: difference for name, difference in differences.items() if not difference <= tolerance}
    assert not wrong, wrong
