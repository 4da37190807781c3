"""What follows a life, and the history that says so."""

import json
from pathlib import Path

import pytest

from megatron_allattn.checkpoint.folder import begin, commit
from megatron_allattn.cluster.jobs.lives import History, How, Job, Life, Limits, Next, given_up, next_action
from megatron_allattn.config import UsageError

RUNNING = Job(running=True)


def life(how: How, first: int = 0, last: int = 0, number: int = 1, excluded: tuple[str, ...] = ()) -> Life:
    return Life(
        number=number,
        job="7",
        restart=number - 1,
        first_step=first,
        last_step=last,
        how=how,
        reason=how,
        excluded=excluded,
    )


def after(*lives: Life, limits: Limits | None = None, job: Job = RUNNING, stop_asked: bool = False) -> Next:
    return next_action(lives, limits or Limits(), job, stop_asked=stop_asked)


@pytest.mark.parametrize(
    ("how", "action", "code"),
    [
        ("done", "stop", 0),
        ("stopped", "requeue", 0),
        ("failed", "requeue", 0),
        ("lost", "requeue", 0),
        ("unfit", "requeue", 0),
        ("mistake", "stop", 2),
        ("guard", "stop", 4),
    ],
)
def test_what_follows_each_ending(how: How, action: str, code: int) -> None:
    found = after(life(how))
    assert (found.action, found.exit_code, found.reason) == (action, code, how)


def test_a_job_that_others_have_ended_is_left_alone() -> None:
    ended = Job(running=False)
    for how in ("stopped", "failed", "ended"):
        assert after(life(how), job=ended).action == "leave"
    assert after(life("done"), job=ended) == Next(action="stop", reason="done")
    assert after(life("failed"), job=Job(running=False, out_of_time=True)).action == "requeue"


def test_failures_count_in_a_row_and_without_a_checkpoint_only() -> None:
    failed, got_on, lost = life("failed", 20, 20), life("failed", 0, 20), life("lost", 20, 20)
    assert after(failed, failed).action == "requeue"
    found = after(got_on, failed, lost, failed)
    assert (found.action, found.exit_code) == ("stop", 1)
    assert found.reason == "3 lives in a row have failed without a checkpoint after step 20; the last: failed"
    assert after(failed, failed, got_on).action == "requeue"
    assert after(failed, failed, life("stopped", 20, 20), failed).action == "requeue"
    assert after(life("failed"), life("failed"), limits=Limits(wasted=2)).reason.startswith(
        "2 lives in a row have failed"
    )


def test_lives_that_leave_nothing_are_not_repeated_for_ever_however_they_end() -> None:
    early = [life("stopped", 20, 20) if number % 2 else life("unfit", 20, 20) for number in range(9)]
    assert after(*early).action == "requeue"
    found = after(*early, life("stopped", 20, 20))
    assert (found.action, found.exit_code) == ("stop", 1)
    rule = "10 lives in a row have ended without a checkpoint after step 20: give each more time (--time)"
    assert found.reason == f"{rule}; the last: stopped"
    assert after(*early, life("stopped", 20, 30)).action == "requeue"


def test_the_cap_on_lives_holds_for_lives_that_get_on() -> None:
    lives = [life("stopped", step, step + 10) for step in range(0, 50, 10)]
    assert after(*lives, limits=Limits(lives=6)).action == "requeue"
    found = after(*lives, limits=Limits(lives=5))
    assert (found.action, found.exit_code) == ("stop", 1)
    assert found.reason == "5 lives are the most that a job gets (MAX_LIVES); the last: stopped"
    assert after(*lives, life("done"), limits=Limits(lives=5)).exit_code == 0


def test_who_asks_for_it_gets_no_further_life() -> None:
    found = after(life("stopped"), stop_asked=True)
    assert (found.action, found.exit_code) == (
        "stop",
        3,
    ) and "jobs/stop is in the run folder: remove it" in found.reason
    assert given_up([], Limits(), stop_asked=True) is not None and given_up([], Limits()) is None
    found = after(life("stopped"), job=Job(running=True, requeue=False))
    assert (found.action, found.exit_code) == ("stop", 3) and "(--no-requeue)" in found.reason
    assert after(life("failed"), job=Job(running=True, requeue=False)).exit_code == 1


def test_left_out_nodes_join_those_of_the_submission() -> None:
    assert after(life("unfit", excluded=("n3",))).exclude == ("n3",)
    job = Job(running=True, excluded=("n7", "n8"))
    assert after(life("unfit", excluded=("n3", "n8")), job=job).exclude == ("n7", "n8", "n3")
    assert after(life("failed"), job=job).exclude == ()  # they stay as they are


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("JobId=1 JobState=RUNNING Reason=None Requeue=1 ExcNodeList=(null)", RUNNING),
        ("JobId=1\n   JobState=RUNNING Reason=None\n   Requeue=0", Job(running=True, requeue=False)),
        ("JobState=COMPLETING Reason=None Requeue=1 ExcNodeList=n[1-2]", Job(running=False, excluded=("n1", "n2"))),
        ("JobState=RUNNING TimeLimit=1-00:05:00", Job(running=True, time_limit=86_700)),
        ("JobState=RUNNING TimeLimit=UNLIMITED", RUNNING),
        ("JobState=COMPLETING Reason=TimeLimit", Job(running=False, out_of_time=True)),
        ("JobState=TIMEOUT Reason=TimeLimit", Job(running=False, out_of_time=True)),
        ("JobState=CANCELLED Reason=None", Job(running=False)),
        ("JobState=SIGNALING Reason=None", Job(running=True)),
    ],
)
def test_what_slurm_says(text: str, expected: Job) -> None:
    assert Job.parse(text) == expected


def test_nothing_from_slurm_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"^scontrol slurm_load_jobs error.*: says nothing of a job's state"):
        Job.parse("slurm_load_jobs error: Invalid job id")


def save(run: Path, step: int) -> None:
    commit(begin(run, step), step)


def test_history(tmp_path: Path) -> None:
    """Two jobs on one run; a life without an end is lost once another has begun, and got as far as that began."""
    history = History(tmp_path / "run")
    assert history.lives("7") == [] and history.newest_step() == 0
    assert history.begin("7", 0) == (1, tmp_path / "run/jobs/life-0001")
    assert history.lives("7") == []  # it is under way
    save(history.run_folder, 20)
    assert history.begin("7", 1) == (2, tmp_path / "run/jobs/life-0002")
    lost = "its batch script was lost with its node, or killed"
    first = Life(number=1, job="7", restart=0, first_step=0, last_step=20, how="lost", reason=lost)
    assert history.lives("7") == [first]
    history.end(2, "unfit", "n3: no GPU", ("n3",))
    second = Life(
        number=2, job="7", restart=1, first_step=20, last_step=20, how="unfit", reason="n3: no GPU", excluded=("n3",)
    )
    assert history.lives("7") == [first, second]
    assert history.begin("8", 0)[0] == 3
    save(history.run_folder, 30)
    history.end(3, "stopped", "SIGUSR1")
    assert [(one.number, one.first_step, one.last_step) for one in history.lives("8")] == [(3, 20, 30)]
    assert history.lives("7") == [first, second]
    assert not history.stop_asked
    (tmp_path / "run/jobs/stop").touch()
    assert history.stop_asked


def test_a_checkpoint_that_is_not_complete_is_none(tmp_path: Path) -> None:
    save(tmp_path, 20)
    save(tmp_path, 30)
    (tmp_path / "checkpoints/step_00000030/COMPLETE").unlink()
    assert History(tmp_path).newest_step() == 20


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"kind": "begin", "life": 1, "job": "7", "restart": 0}',
        '{"kind": "end", "life": 1, "how": "well", "reason": "", "step": 0, "excluded": []}',
        '{"kind": "middle", "life": 1, "step": 0}',
    ],
)
def test_a_file_that_is_no_history(tmp_path: Path, line: str) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/lives.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=r"lives\.jsonl: holds what is no record of a life; move it away"):
        History(tmp_path).lives("7")


def test_a_torn_last_record_is_left_out(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.begin("7", 0)
    with (tmp_path / "jobs/lives.jsonl").open("a") as handle:
        handle.write(json.dumps({"kind": "end", "life": 1})[:-5])
    assert history.lives("7") == []
