"""What a layout may have besides: sequence parallelism, shared caches, recomputation, offload, bfloat16, the backend.

Every two of these values, and of the layout's own, meet in one of the cases (tests/support/pairwise.py).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.layouts import DEEP, FEW, STEPS, Record, Train, check, note
from tests.support.pairwise import legal_combinations, pairs_of, pairwise
from tests.support.trajectories import Case, differences, spread_tokens

VALUES: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 4),
    "pipeline": (1, 2, 4),
    "data": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "accumulation": (1, 2, 4),
    "optimizer": ("adagrad", "adam"),
    "sequence": (False, True),
    "shard_caches": (False, True),
    "recompute": ("none", "selective", "full"),
    "backend": ("eager", "blocked"),
    "offload": (False, True),
}


def legal(one: dict[str, Any]) -> bool:
    return (
        one["tensor"] * one["pipeline"] * one["data"] <= 8
        and (one["pipeline"] == 1 or one["zero"] < 2)
        and (one["tensor"] > 1 or not (one["sequence"] or one["shard_caches"]))
        and (one["backend"] == "blocked" or one["recompute"] != "selective")
        and (one["zero"] > 0 or not one["offload"])
    )


LEGAL = legal_combinations(VALUES, legal)
CASES = [Case(dtype="float32", engine="deepspeed", **one) for one in pairwise(LEGAL)]
FAST = [
    Case(2, 1, 1, 2, "adagrad", "float32", "deepspeed", 2, sequence=True, shard_caches=True),
    Case(1, 2, 1, 2, "adam", "float32", "deepspeed", 2, backend="blocked", recompute="full", offload=True),
]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_some_switches_together(case: Case, train: Train, record_property: Record) -> None:
    check(case, train(case, FEW), train(case.single(), FEW), record_property, "float32, with some switches together")


@pytest.mark.layouts
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_two_switches_together(case: Case, train: Train, record_property: Record) -> None:
    check(case, train(case), train(case.single()), record_property, "float32, with every two switches together")


def test_all_pairs_are_there_in_few_cases() -> None:
    wanted = set().union(*map(pairs_of, LEGAL))
    chosen = [{name: getattr(case, name) for name in VALUES} for case in CASES]
    assert set().union(*map(pairs_of, chosen)) == wanted
    assert all(map(legal, chosen)) and len(CASES) <= 30


OFFLOADED = [
    Case(tensor, data, zero, accumulation, optimizer, dtype, "deepspeed", pipeline)
    for dtype in ("float32", "bfloat16")
    for tensor, pipeline, data, zero, accumulation, optimizer in (
        (1, 1, 2, 1, 2, "adam"),
        (2, 1, 2, 2, 1, "adagrad"),
        (2, 1, 2, 3, 2, "adam"),
        (1, 2, 2, 1, 2, "adagrad"),
        (2, 2, 1, 1, 4, "adam"),
        (1, 4, 2, 1, 1, "adagrad"),
    )
]


@pytest.mark.layouts
@pytest.mark.parametrize("case", OFFLOADED, ids=str)
def test_where_the_optimizers_state_is_changes_nothing(case: Case, train: Train, record_property: Record) -> None:
    """With a pipeline, too: no bit before the first update. The norm of all gradients, by which Adam's are clipped, is
    a sum in another order then, and a bfloat16 weight may round the other way; Adagrad's are clipped by tensor.
    """
    found, beside = train(replace(case, offload=True)), train(case)
    far = differences(found, beside)
    note(case, far, record_property, "offloaded beside not offloaded, float32 and bfloat16")
    assert (far["first loss"], far["gradients"]) == (0, 0), far
    rounds = case.dtype == "bfloat16" and case.optimizer == "adam"
    assert far["first norm"] <= 1e-6 and far["losses"] <= (4e-4 if rounds else 1e-5), far
    np.testing.assert_allclose(found.norms, beside.norms, rtol=2e-3 if rounds else 1e-5)


SPREAD = [
    Case(2, 1, 1, 2, "adagrad", "float32", "deepspeed", spread=True, backend="blocked"),
    Case(2, 2, 3, 2, "adagrad", "float32", "deepspeed", spread=True),
    Case(2, 2, 1, 2, "adagrad", "float32", "deepspeed", 2, sequence=True, shard_caches=True, spread=True),
    Case(1, 2, 1, 2, "adagrad", "float32", "deepspeed", 4, recompute="full", spread=True),
    Case(4, 1, 0, 4, "adagrad", "float32", "deepspeed", 2, spread=True, backend="blocked"),
]


@pytest.mark.parametrize(
    ("case", "steps"), [(SPREAD[0], FEW), *(pytest.param(c, STEPS, marks=pytest.mark.layouts) for c in SPREAD)], ids=str
)
def test_spans_that_differ_and_move(case: Case, steps: int, train: Train, record_property: Record) -> None:
    """Every layer keeps a cache of its own length, and lengths change on the way."""
    found, single = train(case, steps), train(case.single(), steps)
    check(case, found, single, record_property, "float32, heads with spans of their own")
    length, moved = DEEP.max_attention_span, 0
    for layer in range(DEEP.num_layers):
        z = single.weights[f"layers.{layer}.span"].flatten()
        before = [spread_tokens(layer, head) for head in range(len(z))]
        moved += sum(np.ceil(length * z) != np.ceil(before))
    assert moved > 5, moved


RECOMPUTED = [
    Case(2, 1, 0, 4, "adagrad", "float32", "deepspeed", backend="blocked"),
    Case(1, 4, 2, 1, "adam", "float32", "deepspeed", backend="blocked"),
    Case(2, 2, 3, 2, "adagrad", "float32", "deepspeed", backend="blocked"),
    Case(4, 2, 1, 1, "adam", "float32", "deepspeed", sequence=True, shard_caches=True, backend="blocked"),
    Case(1, 2, 1, 4, "adam", "float32", "deepspeed", 2, backend="blocked"),
    Case(2, 1, 0, 2, "adagrad", "float32", "deepspeed", 4, backend="blocked"),
    Case(2, 2, 1, 2, "adagrad", "bfloat16", "deepspeed", 2, sequence=True, backend="blocked"),
    Case(1, 2, 2, 2, "adam", "bfloat16", "deepspeed", backend="blocked"),
    Case(2, 1, 1, 2, "adam", "float32", "deepspeed", 2),
]


@pytest.mark.layouts
@pytest.mark.parametrize("case", RECOMPUTED, ids=str)
def test_recomputation_changes_no_bit(case: Case, train: Train) -> None:
    """Of 30 losses and norms, of the first gradients and of the last weights."""
    kept = train(case)
    for again in ("selective", "full") if case.backend == "blocked" else ("full",):
        found = train(replace(case, recompute=again))
        assert (found.losses, found.norms) == (kept.losses, kept.norms)
        for name, weight in kept.weights.items():
            assert np.array_equal(found.weights[name], weight), name
            assert np.array_equal(found.gradients[name], kept.gradients[name]), name
