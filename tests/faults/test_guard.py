"""Losses and gradients that are not finite, on one rank of a real run: left out on all, told, in the end too many."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Runs
from tests.support.commands import outcome, records

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2", "--micro-batch-size", "2")
LONG = ("--train-iters", "24", "--save-interval", "4")
BF16 = ("--bf16", "--zero-stage", "2")
FAULTS = "nan@7,inf@9,times5@14,nan@20-"


def of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in records(run) if record["kind"] == kind]


@pytest.mark.parametrize(
    "flags", [TP2, *(pytest.param(flags, marks=pytest.mark.faults) for flags in (PP2, BF16, (*TP2, *BF16)))], ids=str
)
def test_bad_steps_are_left_out_told_and_counted_and_too_many_end_the_run(runs: Runs, flags: tuple[str, ...]) -> None:
    """B49 of the public reports. The fault is on rank 1 alone; a loss of the first rank would not show a jump."""
    ended = runs.plain(2, 1, FAULTS, *flags, *LONG)
    assert ended.codes == [4, 4]
    run = runs.folder / "run"
    skips = of(run, "skip")
    assert [skip["step"] for skip in skips] == [7, 9, 20, 21, 22, 23, 24]
    assert skips[0]["reason"].startswith("the gradient is not finite on rank 1 (")
    assert skips[1]["reason"].startswith("the loss is not finite on rank 1 (")
    assert [record["skipped"] for record in of(run, "train")] == [
        *[0] * 6, 1, 1, *[2] * 11, 3, 4, 5, 6, 7
    ]  # fmt: skip
    (line,) = ended.errors
    assert line.startswith("error: step 24: the gradient is not finite on rank 1 (")
    assert line.endswith(
        ". No update is made for 5 steps in a row (--max-nonfinite-steps 5): look at that host and go on from the last "
        "checkpoint, or begin anew at a smaller --lr"
    )
    assert outcome(run) == {"outcome": "guard", "step": 24, "reason": line.removeprefix("error: ")}
    assert (run / "latest").read_text() == "step_00000020\n"
    output = ended.ranks[0].stdout
    assert "step 7: the gradient is not finite on rank 1 (" in output
    assert " No update is made (1 so far); tokens 192 to 224 of each of the 4 streams of " in output


def test_a_save_under_way_ends_before_the_run_does(runs: Runs) -> None:
    flags = ("--train-iters", "24", "--save-interval", "2", "--async-save", "--max-nonfinite-steps", "1")
    ended = runs.plain(2, 1, "nan@3,pause@commit", *TP2, *flags)
    assert ended.codes == [4, 4] and len(ended.errors) == 1
    assert "saved step 2 in run" in ended.ranks[0].stdout
    assert (runs.folder / "run/latest").read_text() == "step_00000002\n"


@pytest.mark.faults
def test_steps_in_a_row_are_counted_over_a_resume(runs: Runs) -> None:
    assert runs.plain(2, 1, "nan@3-", *TP2, "--train-iters", "5", "--save-interval", "5").codes == [0, 0]
    ended = runs.plain(2, 1, "nan@3-", *TP2, "--train-iters", "20", "--load", "run")
    assert ended.codes == [4, 4]
    assert ended.errors[0].startswith("error: step 7: ")


def test_a_loss_that_jumps_is_told_with_its_tokens(runs: Runs) -> None:
    ended = runs.plain(2, 0, "times5@12", "--train-iters", "14")
    assert ended.codes == [0, 0]
    (spike,) = of(runs.folder / "run", "spike")
    assert (spike["step"], spike["position"]) == (12, 11 * 32)
    # rank 0 has half of the streams: (5 + 1) / 2 times its usual
    assert 2.5 < float(spike["loss"]) / float(spike["median"]) < 3.2
    assert "step 12: the loss " in ended.ranks[0].stdout and "; tokens 352 to 384 of each of the 4 streams of " in (
        ended.ranks[0].stdout
    )


def test_weights_that_are_not_finite_are_not_saved(runs: Runs) -> None:
    """A rate at which the first update leaves float32's range."""
    ended = runs.plain(2, 0, "pause@1000", "--lr", "1e38", "--optimizer", "adam", "--save-interval", "1", *TP2)
    assert ended.codes == [4, 4]
    (line,) = ended.errors
    assert "not finite" in line
    assert not list((runs.folder / "run" / "checkpoints").glob("step_*"))
