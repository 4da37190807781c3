"""Any rank killed at any step: the others end, nothing is left, and the run goes on to the same bits."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Runs, ended, until_step
from tests.support.commands import records

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2", "--micro-batch-size", "2")
COMMON = ("--train-iters", "8", "--save-interval", "2", "--attention-dropout", "0.2", "--eval-interval", "3")
LAYOUTS = {
    "dp2": (2, ()),
    "dp2 zero2": (2, ("--zero-stage", "2")),
    "dp2 zero3": (2, ("--zero-stage", "3")),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "tp2 pp2": (4, (*TP2, *PP2)),
    "dp2 async": (2, ("--async-save", "--keep-latest-k", "2")),
    "tp2 async": (2, (*TP2, "--async-save")),
}


def kept(runs: Runs, run: str) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name != "tokens_per_second"}
        for record in records(runs.folder / run)
    ]


def tensors(runs: Runs, run: str, step: int = 8) -> dict[str, bytes]:
    folder = runs.folder / run / "checkpoints" / f"step_{step:08d}"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        pytest.param(name, rank, marks=() if (name, rank) == ("pp2", 1) else pytest.mark.faults)
        for name, (count, _) in LAYOUTS.items()
        for rank in range(count)
    ],
)
def test_a_killed_rank_costs_the_steps_since_the_last_save(runs: Runs, layout: str, rank: int) -> None:
    """Killed at a random step, while it goes on, and once more when it has gone on; then left alone."""
    count, flags = LAYOUTS[layout]
    step = random.Random(f"{layout} {rank}").randint(2, 7)
    runs.succeeds(count, *COMMON, *flags, "--save", "whole")
    again = ("--load", "run")
    for fault, load in ((f"kill@{step}", ()), ("kill@start", again), (f"kill@{step + 1}", again), ("pause@0", again)):
        ended = runs.plain(count, rank, fault, *COMMON, *flags, *load)
        codes = set(ended.codes)
        assert codes == {1, -signal.SIGKILL} if fault.startswith("kill") else codes == {0}
        assert all(not done.left for done in ended.ranks)
    assert kept(runs, "run") == kept(runs, "whole")
    assert tensors(runs, "run") == tensors(runs, "whole") != {}


def test_a_run_from_another_that_dies_before_its_first_save(runs: Runs) -> None:
    """The same command begins it again; the advice that a refusal gives never begins with new weights."""
    runs.succeeds(1, "--train-iters", "2", "--save", "first")
    again = ("--train-iters", "6", "--load", "first")
    assert runs.plain(1, 0, "kill@5", *again, "--save", "run").codes == [-signal.SIGKILL]
    assert [record["step"] for record in kept(runs, "run")] == [3, 4]
    rule = "has saved nothing yet, and was begun with --load first; give --load first again, or choose another folder"
    runs.refuses(f"error: --load run: {rule}", *again[:2], "--save", "run", "--load", "run")
    rule = "holds a run that was begun with --load first and has saved nothing; give --load first to go on with it"
    runs.refuses(f"error: --save run: {rule}, or choose another folder", *again[:2], "--save", "run")
    runs.succeeds(1, *again, "--save", "run")
    runs.succeeds(1, *again, "--save", "whole")
    assert kept(runs, "run") == kept(runs, "whole") and tensors(runs, "run", 6) == tensors(runs, "whole", 6) != {}


@pytest.mark.faults
def test_what_an_earlier_start_came_to_is_not_taken_for_this_ones(runs: Runs) -> None:
    """Also where that left nothing but its outcome, and this one begins anew."""
    (runs.folder / "run").mkdir()
    (runs.folder / "run/outcome.json").write_text('{"outcome": "stopped", "step": null, "reason": "SIGTERM"}')
    assert runs.plain(1, 0, "kill@3").codes == [-signal.SIGKILL]
    assert not (runs.folder / "run/outcome.json").exists()


def last_step(run: Path) -> int:
    latest = run / "latest"
    return int(latest.read_text().strip().removeprefix("step_")) if latest.exists() else 0


@pytest.mark.faults
def test_fifty_kills_at_random_moments_of_saves(runs: Runs) -> None:
    """B26 of the public reports. A run that saves every step, on both ranks, and dies and goes on fifty times."""
    random_moment = random.Random(6)
    endless = ("--attention-dropout", "0.2", "--save-interval", "1", "--train-iters", "100000", "--keep-latest-k", "3")
    run = runs.folder / "run"
    torn, reached = 0, 1
    for life in range(50):
        with runs.started(2, 0, "pause@0", *endless, "--load", "run") as programs:
            until_step(reached, *programs)
            while not any(run.glob("checkpoints/.step_*")):  # a save has begun
                time.sleep(0.001)
            time.sleep(random_moment.uniform(0.0, 0.04))
            programs[life % 2].process.kill()
            assert not any(done.left for done in ended(programs).ranks)
        torn += any(not (step / "COMPLETE").exists() for step in (run / "checkpoints").iterdir())
        reached = last_step(run) + 1
    assert torn >= 10
    final = ("--attention-dropout", "0.2", "--train-iters", str(reached))
    runs.succeeds(2, *final, "--load", "run")
    runs.succeeds(2, *final, "--save", "whole")
    assert kept(runs, "run") == kept(runs, "whole")
    assert tensors(runs, "run", reached) == tensors(runs, "whole", reached) != {}
