"""The blocked backend: outputs and gradients against loops and against eager in float64, and what its work follows."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.compiled import load_library
from megatron_allattn.model.span import look_back
from megatron_allattn.parallel import products
from tests.support.attention_problems import (
    CASES,
    NORMALIZATIONS,
    TENSORS,
    answer,
    assert_same,
    compare,
    converted,
    far,
    gradients,
    make,
    truth,
)
from tests.support.slow_attention import Problem

Make = Callable[[], Blocked]
DROPOUT = (0.3, 2**35 + 3, 17, [4, 0, 2, 9])  # of a batch of four


@pytest.fixture(params=["compiled heads", "heads of PyTorch"])
def blocked(request: pytest.FixtureRequest) -> Make:
    """Makes a backend."""
    if request.param == "heads of PyTorch":
        return lambda: Blocked(None)
    library, how = load_library()
    if library is None:
        pytest.skip(how)
    return lambda: Blocked(library)


def seen(problem: Problem) -> tuple[int, ...]:
    """How far each head looks, as the engine tells a backend."""
    assert problem.span is not None
    return tuple(look_back(z, problem.window, problem.max_span, problem.ramp) for z in problem.span.flatten().tolist())


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_those_of_the_loops(blocked: Make, case: str, normalization: str) -> None:
    problem = make(**CASES[case], normalization=normalization)
    found = answer(blocked(), problem)
    compare(found, gradients(found, problem), *truth(case, normalization), tolerance=1e-12)


LARGER = {
    "two tiles": {"block_length": 65},
    "a tile and a row": {"block_length": 64, "cache_length": 33},
    "three tiles, N = 1000, dropout": {"block_length": 130, "persistent": 1000, "dropout": DROPOUT, "batch": 4},
    "many streams in several units": {"block_length": 65, "batch": 37, "size": 2, "num_heads": 1, "max_span": 8},
    "a block longer than a unit, a tile less than its last": {"block_length": 1090, "batch": 2, "num_heads": 1},
    "streams each longer than a unit, masked": {
        "block_length": 1030,
        "num_heads": 1,
        "cached": 7,
        "empty_cache": "mask",
        "dropout": (0.5, 1, 1, [3, 8]),
    },
    "one head of one": {"num_heads": 1, "size": 1, "persistent": 1, "max_span": 1, "ramp": 1},
    "everything odd": {"block_length": 67, "max_span": 41, "persistent": 7, "size": 5, "cache_length": 29},
    "everything odd, dropout": {"block_length": 67, "max_span": 41, "persistent": 7, "dropout": DROPOUT, "batch": 4},
    "odd, position values": {"block_length": 9, "max_span": 17, "persistent": 3, "position_values": "shared"},
    "no vectors, dropout, nothing cached": {
        "persistent": 0,
        "batch": 4,
        "dropout": DROPOUT,
        "cache_length": 0,
        "cached": 0,
        "empty_cache": "mask",
        "block_length": 70,
        "max_span": 30,
    },
    "a cache that is longer than the span": {"cache_length": 60, "max_span": 25, "window": 25},
    "a block shorter than the span": {"block_length": 3, "max_span": 200, "cache_length": 150},
    "a block that is longer than the span, no cache": {"block_length": 100, "max_span": 10, "cache_length": 0},
    "fixed span, two tiles, dropout": {"adaptive": False, "block_length": 66, "dropout": DROPOUT, "batch": 4},
}


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("case", LARGER)
def test_larger_problems_equal_eager(blocked: Make, case: str, normalization: str) -> None:
    assert_same(blocked(), make(**LARGER[case], normalization=normalization), eager.attend)


@pytest.mark.parametrize("seed", range(40))
def test_problems_of_any_size_equal_eager(blocked: Make, seed: int) -> None:
    choose = random.Random(seed)
    max_span = choose.randint(1, 90)
    window, batch, num_heads = choose.randint(1, max_span), choose.randint(1, 5), choose.randint(1, 4)
    cache_length, ramp = choose.choice([0, choose.randint(0, 120)]), choose.randint(1, 40)
    problem = make(
        batch=batch,
        block_length=choose.choice([1, 2, 5, 63, 64, 65, 129]),
        num_heads=num_heads,
        size=choose.randint(1, 7),
        persistent=choose.choice([0, 1, 2, 31]),
        max_span=max_span,
        window=window,
        cache_length=cache_length,
        cached=choose.randint(0, cache_length),
        ramp=ramp,
        adaptive=choose.random() < 0.8,
        z=[choose.choice([0, 1, choose.random(), choose.randint(0, max_span) / max_span]) for _ in range(num_heads)],
        seed=seed,
        empty_cache=choose.choice(["attend", "mask"]),
        position_values=choose.choice(["none", "shared"]),
        normalization=choose.choice(NORMALIZATIONS),
        layer=choose.randint(0, 40),
        dropout=choose.choice([None, (choose.uniform(0.001, 0.95), seed, 3, list(range(seed, seed + batch)))]),
    )
    if problem.span is None:
        assert_same(blocked(), problem, eager.attend)
    elif problem.window >= min(max_span, max(seen(replace(problem, window=max_span)))):
        assert_same(blocked(), problem, eager.attend, spans=seen(problem))
    else:  # the window cuts the longest head, which no run does; it must be right all the same
        assert_same(blocked(), problem, eager.attend)


# L = 16, R = 4: z·L is whole or not, at both ends of the range and within the ramp of them
ENDS = [0.0, 1 / 16, 0.5, 0.52, 0.75, 13 / 16, 0.99, 1.0]


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("dropout", [None, (0.4, 5, 6, [1, 2])], ids=["", "dropout"])
def test_spans_from_the_least_to_the_longest_in_one_layer(blocked: Make, dropout, normalization: str) -> None:
    problem = make(
        num_heads=8, size=3, max_span=16, ramp=4, z=ENDS, block_length=33, dropout=dropout, normalization=normalization
    )
    assert seen(problem) == (5, 6, 13, 14, 16, 16, 16, 16)
    assert_same(blocked(), problem, eager.attend, spans=seen(problem))


@pytest.mark.parametrize("z", [0.0, 0.25, 0.5])
def test_the_masks_last_distance_has_no_weight_but_a_gradient(blocked: Make, z: float) -> None:
    """Where z·L is whole the distance R + z·L + 1 has m = 0 and, as in the paper's code, a gradient.

    A mask that is a shade shorter has the same weights without that gradient: what a bias of log m would give.
    """
    problem = make(num_heads=1, max_span=16, ramp=4, z=[z], block_length=33, normalization="span")
    shade = make(num_heads=1, max_span=16, ramp=4, z=[z - 1e-9], block_length=33, normalization="span")
    true, without = (gradients(answer(eager.attend, p), p)["span"] for p in (problem, shade))
    assert far(without, true) > 0.05
    for spans in (None, seen(problem)):
        assert far(gradients(answer(blocked(), problem, spans), problem)["span"], true) < 1e-12


def test_the_masks_first_distance_below_one_has_a_gradient_too(blocked: Make) -> None:
    """At x = z·L + 1 the unclamped mask is exactly 1, and the clamp passes its gradient; a shade more does not."""
    problem = make(num_heads=1, max_span=16, ramp=4, z=[0.5], block_length=33, normalization="span")
    shade = make(num_heads=1, max_span=16, ramp=4, z=[0.5 + 1e-9], block_length=33, normalization="span")
    true, without = (gradients(answer(eager.attend, p), p)["span"] for p in (problem, shade))
    assert far(without, true) > 0.05
    assert far(gradients(answer(blocked(), problem), problem)["span"], true) < 1e-12


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_spans_are_a_matter_of_work_and_not_of_value(blocked: Make, normalization: str) -> None:
    problem = make(
        batch=4, num_heads=4, max_span=150, ramp=8, z=[0.0, 0.11, 0.5, 0.3], block_length=70, dropout=DROPOUT,
        window=86, normalization=normalization,
    )  # fmt: skip
    whole = answer(blocked(), problem)
    follows = answer(blocked(), problem, seen(problem))
    expected = gradients(whole, problem)
    compare(follows, gradients(follows, problem), whole.detach(), expected, tolerance=1e-12)


def half_errors(blocked: Make, problem: Problem, dtype: torch.dtype) -> dict[str, float]:
    """Differences of output and gradients from those in float64 of the same numbers."""
    low, exact = converted(problem, dtype), converted(converted(problem, dtype), torch.float64)
    found, expected = answer(blocked(), low, seen(low)), answer(eager.attend, exact)
    assert found.dtype == dtype
    errors = {"output": far(found, expected)}
    true = gradients(expected, exact)
    for name, gradient in gradients(found, low).items():
        assert gradient.dtype == dtype
        errors[name] = far(gradient, true[name])
    return errors


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
def test_lower_precision_is_near(monkeypatch: pytest.MonkeyPatch, blocked: Make, dropout, normalization: str) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)  # test_widened.py is about the other case
    problem = make(
        batch=4, num_heads=2, size=16, persistent=33, max_span=64, ramp=16, z=[0.25, 0.6], block_length=70,
        dropout=dropout, normalization=normalization,
    )  # fmt: skip
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        errors = half_errors(blocked, problem, dtype)
        assert {name: error for name, error in errors.items() if not error < limit} == {}


def test_without_gradient_the_output_is_the_same(blocked: Make) -> None:
    problem = make(batch=4, dropout=DROPOUT, block_length=9)
    expected = answer(blocked(), problem).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = answer(blocked(), problem)
        assert not found.requires_grad
        assert torch.equal(found, expected)


def test_training_after_inference_mode(blocked: Make) -> None:
    """Scratch memory that was made under it is written to outside of it."""
    for normalization in NORMALIZATIONS:
        attend, problem = blocked(), make(batch=4, dropout=DROPOUT, block_length=9, normalization=normalization)
        with torch.inference_mode():
            expected = answer(attend, problem).clone()
        found = answer(attend, problem)
        assert torch.equal(found, expected)
        assert all(gradient.isfinite().all() for gradient in gradients(found, problem).values())


def test_gradients_of_some_tensors_alone(blocked: Make) -> None:
    problem = make(normalization="span")
    everything = gradients(answer(blocked(), problem), problem)
    for name in TENSORS:
        frozen = replace(problem, **{n: getattr(problem, n).detach() for n in TENSORS if n != name})
        output = answer(blocked(), frozen)
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).sin().view_as(output)
        (found,) = torch.autograd.grad((output * weights).sum(), getattr(frozen, name))
        torch.testing.assert_close(found, everything[name], rtol=1e-12, atol=1e-13)


def test_calls_that_overlap_do_not_disturb_each_other(blocked: Make) -> None:
    """Layers share a backend's scratch memory; backward comes after other forwards, of other sizes and kinds."""
    attend = blocked()
    problems = [
        make(seed=1, batch=4, dropout=DROPOUT, block_length=66, normalization="span"),
        make(seed=2, max_span=40, persistent=50, block_length=7, normalization="window"),
        make(seed=3, adaptive=False, persistent=0, cache_length=0, block_length=130),
        make(seed=4, batch=1, num_heads=5, size=2, max_span=9, position_values="shared", normalization="span"),
    ]
    outputs = [answer(attend, problem) for problem in problems]
    kept = [output.detach().clone() for output in outputs]
    found = [gradients(output, problem) for output, problem in zip(outputs, problems, strict=True)]
    for problem, output, before, grads in zip(problems, outputs, kept, found, strict=True):
        assert torch.equal(output, before)
        expected = answer(eager.attend, problem)
        compare(output, grads, expected.detach(), gradients(expected, problem), tolerance=1e-12)


@pytest.mark.parametrize("normalization", ["span", "window"])
def test_heads_of_pytorch_take_turns_with_the_same_memory(normalization: str) -> None:
    """What they work with is that of one head: model/activation_backends.py predicts it so."""
    held = []
    for count in (1, 5):
        problem = make(num_heads=count, z=[0.6] * count, batch=3, block_length=70, normalization=normalization)
        backend = Blocked(None)
        gradients(answer(backend, problem), problem)
        held.append(backend.scratch_bytes)
    assert held[0] == held[1] > 0


def test_a_second_call_gives_the_same_bits(blocked: Make) -> None:
    problem, attend = make(batch=4, dropout=DROPOUT, block_length=66, max_span=30), blocked()
    first, second = (answer(attend, problem) for _ in range(2))
    assert torch.equal(first, second)
    for one, other in zip(gradients(first, problem).values(), gradients(second, problem).values(), strict=True):
        assert torch.equal(one, other)


class Elements(TorchDispatchMode):
    """Counts the elements that operators go over: of each, its largest tensor. Views and fresh memory cost nothing."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket is not torch.ops.aten.empty:
            tensors = [t for t in (*args, *(kwargs or {}).values(), result) if isinstance(t, Tensor)]
            self.total += max((t.numel() for t in tensors), default=0)
        return result


def work(spans: tuple[int, ...], window: int, max_span: int, backward: bool = True) -> tuple[int, int]:
    """Operations of products, and elements gone over by all operators, in one step of two heads."""
    problem = make(
        batch=3, num_heads=2, size=8, persistent=10, block_length=64, max_span=max_span, window=window, ramp=2,
        z=[(span - 3) / max_span for span in spans], dropout=(0.3, 1, 1, [0, 1, 2]), normalization="span",
    )  # fmt: skip
    # compiled heads are no operators
    flops, elements, attend = FlopCounterMode(display=False), Elements(), Blocked(None)
    with flops, elements:
        output = answer(attend, problem, spans)
        if backward:
            output.sum().backward()
    return flops.get_total_flops(), elements.total


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
def test_work_is_that_of_the_sum_of_the_spans(backward: bool) -> None:
    short, mixed, long = (work(spans, 512, 512, backward) for spans in ((48, 48), (48, 432), (432, 432)))
    assert mixed[0] == (short[0] + long[0]) / 2
    assert mixed[1] == pytest.approx((short[1] + long[1]) / 2, rel=0.01)
    middle = work((240, 240), 512, 512, backward)
    assert middle[0] == mixed[0]
    assert middle[1] == pytest.approx(mixed[1], rel=0.01)
    assert short[0] < 0.4 * long[0] and short[1] < 0.4 * long[1]


def test_work_does_not_follow_the_window_or_the_maximum_span() -> None:
    flops, elements = work((40, 100), window=128, max_span=128)
    for window, max_span in ((128, 1024), (1024, 1024)):
        more_flops, more_elements = work((40, 100), window, max_span)
        assert more_flops == flops
        assert more_elements - elements < 8 * 8 * (1024 - 128)  # the table of positions and its gradient, [K, L]


@pytest.mark.parametrize("keep_projections", [True, False])
def test_no_scores_are_kept_for_backward(blocked: Make, keep_projections: bool) -> None:
    """Of the block, what is kept is q, k and v or nothing, however many persistent vectors and positions there are."""
    problem = make(
        batch=2, num_heads=2, size=4, persistent=500, max_span=400, block_length=64, dropout=(0.3, 1, 1, [0, 1])
    )
    given = {t.untyped_storage().data_ptr() for t in vars(problem).values() if isinstance(t, Tensor)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = answer(blocked(), problem, keep_projections=keep_projections)
    of_the_block = output.numel() * output.element_size()
    assert sum(kept.values()) == (3 * of_the_block if keep_projections else 0)
    expected = answer(blocked(), problem)
    assert torch.equal(output, expected)
    for one, other in zip(gradients(output, problem).values(), gradients(expected, problem).values(), strict=True):
        assert torch.equal(one, other)
