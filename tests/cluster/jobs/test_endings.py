"""How a life ended, from outcome.json, srun's words and the ranks' output."""

import json
from pathlib import Path

import pytest

from megatron_allattn.cluster.jobs.endings import first_end, how_it_ended, last_error, last_lines
from megatron_allattn.cluster.jobs.lives import Job

RUNNING, ENDED = Job(running=True), Job(running=False)
# as SLURM 22.05 has printed it
KILLED = """\
srun: error: n2: task 13: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.1
slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-11-30T05:24:21 ***
srun: error: n1: tasks 0-7: Exited with exit code 1
"""
MISTAKE = """\
srun: error: n1: tasks 0-1: Exited with exit code 2
srun: launch/slurm: _step_signal: Terminating StepId=7.1
srun: error: n2: task 2: Terminated
"""


@pytest.fixture
def life(tmp_path: Path) -> Path:
    folder = tmp_path / "jobs" / "life-0001"
    folder.mkdir(parents=True)
    return folder


def leave(life: Path, outcome: str | None = None, step: int | None = None, reason: str = "why", srun: str = "") -> None:
    if outcome is not None:
        told = {"outcome": outcome, "step": step, "reason": reason}
        (life.parent.parent / "outcome.json").write_text(json.dumps(told))
    (life / "srun.log").write_text(srun)


def ending(life: Path, asked: str = "", job: Job = RUNNING) -> tuple[str, str]:
    return how_it_ended(life.parent.parent, life, asked, job)


def test_outcomes_of_a_run_that_ended_itself(life: Path) -> None:
    for job in (RUNNING, ENDED):
        leave(life, "done", 20, "reached --train-iters")
        assert ending(life, "USR1", job) == ("done", "reached --train-iters")
        leave(life, "stopped", 20, "SIGUSR1", "srun: error: n1: tasks 0-7: Exited with exit code 3\n")
        assert ending(life, "USR1", job) == ("stopped", "stopped by SIGUSR1 and saved at step 20")
        leave(life, "guard", 20, "5 steps in a row", "srun: error: n1: task 0: Exited with exit code 4\n")
        assert ending(life, "", job) == ("guard", "5 steps in a row")


def test_a_mistake_is_one_of_the_start_with_exit_code_2(life: Path) -> None:
    leave(life, "failed", None, "--save: no", MISTAKE)
    assert ending(life) == ("mistake", "--save: no")
    leave(life, "failed", 20, "no", MISTAKE)
    assert ending(life) == ("failed", "no (rank 0 on n1: Exited with exit code 2)")
    leave(life, "failed", None, "rank 5 is gone", MISTAKE.replace("code 2", "code 1"))
    assert ending(life)[0] == "failed"


def test_a_mistake_before_the_run_folder_is_known(life: Path) -> None:
    leave(life, srun=MISTAKE)
    assert ending(life)[0] == "failed"  # whoever makes a mistake is told so: this is Python, which cannot be started
    (life / "rank-000.log").write_text("error: first\nerror: --lr fast: must be\x1b[2J a number\n")
    (life / "rank-001.log").write_text("")
    assert ending(life) == ("mistake", "--lr fast: must be\\x1b[2J a number")


def test_ranks_that_are_killed(life: Path) -> None:
    leave(life, srun=KILLED)
    assert ending(life) == ("failed", "rank 13 on n2: Killed")
    (life / "rank-000.log").write_text("error: rank 13 on n2 is gone\n")
    assert ending(life) == ("failed", "rank 13 on n2 is gone (rank 13 on n2: Killed)")
    leave(life, "failed", 7, "rank 13 on n2 is gone", KILLED)
    assert ending(life) == ("failed", "rank 13 on n2 is gone (rank 13 on n2: Killed)")


def test_a_step_that_could_not_begin(life: Path) -> None:
    leave(life, srun="srun: error: Unable to create step for job 7: Memory required by task is not available\n\n")
    said = "srun: error: Unable to create step for job 7: Memory required by task is not available"
    assert ending(life) == ("failed", said)
    leave(life)
    assert ending(life) == ("failed", "the training step ended without a word")
    (life / "srun.log").unlink()
    assert ending(life) == ("failed", "the training step ended without a word")


def test_who_is_asked_before_the_run_has_begun_is_not_failed(life: Path) -> None:
    leave(life, srun="srun: error: n1: tasks 0-7: User defined signal 1\n")
    assert ending(life, "USR1") == (
        "stopped",
        "asked to stop (USR1), and ended before it had saved; it goes on from the last checkpoint",
    )
    leave(life, "failed", 7, "rank 1 did not save in time", KILLED)
    assert ending(life, "USR1")[0] == "failed"


def test_what_others_have_ended(life: Path) -> None:
    leave(life, srun=KILLED)
    assert ending(life, "TERM", ENDED) == ("ended", "cancelled, requeued or lost with a node")
    how, reason = ending(life, "USR1", Job(running=False, out_of_time=True))
    assert how == "failed" and reason.startswith("the time limit came before a save had ended")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"outcome": "done"}'])
def test_a_torn_outcome_is_none(life: Path, text: str) -> None:
    leave(life, srun=KILLED)
    (life.parent.parent / "outcome.json").write_text(text)
    assert ending(life) == ("failed", "rank 13 on n2: Killed")


def test_which_task_was_first(life: Path) -> None:
    leave(life, srun=KILLED)
    found = first_end(life / "srun.log")
    assert found is not None and (found.rank, found.node, found.code) == (13, "n2", None)
    leave(life, srun="srun: error: gpu-01.x: tasks 8-11,14: Exited with exit code 255\n")
    found = first_end(life / "srun.log")
    assert found is not None and (found.rank, found.node, found.code) == (8, "gpu-01.x", 255)
    leave(life, srun="srun: Job step created\n")
    assert first_end(life / "srun.log") is None and first_end(life / "nothing") is None


def test_last_words_are_those_of_the_rank_that_ended_first(life: Path) -> None:
    leave(life, srun=KILLED)
    for rank in (0, 13, 113):
        (life / f"rank-{rank:03d}.log").write_text("".join(f"line {line} of {rank}\n" for line in range(30)))
    assert last_lines(life, 2) == ["rank-013.log: line 28 of 13", "rank-013.log: line 29 of 13"]
    leave(life)
    assert last_lines(life, 1) == ["rank-000.log: line 29 of 0"]
    assert last_error(life) == ""
