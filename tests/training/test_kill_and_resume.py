"""A run that is killed again and again ends with the same bits as one that is left alone.

Tensor parallel over two processes, ZeRO 1, dropout and adaptive span on, a plateau that ends the run, streams that
start anew before and after the kills; checkpoints every three steps.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import PRETRAIN, TINY, Finished, corpus, outcome, plain_ranks, records, run, run_ranks
from tests.support.template import Template

STEPS, SAVE_INTERVAL = 16, 3
FLAGS = [
    *("--num-layers", "3", "--hidden-size", "96", "--num-attention-heads", "4", "--persistent-memory-size", "64"),
    *("--max-attention-span", "192", "--seq-length", "64", "--global-batch-size", "8", "--micro-batch-size", "4"),
    *("--attention-dropout", "0.2", "--embedding-dropout", "0.1", "--span-loss", "0.001", "--zero-stage", "1"),
    # the evaluation of step 10 is not better than that of step 5 by 9 nats: six more steps
    *("--optimizer", "adam", "--lr", "0.002", "--lr-warmup-iters", "4", "--lr-decay-style", "plateau"),
    *("--plateau-patience", "1", "--plateau-threshold", "9", "--plateau-iters", str(STEPS - 10)),
    *("--clip-grad", "0.5", "--train-iters", "1000", "--eval-interval", "5", "--log-interval", "1"),
    *("--tensor-model-parallel-size", "2", "--save-interval", str(SAVE_INTERVAL), "--save", "run"),
]
Record = dict[str, Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Streams of about 400 tokens, which start anew after six steps."""
    return corpus(tmp_path_factory.mktemp("data"), num_words=1400, split="6,2,2")


def found(folder: Path) -> list[Record]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def step_of(record: Record) -> int:
    return int(record["step"])


def saved_step(folder: Path) -> int:
    return int((folder / "run" / "latest").read_text().removeprefix("step_"))


def tensors_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every tensor file of the last checkpoint."""
    manifest = json.loads((folder / "run" / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}


def without_speed(folder: Path) -> list[Record]:
    return [{k: v for k, v in record.items() if k != "tokens_per_second"} for record in records(folder / "run")]


@dataclass(frozen=True)
class Killed:
    """A start that was ended by force: how each rank has ended, and metrics.jsonl afterwards."""

    ranks: list[Finished]
    left: list[Record]


def start_and_kill(
    template: Template, folder: Path, *flags: str, when: Callable[[Record], bool], whom: Sequence[int] = (0, 1)
) -> Killed:
    """Start a run, kill -9 these ranks as soon as it has written such a record, and wait for both."""
    with plain_ranks(2, *FLAGS, *flags, folder=folder, template=template) as ranks:
        deadline = time.monotonic() + 240
        while "layout " not in ranks[0].stdout or not any(when(record) for record in found(folder)):
            alive = all(program.process.poll() is None for program in ranks)
            assert alive and time.monotonic() < deadline, ranks[0].stdout + ranks[0].stderr
            time.sleep(0.002)
        for rank in whom:
            ranks[rank].process.kill()
        return Killed([program.wait() for program in ranks], found(folder))


def check_resumed(output: str, step: int, dropped: int) -> None:
    assert f"note        resumed from run/checkpoints/step_{step:08d}" in output
    again = f"note        metrics.jsonl: records after step {step} are made again (dropped {dropped})"
    assert (again in output) == (dropped > 0)


@pytest.mark.faults
def test_killed_run_goes_on_bitwise(data: Path, tmp_path: Path, template: Template) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    alone.mkdir()
    killed.mkdir()
    begin = ["--data-path", str(data)]
    resume = [*begin, "--load", "run"]
    for done in run_ranks(2, *FLAGS, *begin, folder=alone, template=template):
        assert (done.returncode, done.stderr) == (0, "")
    expected = without_speed(alone)
    assert [record["step"] for record in expected if record["kind"] == "train"] == list(range(1, STEPS + 1))
    assert sorted(path.name for path in (alone / "run" / "checkpoints").iterdir()) == [
        *(f"step_{step:08d}" for step in range(SAVE_INTERVAL, STEPS, SAVE_INTERVAL)),
        f"step_{STEPS:08d}",
    ]
    evaluations = [(record["kind"], record["step"]) for record in expected if record["kind"] != "train"]
    assert evaluations == [
        *(("valid", 5), ("valid", 10), ("plateau", 10), ("valid", 15)),
        *(("valid", STEPS), ("test", STEPS)),
    ]

    first = start_and_kill(template, killed, *begin, when=lambda record: step_of(record) >= 7)
    assert [rank.returncode for rank in first.ranks] == [-signal.SIGKILL] * 2
    step = saved_step(killed)
    assert 6 <= step <= step_of(first.left[-1]) < STEPS - 3
    assert not (killed / "run" / "outcome.json").exists()

    second = start_and_kill(template, killed, *resume, when=lambda record: step_of(record) >= 12, whom=[1])
    check_resumed(second.ranks[0].stdout, step, sum(step_of(record) > step for record in first.left))
    assert second.ranks[0].returncode == 1
    assert second.ranks[0].stderr.startswith("error: rank 1 is gone: rank 0 lost the connection in the ")
    assert second.ranks[0].stderr.count("\n") == 1
    assert outcome(killed / "run")["outcome"] == "failed"
    step = saved_step(killed)
    assert 9 <= step <= step_of(second.left[-1]) < STEPS

    # while it evaluates for the last time, after the last checkpoint
    third = start_and_kill(
        template, killed, *resume, when=lambda record: (record["kind"], record["step"]) == ("valid", STEPS)
    )
    check_resumed(third.ranks[0].stdout, step, sum(step_of(record) > step for record in second.left))
    assert saved_step(killed) == STEPS

    last, _ = run_ranks(2, *FLAGS, *resume, folder=killed, template=template)
    assert (last.returncode, last.stderr) == (0, "")
    check_resumed(last.stdout, STEPS, sum(record["kind"] != "train" for record in third.left[-2:]))
    assert outcome(killed / "run") == {
        "outcome": "done",
        "step": STEPS,
        "reason": "reached --plateau-iters 6 after the plateau of step 10",
    }
    assert without_speed(killed) == expected
    assert tensors_of(killed) == tensors_of(alone)


def test_killed_before_the_end_of_the_first_save(data: Path, tmp_path: Path, template: Template) -> None:
    """A batch system starts the same line again; with nothing to resume from it begins anew, as if nothing had been."""
    checkpoints = tmp_path / "run" / "checkpoints"
    for left in (".step_00000003.tmp-99", "step_00000003"):
        (checkpoints / left).mkdir(parents=True)
        (checkpoints / left / "manifest.json").write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 9.0}\n{"kind": "tr')
    flags = ["--data-path", str(data), "--load", "run", *("--save", "run", "--train-iters", "3")]
    done = run(sys.executable, PRETRAIN, *TINY, *flags, folder=tmp_path, template=template)
    assert (done.returncode, done.stderr) == (0, "")
    assert "note        no checkpoint in run yet: starting from step 0" in done.stdout
    assert "note        metrics.jsonl: records after step 0 are made again (dropped 1)" in done.stdout
    assert [(r["kind"], r["step"]) for r in found(tmp_path)] == [
        *(("train", step) for step in (1, 2, 3)),
        *((kind, 3) for kind in ("valid", "test")),
    ]
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000003"]
    assert (checkpoints / "step_00000003" / "COMPLETE").is_file()
