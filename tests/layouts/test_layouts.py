"""One trajectory, any layout: the same losses and gradients as in a single process.

Every TP 1, 2, 4 × PP 1, 2, 4 × DP 1, 2, 4 that fits 8 processes × ZeRO 0-3 (with a pipeline 0, 1) × accumulation 1, 2,
4, in float32 through DeepSpeed, each with both optimizers; and TP × DP in float64 through the plain engine. What else a
layout may have is in test_switches.py. The fast subset runs in `make test`, all of it in `make test-layouts`.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.layouts import BOUNDS, FEW, SIZES, VOCABULARY, Record, Train, check, text
from tests.support.trajectories import OPTIMIZERS, Case

ACCUMULATION = (1, 2, 4)


def float32(tensor: int, pipeline: int, data: int, zero: int, accumulation: int, optimizer: str = "") -> Case:
    """Optimizers take turns if none is given, so that every layout and ZeRO stage has both."""
    turn = ("adagrad", "adam")[(zero + tensor.bit_length() + accumulation.bit_length()) % 2]
    return Case(tensor, data, zero, accumulation, optimizer or turn, "float32", "deepspeed", pipeline)


ALL = [
    float32(*sizes, zero, accumulation)
    for sizes in SIZES
    for zero in (range(4) if sizes[1] == 1 else (0, 1))
    for accumulation in ACCUMULATION
]
FAST = [
    float32(2, 1, 2, 3, 2, "adagrad"),
    float32(2, 2, 1, 1, 2, "adam"),
]
PLAIN = [
    Case(tensor, data, 0, accumulation, optimizer, "float64", "plain")
    for tensor, pipeline, data in SIZES
    for accumulation, optimizer in ((1, "adagrad"), (2, "adam"), (4, "adagrad"))
    if pipeline == 1
]
FAST_PLAIN = [Case(2, 2, 0, 2, "adagrad", "float64", "plain")]


@pytest.mark.parametrize("case", FAST + FAST_PLAIN, ids=str)
def test_some_layouts(case: Case, train: Train, record_property: Record) -> None:
    check(case, train(case, FEW), train(case.single(), FEW), record_property, case.dtype)


@pytest.mark.layouts
@pytest.mark.parametrize("case", ALL + PLAIN, ids=str)
def test_all_layouts(case: Case, train: Train, record_property: Record) -> None:
    check(case, train(case), train(case.single()), record_property, case.dtype)


@pytest.mark.layouts
@pytest.mark.parametrize("case", ALL, ids=str)
def test_stages_and_zero_alone_change_no_bit_of_the_first_loss(case: Case, train: Train) -> None:
    """With equal TP, DP and micro-batches. The gradient's norm is a sum in another order, of the same numbers."""
    beside = float32(case.tensor, 1, case.data, 1, case.accumulation)
    assert train(case).losses[0] == train(beside).losses[0]
    assert train(case).norms[0] == pytest.approx(train(beside).norms[0], rel=2e-7)


CUTS = {2: ((1, 4), (2, 3), (3, 2), (4, 1)), 4: ((2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1))}


@pytest.mark.layouts
@pytest.mark.parametrize(
    "case",
    [
        float32(1, 2, 2, 1, 2),
        float32(2, 2, 1, 0, 4),
        float32(2, 2, 2, 1, 2),
        float32(1, 4, 1, 1, 4),
        float32(2, 4, 1, 1, 2),
    ],
    ids=str,
)
def test_moving_layers_between_stages_changes_no_bit_of_the_first_loss(
    case: Case, train: Train, record_property: Record
) -> None:
    even = train(case)
    for layers in CUTS[case.pipeline]:
        moved = replace(case, layers=layers)
        found = train(moved)
        assert found.losses[0] == even.losses[0]
        check(moved, found, even, record_property, "layers moved between stages, beside an even cut")
        check(moved, found, train(case.single()), record_property, case.dtype)


@pytest.mark.layouts
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_trained_is_what_was_meant(optimizer: str, train: Train, shared) -> None:
    """A vocabulary of which every token occurs and that no TP divides, clipping that is active, spans that grow."""
    tokens = text(shared)
    assert len(np.unique(tokens)) == VOCABULARY and VOCABULARY % 2
    single = train(float32(1, 1, 1, 0, 1, optimizer).single())
    sizes = {name: float(np.sqrt((gradient**2).sum())) for name, gradient in single.gradients.items()}
    clip = OPTIMIZERS[optimizer].clip_grad
    if optimizer == "adagrad":  # of every tensor by itself
        assert sum(size > clip for size in sizes.values()) > 5 and sum(size < clip for size in sizes.values()) > 5
    assert min(single.norms) > clip
    assert single.losses[-1] < single.losses[0] - {"adagrad": 0.1, "adam": 0.05}[optimizer]
    spans = [weight for name, weight in single.weights.items() if name.endswith("span")]
    assert len(spans) == 5 and max(span.max() for span in spans) > 1e-3


def test_every_layout_is_there() -> None:
    """As counted by hand: 8 without a pipeline with 4 stages of ZeRO, 9 with one and 2 of them, times 3."""
    assert len(SIZES) == 17 and len(set(ALL)) == len(ALL) == (8 * 4 + 9 * 2) * 3
    for sizes in SIZES:
        for zero in {case.zero for case in ALL if (case.tensor, case.pipeline, case.data) == sizes}:
            both = {c.optimizer for c in ALL if (c.tensor, c.pipeline, c.data, c.zero) == (*sizes, zero)}
            assert both == set(OPTIMIZERS), (sizes, zero)
    assert BOUNDS["float32"]["losses"] == 1e-5
