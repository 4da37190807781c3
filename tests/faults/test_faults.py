"""A fault on one rank ends all ranks, with one message that names the rank and the group.

What is killed or stalls here is a real process of a real run; the whole grid is `make test-faults`.
"""

import re
import signal

import pytest

from tests.faults.conftest import Runs, errors
from tests.support.commands import outcome

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2", "--micro-batch-size", "2")
ONE = ("--max-nonfinite-steps", "1")
ZERO0, ZERO3 = ("--zero-stage", "0"), ("--zero-stage", "3")
KILLED = -signal.SIGKILL


def test_a_killed_rank_of_two_stages_of_two_shards_is_named(runs: Runs) -> None:
    ended = runs.plain(4, 3, "kill", *TP2, *PP2)
    assert ended.codes == [1, 1, 1, KILLED]
    (line,) = ended.errors
    assert line.startswith("error: rank 3 is gone: ")
    assert re.search(r"rank 2 (lost the connection|waited) in the \w+ group \[.*\b3\]", line)
    assert outcome(runs.folder / "run") == {"outcome": "failed", "step": 2, "reason": line.removeprefix("error: ")}


def test_an_exception_in_a_stage_is_told_by_it_alone(runs: Runs) -> None:
    ended = runs.plain(2, 1, "raise", *PP2)
    assert ended.codes == [1, 1]
    (line,) = ended.errors
    assert re.fullmatch(
        r"error: rank 1 \(stage 2 of the pipeline group \[0, 1\]\) failed at support/faulty.py:\d+ \(strike\): "
        "ArithmeticError: as if a kernel had failed",
        line,
    )
    assert ended.ranks[0].stderr == ""
    assert ended.ranks[1].stderr.count("Traceback") == 1
    assert outcome(runs.folder / "run")["reason"] == line.removeprefix("error: ")


def test_a_gradient_that_is_not_a_number_in_a_stage(runs: Runs) -> None:
    ended = runs.plain(2, 1, "nan", *PP2, *ONE)
    assert ended.codes == [4, 4]
    (line,) = ended.errors
    assert line.startswith(
        "error: step 3: the gradient is not finite on rank 1 (stage 2 of the pipeline group [0, 1]): "
        "layers.2.query.weight. "
    )
    assert outcome(runs.folder / "run") == {"outcome": "guard", "step": 3, "reason": line.removeprefix("error: ")}


@pytest.mark.faults
def test_a_collective_of_one_shard_alone(runs: Runs) -> None:
    ended = runs.plain(2, 1, "unmatched", *TP2)
    assert ended.codes == [1, 1]
    (line,) = ended.errors
    assert line.startswith("error: the ranks waited for each other in vain: ")
    assert re.search(r"rank 0 \D*(15 s )?in the tensor group \[0, 1\]", line)
    assert re.search(r"rank 1 \D*(15 s )?in the world group \[0, 1\]", line)


# how the message begins, by fault: it names this rank for what it did, and no other
SAID = {
    "kill": r"error: rank {rank} is gone: ",
    "raise": r"error: rank {rank} \([^)]*\) failed at support/faulty.py:\d+ \(strike\): ArithmeticError: ",
    "nan": r"error: step 3: the gradient is not finite on rank {rank} \([^)]*\): layers\.\d\.query\.weight\. ",
    "unmatched": r"error: the ranks waited for each other in vain: (.*; )?rank {rank} [^;]*in the world group",
    "stall": r"error: the ranks waited for each other in vain: (rank \d gave up after 15 s [^;]*; )+"
    r"rank {rank} was at support/faulty.py:\d+ \(strike\), in the step$",
}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("count", "flags"),
    [(2, TP2), (2, ZERO3), (2, PP2), (4, (*TP2, *ZERO0)), (4, PP2)],
    ids=["tp2", "dp2 zero3", "pp2", "tp2 dp2", "pp2 dp2"],
)
@pytest.mark.parametrize("fault", ["kill", "raise", "nan", "unmatched", "stall"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_every_fault_at_every_layout(runs: Runs, count: int, flags: tuple[str, ...], fault: str, first: bool) -> None:
    rank = 0 if first else count - 1
    ended = runs.plain(count, rank, fault, *flags, *ONE)
    code = 4 if fault == "nan" else 1
    assert ended.codes == [KILLED if fault == "kill" and own == rank else code for own in range(count)]
    (line,) = ended.errors
    assert re.match(SAID[fault].format(rank=rank), line), line
    assert re.search(r"group \[\d", line), line


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("fault", ["kill", "raise", "nan"])
def test_under_a_launcher_that_ends_all_ranks_once_one_has_ended(runs: Runs, rank: int, fault: str) -> None:
    done = runs.torchrun(4, rank, fault, *TP2, *PP2, *ONE)
    assert (done.returncode, done.left) == (1, [])
    (line,) = errors(done)
    assert re.match(SAID[fault].format(rank=rank), line) and re.search(r"group \[\d", line), line
