"""A run in float16: what it says of steps that overflow, and that it goes on from a checkpoint with the same scale."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, TINY, Finished, corpus, records, run
from tests.support.template import Template

POWER = 24  # a loss scale of 2^24: too large at first
FLAGS = [
    "--fp16",
    "--log-interval",
    "1",
    "--span-loss",
    "1e-4",
    "--attention-dropout",
    "0.1",
    "--save",
    "run",
    "--no-report",
]


def pretrain(template: Template, folder: Path, data: Path, *flags: str) -> Finished:
    program = str(ROOT / "tests" / "support" / "half.py")
    arguments = [*TINY, *FLAGS, "--data-path", str(data), *flags]
    command, path = (sys.executable, program, str(POWER), *arguments), {"PYTHONPATH": str(ROOT)}
    done = run(*command, folder=folder, variables=path, template=template)
    assert done.returncode == 0, done.output
    return done


def trained(folder: Path) -> list[dict[str, Any]]:
    rows = [row for row in records(folder / "run") if row["kind"] == "train"]
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("data"))


def test_overflows_are_told_and_counted_and_survive_a_restart(data: Path, tmp_path: Path, template: Template) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    done = pretrain(template, whole, data, "--train-iters", "12")
    rows = trained(whole)
    scales, skipped = [float(row["loss_scale"]) for row in rows], [row["skipped"] for row in rows]
    count = skipped[-1]
    assert 3 <= count <= 10 and skipped == [min(step, count) for step in range(1, 13)]
    # the first overflow only warns, then each halves the scale
    assert scales == [2.0**POWER / 2.0 ** max(0, min(step, count) - 1) for step in range(12)]
    assert [row["grad_norm"] is None for row in rows] == [step <= count for step in range(1, 13)]
    assert [row["tokens"] for row in rows] == [128 * step for step in range(1, 13)]
    lines = [line for line in done.stdout.splitlines() if "overflows" in line]
    assert len(lines) == count and lines[1] == (
        "step 2: the gradient overflows float16 at loss scale 16,777,216, no update is made (2 so far); "
        "the next step has loss scale 8,388,608"
    )
    assert "grad norm too large" in done.stdout and done.stderr == ""

    pretrain(template, parts, data, "--train-iters", "2")
    state = json.loads((parts / "run/checkpoints/step_00000002/state.json").read_text())
    assert state["skipped"] == 2
    assert state["loss_scale"] == {
        "cur_scale": 2.0**23,
        "cur_iter": 2,
        "last_overflow_iter": 1,
        "cur_hysteresis": 1,
    }
    pretrain(template, parts, data, "--train-iters", "12", "--load", "run")
    assert trained(parts) == rows
