"""launch/pretrain.sbatch without SLURM: its commands are stood in for, and what they are given is looked at."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_allattn.cluster.jobs.lives import RUNNING
from tests.support.commands import ROOT, environment

TEXT = (ROOT / "launch" / "pretrain.sbatch").read_text()

# A program of SLURM (or of a container): tells of its arguments, and does what `plan` has for it.
STAND_IN = """\
#!{python} -S
import json, os, pathlib, signal, subprocess, sys, time
here = pathlib.Path({folder!r})
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
plan = json.loads((here / "plan.json").read_text())
variables = [os.environ.get(one) for one in ("SRUN_CPUS_PER_TASK", "OMP_NUM_THREADS", "SLURM_EXPORT_ENV")]
with (here / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps([name, words, *variables]) + "\\n")

def run_folder():
    return pathlib.Path(plan["run"])

kept = here / "comment"
if name == "scontrol" and words[:2] == ["show", "job"]:
    (here / "shows").touch()
    time.sleep(plan.get("show_seconds", 0))
    print(f"JobId=41 JobName=of JobState=PENDING\\n   JobState={{plan.get('state', 'RUNNING')}} Reason=None")
    print("   Requeue=1 Restarts=0")
    print(f"   ReqNodeList=(null) ExcNodeList={{plan.get('excluded', '(null)')}}\\n   NodeList=n1")
    if kept.exists():
        print(f"   Comment={{kept.read_text()}} \\n   StdIn=/dev/null")
elif name == "scontrol" and words[0] == "show":
    print(plan["hosts"].replace(",", "\\n"))
elif name == "scontrol":
    failed = here / "failed"
    tries = len(failed.read_text()) if failed.exists() else 0
    if tries < plan.get("controller_away", 0):
        failed.write_text("x" * (tries + 1))
        sys.exit("slurm_suspend error: Unable to contact slurm controller (connect failure)")
    if words[0] in plan.get("refused", []):
        sys.exit("Requested operation is presently disabled for job 41")
    for comment in (word.removeprefix("Comment=") for word in words if word.startswith("Comment=")):
        kept.write_text(comment)
elif name == "apptainer":
    sys.exit(subprocess.run(words[words.index("/shared/allattn.sif") + 1:]).returncode)
elif any(word.endswith("megatron_allattn.cluster.jobs") for word in words):
    begin = next(number for number, word in enumerate(words) if "python" in os.path.basename(word))
    sys.exit(subprocess.run(words[begin:]).returncode)
elif any(word.endswith("preflight.py") for word in words):
    reports = pathlib.Path(words[words.index("--json") + 1])
    for node in plan["hosts"].split(","):
        bad = node in plan.get("bad", [])
        status, found = ("fault", "7 GPUs") if bad else ("ok", "8 GPUs")
        check = {{"name": "devices", "node": node, "status": status, "found": found, "asked": "8", "way_out": "mend"}}
        report = {{"format": 1, "node": node, "go": not bad, "time": 0.0, "facts": {{}}, "checks": [check]}}
        (reports / (node + ".json")).write_text(json.dumps(report))
    time.sleep(plan.get("health_seconds", 0))
elif any(word.endswith("pretrain.py") for word in words):
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append("SIGUSR1"))
    (here / "training").touch()
    deadline = time.monotonic() + plan.get("training_seconds", 0)
    while time.monotonic() < deadline and not asked:
        time.sleep(0.02)
    told = {{"outcome": "stopped", "step": 7, "reason": asked[0]}} if asked else plan.get("outcome")
    if told is not None:
        (run_folder() / "outcome.json").write_text(json.dumps(told))
    sys.stderr.write(plan.get("srun_says", ""))
    sys.exit(0 if told and told["outcome"] == "done" else 143)
"""
DONE = {"outcome": "done", "step": 9, "reason": "reached --train-iters"}


@dataclass
class Stage:
    """A folder with the stand-ins, and what the script did with them."""

    folder: Path

    def start(
        self,
        *arguments: str,
        text: str = TEXT,
        variables: dict[str, str] | None = None,
        new_session: bool = False,
        **plan: object,
    ) -> "subprocess.Popen[str]":
        """The script as a batch shell runs it: a copy of the file, in the folder of the submission.

        new_session: so that a signal can be sent to all its processes.
        """
        run = self.folder / "run"
        (self.folder / "plan.json").write_text(json.dumps({"run": str(run), "hosts": "n1,n2", "outcome": DONE} | plan))
        (self.folder / "slurm_script").write_text(text)
        hosts = str(plan.get("hosts", "n1,n2")).count(",") + 1
        slurm = {
            "SLURM_JOB_ID": "41",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": "n[1-9]",
            "SLURM_JOB_NUM_NODES": str(hosts),
            "SLURM_NTASKS": str(4 * hosts),
            "SLURM_NTASKS_PER_NODE": "4",
            "SLURM_CPUS_PER_TASK": "6",
            "SLURMD_NODENAME": "n1",
        }
        path = f"{self.folder / 'bin'}:{environment()['PATH']}"
        env = environment({"PATH": path, "PYTHON": sys.executable, **slurm, **(variables or {})})
        command = ["bash", str(self.folder / "slurm_script"), "--save", str(run), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=new_session
        )

    def run(self, *arguments: str, code: int = 0, **given: object) -> str:
        """To its end; what it has printed on stderr."""
        return self.finish(self.start(*arguments, **given), code)  # type: ignore[arg-type]

    def finish(self, process: "subprocess.Popen[str]", code: int = 0) -> str:
        output, errors = process.communicate(timeout=600)
        assert process.returncode == code and not output, output + errors
        return errors

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call of a program."""
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [words for called, words, *_ in map(json.loads, lines) if called == name]

    @property
    def orders(self) -> list[list[str]]:
        """What the controller was told to do, but for the note that the job has begun."""
        return [
            words
            for words in self.calls("scontrol")
            if words[0] != "show" and words[2:] != ["Comment=allattn: begun on n1"]
        ]

    @property
    def training(self) -> list[str]:
        """The srun of the ranks."""
        (found,) = [words for words in self.calls("srun") if f"{ROOT}/pretrain.py" in words and "--local" not in words]
        return found

    def until_training(self) -> None:
        deadline = time.monotonic() + 600
        while not (self.folder / "training").exists():
            assert time.monotonic() < deadline, "it does not begin to train"
            time.sleep(0.02)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    folder = tmp_path / "stage"
    (folder / "bin").mkdir(parents=True)
    for name in ("scontrol", "srun", "apptainer"):
        path = folder / "bin" / name
        path.write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
        path.chmod(0o755)
    (folder / "bin" / "sleep").symlink_to("/bin/true")
    return Stage(folder)


def test_the_ranks_and_their_check_before(stage: Stage) -> None:
    errors = stage.run("--num-layers", "2")
    assert errors.count("\n") == 2 and errors.endswith("over: reached --train-iters\n")
    life = stage.folder / "run/jobs/life-0001"
    check, training = stage.calls("srun")
    assert training == [
        *("--nodes=2", "--nodelist=n1,n2", "--ntasks=8", "--ntasks-per-node=4", "--distribution=block"),
        *("--kill-on-bad-exit=1", "--wait=60"),
        f"--output={life}/rank-%3t.log",
        *(sys.executable, f"{ROOT}/pretrain.py", "--save", str(stage.folder / "run"), "--num-layers", "2"),
        *("--load", str(stage.folder / "run")),
    ]
    # which must not keep training from the nodes where it cannot be killed
    assert check[:5] == ["--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    assert check[6:] == [
        *(sys.executable, f"{ROOT}/tools/preflight.py", "--local", "--gpus-per-node", "4"),
        *("--json", f"{life}/health", "--shared", f"{life}/health", "--probe-seconds", "75"),
        *("--need", f"{ROOT}/pretrain.py"),
    ]
    lines = (stage.folder / "calls.jsonl").read_text().splitlines()
    assert {tuple(json.loads(line)[2:]) for line in lines} == {("6", "1", "ALL")}
    assert stage.orders == []


NASTY = "two  words\t\" ' \\ \\n $HOME $(touch canary) `touch canary` %h %u %% ;&|<>()*?[a]{b,c}~!# é "


def test_arguments_arrive_byte_for_byte(stage: Stage) -> None:
    stage.run("--data-path", NASTY, "--tensorboard-dir", "-x $y", variables={"HEALTH_CHECK": "0"})
    words = stage.training
    assert words[words.index("--data-path") + 1] == NASTY
    assert not (stage.folder / "canary").exists()


def test_nasty_run_folder(stage: Stage) -> None:
    """srun's own pattern characters in it are written twice."""
    run = str(stage.folder / "a %t 'b' $(touch canary)")
    process = stage.start(text=TEXT.replace('arguments=("$@")', f"arguments=(--save {_quoted(run)})"), run=run)
    stage.finish(process)
    assert f"--output={run.replace('%', '%%')}/jobs/life-0001/rank-%3t.log" in stage.training
    assert not (stage.folder / "canary").exists()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def test_spare_nodes(stage: Stage) -> None:
    told = stage.run(hosts="n1,n2,n3", bad=["n1"], variables={"SPARE_NODES": "1"})
    assert "left out: n1: devices: found 7 GPUs, asked 8; mend\n" in told
    assert stage.training[:3] == ["--nodes=2", "--nodelist=n2,n3", "--ntasks=8"]


def test_spare_nodes_without_a_check(stage: Stage) -> None:
    stage.run(hosts="n1,n2,n3", variables={"SPARE_NODES": "1", "HEALTH_CHECK": "0"})
    assert stage.training[:3] == ["--nodes=2", "--nodelist=n1,n2", "--ntasks=8"]


def test_a_bad_node_is_left_out_by_a_requeue(stage: Stage) -> None:
    told = stage.run(bad=["n2"], excluded="n[7-9]")
    assert not (stage.folder / "comment").exists()  # nothing is trained
    assert "requeued: n2: devices: found 7 GPUs, asked 8; mend; without n7,n8,n9,n2\n" in told
    assert stage.orders == [["requeue", "41"], ["update", "JobId=41", "ExcNodeList=n7,n8,n9,n2"]]
    assert len(stage.calls("srun")) == 1


def test_a_node_that_slurm_does_not_leave_out_is_no_reason_to_wait(stage: Stage) -> None:
    told = stage.run(bad=["n2"], refused=["update"])
    assert stage.orders == [["requeue", "41"]] + [["update", "JobId=41", "ExcNodeList=n2"]] * 5
    assert "presently disabled" in told


def test_a_fault_of_all_nodes_stops_it(stage: Stage) -> None:
    told = stage.run(bad=["n1", "n2"], code=1)
    assert "stopped: all nodes: devices: found 7 GPUs" in told or "stopped: 2 of 2 nodes: devices" in told
    assert stage.orders == [] and len(stage.calls("srun")) == 1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_the_ranks_as_usr1(stage: Stage, number: int) -> None:
    process = stage.start(training_seconds=600)
    stage.until_training()
    process.send_signal(number)
    process.send_signal(number)
    told = stage.finish(process)
    assert "requeued: stopped by SIGUSR1 and saved at step 7\n" in told
    assert stage.orders == [["requeue", "41"]]


@pytest.mark.parametrize("bad", [[], ["n1", "n2"]])
def test_a_signal_during_the_check_begins_no_training(stage: Stage, bad: list[str]) -> None:
    """Which may have ended the checks of the nodes: what they say then is not heeded."""
    process = stage.start(health_seconds=3, bad=bad)
    while not (stage.folder / "run/jobs/life-0001/health/n2.json").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    told = stage.finish(process)
    assert (
        "requeued: asked to stop (USR1), and ended before it had saved; it goes on from the last checkpoint\n" in told
    )
    assert len(stage.calls("srun")) == 1 and stage.orders == [["requeue", "41"]]


def test_what_fails_goes_on_until_it_has_failed_too_often(stage: Stage) -> None:
    failed = {"outcome": None, "srun_says": "srun: error: n2: task 5: Killed\n", "variables": {"MAX_WASTED": "2"}}
    assert "requeued: rank 5 on n2: Killed\n" in stage.run(**failed)
    told = stage.run(**failed, code=1)
    assert (
        "stopped: 2 lives in a row have failed without a checkpoint after the beginning; the last: rank 5 on n2" in told
    )
    assert stage.orders == [["requeue", "41"]]


def test_an_element_of_an_array_is_named_by_its_place(stage: Stage) -> None:
    """Its own number may be that of the whole array."""
    array = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "3"}
    stage.run(outcome={"outcome": "stopped", "step": 3, "reason": "SIGUSR1"}, variables=array)
    assert stage.orders == [["requeue", "41_3"]]
    shown = {tuple(words) for words in stage.calls("scontrol") if words[:2] == ["show", "job"]}
    assert shown == {("show", "job", "41_3")}
    assert ["update", "JobId=41_3", "Comment=allattn: begun on n1"] in stage.calls("scontrol")


def test_the_controller_may_be_away(stage: Stage) -> None:
    told = stage.run(outcome={"outcome": "stopped", "step": 3, "reason": "SIGUSR1"}, controller_away=4)
    assert stage.orders == [["requeue", "41"]] * 4
    assert "warning: SLURM keeps no comment of job 41: on a node without the run folder it would begin anew" in told


def test_what_the_controller_refuses_is_not_asked_again(stage: Stage) -> None:
    stopped = {"outcome": "stopped", "step": 3, "reason": "SIGUSR1"}
    told = stage.run(outcome=stopped, refused=["requeue"], code=1)
    assert stage.orders == [["requeue", "41"]]
    assert told.endswith("Requested operation is presently disabled for job 41\n")


def test_a_life_whose_end_cannot_be_written_is_followed_by_another(stage: Stage) -> None:
    """No decision, since its Python has failed: the history is no file that can be appended to."""
    process = stage.start(training_seconds=600)
    stage.until_training()
    history = stage.folder / "run/jobs/lives.jsonl"
    history.rename(history.with_name("kept"))
    history.mkdir()
    process.send_signal(signal.SIGUSR1)
    told = stage.finish(process, code=0)
    assert f"error: {sys.executable} gave no answer on n1 to what follows; its last words are above\n" in told
    assert told.endswith("job 41 is requeued\n") and stage.orders == [["requeue", "41"]]


@pytest.mark.parametrize(("outcome", "code"), [("guard", 4), ("failed", 2)])
def test_what_would_only_happen_again_is_not_requeued(stage: Stage, outcome: str, code: int) -> None:
    told = {"outcome": outcome, "step": None, "reason": "--this: and that"}
    errors = stage.run(outcome=told, srun_says="srun: error: n1: task 0: Exited with exit code 2\n", code=code)
    assert "stopped: --this: and that\n" in errors and stage.orders == []


def test_mistakes_in_the_arguments_end_it_before_anything_runs(stage: Stage) -> None:
    errors = stage.run("--lr", "fast", code=2)
    assert errors == "error: --lr fast: must be a number; the default is 0.001\n"
    assert [words[:2] for words in stage.calls("scontrol")] == [["show", "job"]]
    assert not (stage.folder / "run").exists()


def test_a_measured_save_that_takes_longer_is_told(stage: Stage) -> None:
    (stage.folder / "run").mkdir()
    (stage.folder / "run/pace.json").write_text('{"saves": [{"step": 1, "seconds": 350.0, "processes": 8}]}')
    told = stage.run("--stop-deadline-minutes", "20")
    assert (
        "warning: the longest save has taken 350.0 s and the longest step 0.0 s: --signal=B:USR1@660 may be too" in told
    )
    assert "ask for 780 s" in told
    longer = TEXT.replace("B:USR1@660", "B:USR1@780")
    assert "warning" not in stage.run("--stop-deadline-minutes", "20", text=longer)
    assert "warning: there is no --signal" in stage.run(
        "--stop-deadline-minutes", "20", text=TEXT.replace("B:USR1@660", "USR1")
    )


def enabled(first: str) -> str:
    """The script with one of its two container examples."""
    lines, active = [], False
    for line in TEXT.splitlines():
        if line.startswith(("# Pyxis:", "# Apptainer:")):
            active = line.startswith(f"# {first}:")
        elif not line.startswith("#"):
            active = False
        elif active:
            line = line.removeprefix("# ")
        lines.append(line)
    assert "\n".join(lines) != TEXT
    return "\n".join(lines) + "\n"


def test_pyxis(stage: Stage) -> None:
    stage.run("--num-layers", "2", text=enabled("Pyxis"))
    image = "--container-image=/shared/allattn.sqsh"
    decisions, others = [], []
    for words in stage.calls("srun"):
        here = "megatron_allattn.cluster.jobs" in words or "-c" in words
        (decisions if here else others).append(words)
    assert "-c" in decisions.pop(0)  # a look at Python
    assert [words[words.index("megatron_allattn.cluster.jobs") + 1] for words in decisions] == [
        "begin",
        "nodes",
        "next",
    ]
    assert all(words[:4] == ["--overlap", "--nodes=1", "--ntasks=1", image] for words in decisions)
    assert all(words.index(image) < words.index(sys.executable) for words in others) and len(others) == 2
    mounts = f"--container-mounts=/shared:/shared,{ROOT}:{ROOT}"
    assert all(mounts in words for words in decisions + others)


def test_apptainer(stage: Stage) -> None:
    stage.run("--num-layers", "2", text=enabled("Apptainer"))
    begin = [
        "exec",
        "--nv",
        "--bind",
        "/shared",
        "--bind",
        str(ROOT),
        "--pwd",
        str(stage.folder),
        "/shared/allattn.sif",
    ]
    assert [words[: len(begin)] for words in stage.calls("apptainer")] == [
        begin
    ] * 4  # a look at Python and the decisions, here
    for words in stage.calls("srun"):
        at = words.index("apptainer")
        assert words[at + 1 :][: len(begin) + 1] == [*begin, sys.executable]


def test_it_is_submitted_from_a_checkout(stage: Stage, tmp_path: Path) -> None:
    elsewhere = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURMD_NODENAME": "n4"}
    errors = stage.run(code=2, variables=elsewhere)
    assert errors == f"error: {tmp_path}: no pretrain.py there on n4; submit from the checkout, or set ALLATTN_ROOT\n"
    stage.run(variables=elsewhere | {"ALLATTN_ROOT": str(ROOT)})


def test_a_node_that_does_not_see_the_checkout_any_more_is_left_out_once(stage: Stage, tmp_path: Path) -> None:
    again = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURMD_NODENAME": "n4", "SLURM_RESTART_COUNT": "1"}
    stage.run(variables=again, excluded="n[7-9]")
    orders = [
        ["requeue", "41"],
        ["update", "JobId=41", "ExcNodeList=n[7-9],n4"],
        ["update", "JobId=41", "Comment=allattn: lacking on n4"],
    ]
    assert stage.orders == orders
    stage.run(code=2, variables=again | {"SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "n5"}, excluded="n[4,7-9]")
    assert stage.orders == orders


def test_a_cancelled_job_is_not_tried_on_another_node(stage: Stage, tmp_path: Path) -> None:
    again = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_RESTART_COUNT": "1"}
    told = stage.run(variables=again, state="COMPLETING")
    assert stage.orders == [] and told.endswith("not requeued: job 41 was ended by others\n")


@pytest.mark.parametrize(
    ("outcome", "requeued"),
    [
        ("COMPLETING", False),
        ("CANCELLED", False),
        ("TIMEOUT", True),
        ("COMPLETING Reason=TimeLimit", True),
        *((state, True) for state in RUNNING),
    ],
)
def test_a_job_that_is_cancelled_while_it_is_decided_is_not_requeued(
    stage: Stage, tmp_path: Path, outcome: str, requeued: bool
) -> None:
    """Its Python takes its time, as where a container has to start."""
    slow, told = tmp_path / "python", tmp_path / "decides"
    slow.write_text(f'#!/bin/sh\n{sys.executable} "$@"\ncode=$?\ncase "$*" in *" next "*) touch {told}\n')
    with slow.open("a") as file:
        file.write(f"while [ -e {told} ]; do timeout 0.1 tail -f /dev/null; done ;; esac\nexit $code\n")
    slow.chmod(0o755)
    stopped = {"outcome": "stopped", "step": 3, "reason": "SIGUSR1"}
    process = stage.start(variables={"PYTHON": str(slow)}, outcome=stopped)
    while not told.exists():
        time.sleep(0.02)
    plan = json.loads((stage.folder / "plan.json").read_text())
    (stage.folder / "plan.json").write_text(json.dumps(plan | {"state": outcome}))
    told.unlink()
    errors = stage.finish(process)
    assert stage.orders == ([["requeue", "41"]] if requeued else [])
    assert ("not requeued: job 41 was ended by others\n" in errors) == (not requeued)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_while_it_looks_for_the_packages_is_no_lack_of_them(stage: Stage, tmp_path: Path, number: int) -> None:
    """As where a container takes its time to start. SLURM signals all processes."""
    slow = tmp_path / "python"
    looks = f'[ "$1" = -c ] && touch {tmp_path}/looks && timeout 3 tail -f /dev/null'
    slow.write_text(f'#!/bin/sh\n{looks}\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    process = stage.start(variables={"PYTHON": str(slow), "SLURM_RESTART_COUNT": "1"}, new_session=True)
    while not (tmp_path / "looks").exists():
        time.sleep(0.02)
    os.killpg(process.pid, number)
    told = stage.finish(process)
    assert f"requeued: asked to stop ({signal.Signals(number).name.removeprefix('SIG')}), and ended before" in told
    assert stage.orders == [["requeue", "41"]] and "no Python" not in told


def test_a_signal_while_slurm_is_asked_changes_nothing_of_what_it_says(stage: Stage) -> None:
    """SLURM signals all processes."""
    (stage.folder / "comment").write_text("mine")
    process = stage.start(show_seconds=1, new_session=True)
    while not (stage.folder / "shows").exists():
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGUSR1)
    assert "requeued: asked to stop (USR1), and ended before it had saved" in stage.finish(process)
    assert stage.orders == [["requeue", "41"]] and (stage.folder / "comment").read_text() == "mine"


def test_what_people_write_is_not_taken_for_what_slurm_says(stage: Stage) -> None:
    own = "JobState=FAILED Reason=TimeLimit Requeue=0 TimeLimit=5 ExcNodeList=n[1"
    (stage.folder / "comment").write_text(own)
    told = stage.run(outcome={"outcome": "stopped", "step": 3, "reason": "SIGUSR1"})
    assert "requeued: stopped by SIGUSR1 and saved at step 3" in told
    assert stage.orders == [["update", "JobId=41", f"Comment={own}; allattn: begun on n1"], ["requeue", "41"]]
    stage.run(bad=["n2"], excluded="n3")
    assert stage.orders[2:] == [["requeue", "41"], ["update", "JobId=41", "ExcNodeList=n3,n2"]]


def test_a_node_that_does_not_see_the_run_is_noted_behind_the_users_own_comment(stage: Stage) -> None:
    (stage.folder / "comment").write_text("project = 7; billed")
    again = {"SLURM_RESTART_COUNT": "1", "SLURMD_NODENAME": "n4"}
    stage.run(outcome={"outcome": "stopped", "step": 3, "reason": "SIGUSR1"})
    begun = "project = 7; billed; allattn: begun on n1"
    assert stage.orders == [["update", "JobId=41", f"Comment={begun}"], ["requeue", "41"]]
    (stage.folder / "run").rename(stage.folder / "hidden")
    told = stage.run(variables=again)
    assert (
        f"requeued: nothing in {stage.folder}/run/jobs on n4 tells of job 41, which began on n1" in told
        and not (stage.folder / "run/jobs").exists()
    )
    assert stage.orders[2:] == [
        ["requeue", "41"],
        ["update", "JobId=41", "ExcNodeList=n4"],
        ["update", "JobId=41", f"Comment={begun}; allattn: unseen on n4"],
    ]
    (stage.folder / "hidden").rename(stage.folder / "run")
    assert "life 2 of" in stage.run(variables=again) and len(stage.orders) == 5


def test_how_early_it_is_told_to_stop_may_be_told(stage: Stage) -> None:
    """Where sbatch was given a --signal of its own, which the script does not see."""
    stage.run(variables={"SIGNAL_SECONDS": "120"})
    words = (stage.folder / "run/jobs/life-0001/arguments").read_bytes().decode().split("\0")
    assert words[words.index("--stop-deadline-minutes") + 1] == "1.5"


def test_no_answer_is_an_error(stage: Stage) -> None:
    """A Python that cannot even be started."""
    errors = stage.run(code=2, variables={"PYTHON": "/nowhere/python"})
    assert "/nowhere/python: No such file or directory" in errors
    assert os.listdir(stage.folder / "run") == [] if (stage.folder / "run").exists() else True


def test_an_answer_is_not_waited_for_till_the_end_of_the_job(stage: Stage, tmp_path: Path) -> None:
    """A Python that stands still, as on a file system that does."""
    hanging = tmp_path / "python"
    hanging.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\nexec sleep 300\n')
    hanging.chmod(0o755)
    variables = {"PYTHON": str(hanging), "DECISION_SECONDS": "1", "SLURMD_NODENAME": "n4"}
    began = time.monotonic()
    assert stage.run(code=2, variables=variables) == f"error: {hanging} gave no answer on n4\n"
    stage.run(variables=variables | {"SLURM_RESTART_COUNT": "1"})
    noted = ["update", "JobId=41", "Comment=allattn: lacking on n4"]
    assert stage.orders == [["requeue", "41"], ["update", "JobId=41", "ExcNodeList=n4"], noted]
    assert time.monotonic() - began < 200
