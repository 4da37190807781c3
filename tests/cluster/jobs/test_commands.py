"""What a batch script asks and gets: one line on stdout, people's lines on stderr."""

import io
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_allattn.checkpoint.folder import begin, commit
from megatron_allattn.checkpoint.lock import RunLock
from megatron_allattn.cluster.jobs.__main__ import main
from megatron_allattn.config import parse
from tests.support.commands import ROOT, environment

ALIVE = "JobState=RUNNING Reason=None Requeue=1 ExcNodeList=(null)"


@dataclass
class Ask:
    """Asks for a decision: its line, and what it told people. note: what it adds to the job's comment."""

    patch: pytest.MonkeyPatch
    printed: pytest.CaptureFixture[str]
    note: str = ""

    def __call__(self, *words: str, job: str = ALIVE, code: int = 0) -> tuple[str, str]:
        self.patch.setattr("sys.stdin", io.StringIO(job))
        assert main(words) == code
        output, errors = self.printed.readouterr()
        line, *notes = output.splitlines()
        (self.note,) = notes or [""]
        assert code == 0 or output == "stop 2\n"
        return line, errors


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    return Ask(monkeypatch, capsys)


def start(ask: Ask, run: Path, *flags: str, options: tuple[str, ...] = (), job: str = "7") -> Path:
    line, _ = ask("begin", "--job", job, *options, "--", "--save", str(run), *flags)
    assert line.startswith("begun ")
    return Path(line.removeprefix("begun "))


def leave(life: Path, outcome: str, step: int | None, reason: str = "why") -> None:
    (life.parents[1] / "outcome.json").write_text(json.dumps({"outcome": outcome, "step": step, "reason": reason}))


def words_of(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\0")[:-1]


def test_lives_of_a_job(ask: Ask, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start(ask, run)
    assert first == run / "jobs/life-0001" and (first / "health").is_dir()
    assert parse(words_of(first / "arguments"))[0].checkpoint.goes_on
    commit(begin(run, 10), 10)
    leave(first, "stopped", 10, "SIGUSR1")
    line, told = ask("next", str(first), "--job", "7", "--asked", "USR1")
    assert line == "requeue" and told.endswith("requeued: stopped by SIGUSR1 and saved at step 10\n")

    line, told = ask("begin", "--job", "7", "--restart", "1", "--", "--save", str(run))
    assert "life 2 of" in told and "goes on from step 10" in told
    assert not (run / "outcome.json").exists()  # what is there afterwards is of this life
    second = Path(line.removeprefix("begun "))
    leave(second, "done", 20, "reached --train-iters")
    assert ask("next", str(second), "--job", "7")[0] == "stop 0"


def test_a_job_that_was_cancelled_is_left_alone(ask: Ask, tmp_path: Path) -> None:
    life = start(ask, tmp_path / "run")
    line, told = ask(
        "next", str(life), "--job", "7", "--asked", "TERM", job="JobState=COMPLETING Reason=None Requeue=1"
    )
    assert line == "leave" and "ended by others" in told


def test_what_the_failed_rank_said_comes_last(ask: Ask, tmp_path: Path) -> None:
    life = start(ask, tmp_path / "run")
    (life / "srun.log").write_text("srun: error: n2: task 3: Exited with exit code 1\n")
    (life / "rank-003.log").write_text("a\nb\nerror: out of memory\n")
    line, told = ask("next", str(life), "--job", "7")
    assert line == "requeue"
    assert [text.split(" ", 2)[2] for text in told.splitlines()[-2:]] == [
        "rank-003.log: error: out of memory",
        "requeued: out of memory (rank 3 on n2: Exited with exit code 1)",
    ]


def test_it_is_given_up_before_it_begins_too(ask: Ask, tmp_path: Path) -> None:
    """Where every life was lost with its node, none has ever asked what is next."""
    run = tmp_path / "run"
    for restart in range(3):
        start(ask, run, options=("--restart", str(restart)))
    line, told = ask("begin", "--job", "7", "--restart", "3", "--", "--save", str(run))
    assert line == "stop 1" and "3 lives in a row have failed without a checkpoint after the beginning" in told
    start(ask, run, job="8")  # submitted again, it is tried again
    (run / "jobs/stop").touch()
    assert ask("begin", "--job", "9", "--", "--save", str(run))[0] == "stop 3"


def test_the_run_folder_of_another_is_not_entered(ask: Ask, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lock = RunLock(run)
    words = ("begin", "--job", "7", "--lock-seconds", "0.6", "--", "--save", str(run))
    _, told = ask(*words, code=2)
    assert "waiting: --save" in told and told.splitlines()[-1].startswith(f"error: --save {run}: is in use by process")
    assert not (run / "jobs/lives.jsonl").exists()
    # of an own earlier life it is waited for in the next one, and not for ever
    (run / "jobs/lives.jsonl").touch()
    for restart, line in ((1, "requeue"), (2, "requeue"), (3, "stop 1")):
        assert ask("begin", "--restart", str(restart), *words[1:])[0] == line
    lock.release()


def test_ranks_of_an_earlier_life_are_waited_for(ask: Ask, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(ask, run)
    lock = RunLock(run)
    threading.Timer(1.5, lock.release).start()
    began = time.monotonic()
    start(ask, run, options=("--restart", "1"))
    assert time.monotonic() - began > 1.4


@pytest.mark.parametrize("own", ["", "project 7, allattn"])
def test_a_node_that_does_not_see_what_the_job_has_done_is_left_out(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """That it has, is remembered in the job's comment. Whom the user leaves out, and lives before, are no matter."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    start(ask, elsewhere)
    start(ask, run, job="6")  # of a run there before
    comment = f"{own}; allattn: begun on n1" if own else "allattn: begun on n1 and gone"
    for host in ("n4", "n5", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", host)
        words = ("begin", "--job", "7", "--restart", "9", "--", "--save", str(run))
        line, told = ask(*words, job=f"{ALIVE.replace('(null)', 'n[6-9]')}\n   Comment={comment} \n   StdIn=x")
        assert line == f"requeue n6,n7,n8,n9,{host}" and ask.note == f"allattn: unseen on {host}"
        assert f"nothing in {run}/jobs on {host} tells of job 7, which began on n1" in told
        comment += f"; {ask.note}"
    line, told = ask(*words, job=f"{ALIVE}\nComment={comment}")
    assert line == "stop 1" and "and 3 nodes are left out for that already: look which of them share" in told
    assert not ask.note and (run / "jobs/lives.jsonl").read_text().count("\n") == 1
    # a node that sees it goes on
    words = ("begin", "--job", "7", "--restart", "9", "--", "--save", str(elsewhere))
    assert ask(*words, job=f"{ALIVE}\nComment={comment}")[0] == f"begun {elsewhere}/jobs/life-0002" and not ask.note


def test_a_history_that_was_moved_away_is_no_folder_that_is_not_seen(ask: Ask, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(ask, run)
    (run / "jobs/lives.jsonl").rename(tmp_path / "kept")
    words = ("begin", "--job", "7", "--restart", "1", "--", "--save", str(run))
    line, _ = ask(*words, job=f"{ALIVE}\n   Comment=allattn: begun on n1")
    assert line == f"begun {run}/jobs/life-0001"


def test_nodes_are_tried_no_more_often_than_a_job_lives(ask: Ask, tmp_path: Path) -> None:
    """Where SLURM keeps no further note, as at the end of a comment's length."""
    words = ("begin", "--job", "7", "--max-lives", "20", "--restart", "20", "--", "--save", str(tmp_path / "run"))
    line, told = ask(*words, job=f"{ALIVE}\n   Comment=allattn: begun on n1")
    assert line == "stop 1" and "other nodes are left out for that already" in told


def test_a_cancelled_job_is_not_tried_on_another_node(ask: Ask, tmp_path: Path) -> None:
    words = ("begin", "--job", "7", "--restart", "1", "--", "--save", str(tmp_path / "run"))
    line, told = ask(*words, job="JobState=COMPLETING Reason=None Requeue=1\n   Comment=allattn: begun on n1")
    assert line == "leave" and "ended by others" in told and not ask.note
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("comment", ["", "\n   Comment=(null)", "\n   Comment=allattn: lacking on n1"])
def test_a_job_that_was_requeued_before_it_had_begun_begins(ask: Ask, tmp_path: Path, comment: str) -> None:
    run = tmp_path / "run"
    line, told = ask("begin", "--job", "7", "--restart", "1", "--", "--save", str(run), job=f"{ALIVE}{comment}")
    assert line == f"begun {run}/jobs/life-0001" and not ask.note
    assert f"life 1 of {run}, job 7: goes on from step 0; what" in told
    assert f"note: nothing tells of an earlier life of job 7, neither {run}/jobs nor its comment\n" in told


def test_a_comment_may_be_in_any_encoding(tmp_path: Path) -> None:
    words = ["begin", "--job", "7", "--", "--save", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_allattn.cluster.jobs", *words],
        input=f"{ALIVE}\n   Comment=".encode() + b"\xfcx; allattn: begun on n1\n",
        env=environment({"PYTHONIOENCODING": "utf-8:strict"}),
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout.decode()) == (0, f"begun {tmp_path}/run/jobs/life-0001\n"), done.stderr


def test_a_job_that_would_be_told_to_stop_as_it_begins_is_refused(ask: Ask, tmp_path: Path) -> None:
    words = ("begin", "--job", "7", "--signal-seconds", "660", "--", "--save", str(tmp_path / "run"))
    _, told = ask(*words, job=f"{ALIVE} TimeLimit=00:11:00", code=2)
    assert told.startswith(
        "error: --time 11: is 660 s, and the job would be told to stop 660 s before its end; give it"
    )
    assert not (tmp_path / "run").exists()
    line, told = ask(*words, job=f"{ALIVE} TimeLimit=00:12:00")
    assert line.startswith("begun ") and "of the 720 s of its time (--time) the job keeps 660 s for its end" in told
    assert "warning" not in ask(*words, job=f"{ALIVE} TimeLimit=1-00:00:00")[1]


def test_a_start_from_another_run_that_left_no_checkpoint(ask: Ask, tmp_path: Path) -> None:
    """pretrain.py begins in the folder again, with the arguments of the submission."""
    run, flags = tmp_path / "run", ("--load", str(tmp_path / "other"))
    first = start(ask, run, *flags)
    (run / "metrics.jsonl").touch()
    (run / "checkpoints/.step_00000010.tmp-5").mkdir(parents=True)
    second = start(ask, run, *flags, options=("--restart", "1"))
    assert (run / "metrics.jsonl").exists() and list((run / "checkpoints").iterdir())
    assert words_of(second / "arguments") == words_of(first / "arguments") and set(flags) <= set(
        words_of(second / "arguments")
    )


def test_needs_are_the_files_that_are_here(ask: Ask, tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    flags = ("--data-path", str(prefix))
    program, absent = words_of(start(ask, tmp_path / "run", *flags) / "needs")
    assert program.endswith("/pretrain.py") and absent == f"{prefix}.json"
    bare = ("--tokenizer-type", "null", "--vocab-size", "100")
    assert words_of(start(ask, tmp_path / "run", *flags, *bare) / "needs")[1:] == [f"{prefix}.bin"]
    for suffix in (".json", "_train.bin", "_train.idx"):
        prefix.with_name(f"corpus{suffix}").touch()
    found = words_of(start(ask, tmp_path / "run", *flags) / "needs")[1:]
    assert found == [f"{prefix}{suffix}" for suffix in (".json", "_train.bin", "_train.idx")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give one of begin, nodes, next first"),
        (("end",), "give one of begin, nodes, next first"),
        (("begin", "--", "--save", "x"), "--job"),
        (("begin", "--job", "7", "--"), "--save"),
        (("next", "nowhere/life-0001", "--job", "7", "--when", "x"), "--when"),
    ],
)
def test_mistakes(ask: Ask, words: tuple[str, ...], message: str) -> None:
    _, told = ask(*words, code=2)
    assert told.startswith("error: ") and message in told and told.count("\n") == 1


def test_a_folder_that_cannot_be_written(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, told = ask("begin", "--job", "7", "--", "--save", str(tmp_path / "file/run"), code=2)
    assert told.startswith(f"error: --save {tmp_path}/file/run: cannot be written (Not a directory)")
