"""Any rank killed at any step: the others end, nothing is left, and the run goes on to the same bits."""

import random
import signal
from typing import Any

import pytest

from tests.faults.conftest import Runs
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
}


def kept(runs: Runs, run: str) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name != "tokens_per_second"}
        for record in records(runs.folder / run)
    ]


def tensors(runs: Runs, run: str) -> dict[str, bytes]:
    step = runs.folder / run / "checkpoints" / "step_00000008"
    return {path.name: path.read_bytes() for path in sorted(step.glob("*.safetensors"))}


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        pytest.param(name, rank, marks=() if (name, rank) == ("tp2 pp2", 2) else pytest.mark.faults)
        for name, (count, _) in LAYOUTS.items()
        for rank in range(count)
    ],
)
def test_a_killed_rank_costs_the_steps_since_the_last_save(runs: Runs, layout: str, rank: int) -> None:
    """Killed once at a random step, and once more as soon as it has gone on; then left alone."""
    count, flags = LAYOUTS[layout]
    step = random.Random(f"{layout} {rank}").randint(2, 7)
    assert runs.plain(count, 0, "pause@0", *COMMON, *flags, "--save", "whole").codes == [0] * count
    for fault, load in ((f"kill@{step}", ()), (f"kill@{step + 1}", ("--load", "run")), ("pause@0", ("--load", "run"))):
        ended = runs.plain(count, rank, fault, *COMMON, *flags, *load)
        codes = set(ended.codes)
        assert codes == {1, -signal.SIGKILL} if fault.startswith("kill") else codes == {0}
        assert all(not done.left for done in ended.ranks)
    assert kept(runs, "run") == kept(runs, "whole")
    assert tensors(runs, "run") == tensors(runs, "whole") != {}
