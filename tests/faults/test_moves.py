"""A run that moves between layouts at every start: nothing is lost or repeated, and its losses are those of one that
stays."""

from typing import Any

import pytest

from tests.faults.conftest import Runs
from tests.support.commands import records

COMMON = ("--global-batch-size", "12", "--attention-dropout", "0.2", "--save-interval", "2", "--clip-grad", "0.1")
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2", "--micro-batch-size", "3")


def losses(runs: Runs, run: str) -> list[tuple[int, float]]:
    return [(r["step"], float(r["loss"])) for r in records(runs.folder / run) if r["kind"] == "train"]


def positions(runs: Runs, run: str) -> dict[str, Any]:
    import json

    return json.loads((runs.folder / run / "checkpoints/step_00000008/state.json").read_text())["data"]


@pytest.mark.parametrize(
    "course",
    [
        [(4, ()), (2, ()), (3, ())],
        *(
            pytest.param(course, marks=pytest.mark.faults)
            for course in (
                [(2, TP2), (2, PP2), (1, ())],
                [(2, ("--zero-stage", "3")), (4, (*TP2, *PP2)), (2, ("--zero-stage", "0"))],
                [(4, (*TP2, "--zero-stage", "2")), (3, ("--zero-stage", "3")), (4, PP2)],
            )
        ),
    ],
    ids=["dp 4 2 3", "tp pp one", "zero3 tp-pp zero0", "zero2 zero3 pp"],
)
def test_another_layout_at_every_start(runs: Runs, course: list[tuple[int, tuple[str, ...]]]) -> None:
    runs.succeeds(1, *COMMON, "--train-iters", "8", "--save", "whole")
    for number, (count, flags) in enumerate(course):
        last = str((4, 6, 8)[number])
        load = ("--load", "run") if number else ()
        runs.succeeds(count, *COMMON, *flags, *load, "--train-iters", last)
    found, expected = losses(runs, "run"), losses(runs, "whole")
    assert [step for step, _ in found] == [step for step, _ in expected] == list(range(1, 9))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-5)
    assert positions(runs, "run") == positions(runs, "whole")
