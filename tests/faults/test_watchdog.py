"""A rank that is frozen, wherever it is: the others end in the time of the section, and say which it is and who."""

import pytest

from tests.faults.conftest import Runs, ended
from tests.support.commands import outcome

SECONDS = 6
LIMIT = str(SECONDS / 60)


@pytest.mark.parametrize(
    ("where", "section"),
    [
        ("3", "step"),
        *(
            pytest.param(where, section, marks=pytest.mark.faults)
            for where, section in (("evaluation", "evaluation"), ("save", "save"), ("start", "start-up"))
        ),
    ],
)
def test_a_frozen_rank_is_named_with_the_section(runs: Runs, where: str, section: str) -> None:
    flag = f"--{section.replace('-', '')}-timeout-minutes"
    flags = ("--tensor-model-parallel-size", "2", "--eval-interval", "2", "--save-interval", "2", flag, LIMIT)
    with runs.started(2, 1, f"freeze@{where}", *flags) as programs:
        done = programs[0].wait()
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        f"error: rank 1 is gone: rank 0 had been in the {section} for {SECONDS} s, and waited in the "
    )
    assert "rank 0: its threads, the last call first\n" in done.stderr and "failures.py" in done.stderr
    if where != "start":
        assert outcome(runs.folder / "run")["reason"] == line.removeprefix("error: ")


def test_a_short_pause_survives(runs: Runs) -> None:
    with runs.started(2, 1, "pause@3", "--step-timeout-minutes", LIMIT) as programs:
        assert ended(programs).codes == [0, 0]


@pytest.mark.faults
@pytest.mark.parametrize(("count", "interval"), [(1, "2"), (2, "500")])
def test_a_save_beside_training_that_does_not_end_is_told_with_its_own_place(
    runs: Runs, count: int, interval: str
) -> None:
    """Whatever the other threads of that rank wait for."""
    flags = ("--train-iters", "100000", "--save-interval", interval, "--async-save", "--save-timeout-minutes", LIMIT)
    done = runs.plain(count, 0, "stall@commit", *flags, "--log-interval", "100")
    assert done.codes == [1] * count
    (line,) = done.errors
    told = f"the run did not get on: rank 0 had been in the save for {SECONDS} s, and was at support/faulty.py:"
    assert line.startswith(f"error: {told}") and " (strike), in the save" in line
    assert " in write_step\n" in done.said and " in train\n" in done.said  # the stacks of both threads
