"""What becomes of a job of the shipped script when a rank, a node, the controller or the user goes wrong.

Every run is bitwise that of one which was left alone, and repeats no more than the steps after its last checkpoint.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.cluster.jobs.script import JobOptions
from megatron_allattn.config.cli import without_flag
from megatron_allattn.parallel.nodelist import expand_nodes
from tests.support import stand_in
from tests.support.commands import ROOT, records, run_ranks
from tests.support.jobs import PATIENCE, Scene, Submission, hide, show
from tests.support.slurm import Cluster
from tests.support.template import Template

pytestmark = pytest.mark.cluster
TWO = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2")
EVERY = 20  # steps between checkpoints
STEPS = 120
FLAGS = (
    *("--train-iters", str(STEPS), "--save-interval", str(EVERY), "--tensor-model-parallel-size", "2"),
    *("--attention-dropout", "0.1"),
)
ENDLESS = ("--train-iters", "100000", *FLAGS[2:])
Records = list[dict[str, Any]]


@pytest.fixture(params=["stand-in", "pretrain"])
def scene(request: pytest.FixtureRequest, three_nodes: Cluster, data: Path, tmp_path: Path) -> Iterator[Scene]:
    """With ranks that stand in for those of pretrain.py, in seconds, and with those."""
    three_nodes.until(lambda: three_nodes.idle() == three_nodes.nodes, PATIENCE, lambda: "nodes are not idle")
    python = sys.executable if request.param == "pretrain" else str(stand_in.write(tmp_path / "stand_in.py"))
    yield Scene(three_nodes, tmp_path, data, python)
    three_nodes.run("scancel", "--user=root", folder=tmp_path)  # what a test that has failed leaves


@pytest.fixture(scope="module")
def trained_alone(data: Path, tmp_path_factory: pytest.TempPathFactory, template: Template) -> Records:
    folder = tmp_path_factory.mktemp("alone")
    flags = Scene(None, folder, data).flags(*FLAGS)  # type: ignore[arg-type]
    for rank in run_ranks(2, *flags, folder=folder, template=template):
        assert rank.returncode == 0, rank.output
    return [{k: v for k, v in one.items() if k != "tokens_per_second"} for one in records(folder / "run")]


@pytest.fixture
def alone(request: pytest.FixtureRequest, scene: Scene) -> Records:
    """The records of a run that is left alone."""
    if scene.python == sys.executable:
        found: Records = request.getfixturevalue("trained_alone")
        return found
    return [{"kind": "train", "step": step, "loss": json.dumps(1 / step)} for step in range(1, STEPS + 1)]


def only(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", [kind], indirect=True)


def check_recovered(job: Submission, alone: Records, how: str, lost_at: int) -> None:
    """It is done in its second life, which went on from the last checkpoint before the step where it was lost."""
    assert job.ended() == "COMPLETED", job.output
    assert [ending for ending, _ in job.endings] == [how, "done"], job.output
    first, second = job.begins
    assert first == 0 and lost_at - EVERY < second <= STEPS and second % EVERY == 0
    assert job.records == alone


def test_a_rank_that_is_killed(scene: Scene, alone: Records) -> None:
    job = scene.submit(*TWO, flags=scene.flags(*FLAGS))
    job.until_step(EVERY + 5)
    job.strike(1)
    check_recovered(job, alone, "failed", EVERY)
    assert "rank 1 on n2: Killed" in job.output


@only("stand-in")
def test_a_rank_that_is_gone_early_without_an_error(scene: Scene) -> None:
    """srun waits a minute for the others, which do not miss it here, and ends them."""
    job = scene.submit(*TWO, flags=scene.flags(*ENDLESS))
    job.until_step(EVERY + 5)
    began = time.monotonic()
    job.strike(1, signal.SIGUSR2)
    job.until(lambda: len(job.endings) == 1)
    assert 55 < time.monotonic() - began < PATIENCE
    ((how, step),) = job.endings
    assert how == "failed" and step >= EVERY, job.output
    job.until_step(step + 1, life=2)
    job.cancel()
    assert job.ended() == "CANCELLED"
    assert job.begins == [0, step]


@only("pretrain")
def test_a_rank_that_hangs(scene: Scene, alone: Records) -> None:
    """It is missed after the time-outs; srun kills it with the others."""
    minutes = ("--distributed-timeout-minutes", "0.5", "--step-timeout-minutes", "0.5")
    job = scene.submit(*TWO, flags=scene.flags(*FLAGS, *minutes))
    job.until_step(EVERY + 5)
    job.strike(1, signal.SIGSTOP)
    check_recovered(job, alone, "failed", EVERY)
    assert "rank 1" in job.output


@pytest.mark.parametrize(
    ("scene", "which"),
    # ranks that stand in do not miss each other, and would be done before SLURM misses a node without the batch script
    [("stand-in", "of the batch script"), ("pretrain", "of the batch script"), ("pretrain", "another")],
    indirect=["scene"],
)
def test_power_loss_of_a_node(scene: Scene, alone: Records, which: str) -> None:
    """With a third node, the job goes on at once; this one comes back later."""
    job = scene.submit(*TWO, flags=scene.flags(*FLAGS))
    job.until_step(EVERY + 5)
    node = "n1" if which == "of the batch script" else "n2"
    assert scene.cluster.job(job.job)["NodeList"] == "n[1-2]"
    scene.cluster.crash(node)
    try:
        assert job.ended() == "COMPLETED", job.output
        assert "n3" in expand_nodes(scene.cluster.job(job.job)["NodeList"], "NodeList")
    finally:
        scene.cluster.boot(node)
        scene.cluster.until(lambda: node in scene.cluster.idle(), PATIENCE, lambda: f"{node} does not come back")
    assert job.begins[0] == 0 and job.begins[-1] >= EVERY and job.begins[-1] % EVERY == 0
    assert job.endings[-1] == ("done", STEPS)
    assert job.records == alone


def test_a_daemon_that_dies_leaves_ranks_that_are_waited_for(scene: Scene, alone: Records) -> None:
    """The job is requeued while the ranks on that node still train: the run folder's lock keeps the next life waiting,
    or finds them gone."""
    job = scene.submit(*TWO, flags=scene.flags(*FLAGS))
    job.until_step(EVERY + 5)
    scene.cluster.crash_daemon("n2")
    try:
        assert job.ended() == "COMPLETED", job.output
    finally:
        scene.cluster.crash("n2")
        scene.cluster.boot("n2")
        scene.cluster.until(lambda: "n2" in scene.cluster.idle(), PATIENCE, lambda: "n2 does not come back")
    assert job.endings[-1] == ("done", STEPS)
    assert job.records == alone


def test_the_time_limit(scene: Scene, alone: Records) -> None:
    """SLURM looks at its clock every half minute: a job of three minutes that is told 1.5 before has one."""
    options = JobOptions(nodes=2, gpus_per_node=1, cpus_per_task=2, time="3", signal_seconds=90)
    job = scene.submit_written(options, scene.flags(*ENDLESS))
    job.until(lambda: len(job.endings) >= 1)
    assert job.endings[0][0] == "stopped" and job.endings[0][1] > 0, job.output
    assert "stopped by SIGUSR1 and saved at step" in job.output
    job.until_step(job.endings[0][1] + 1, life=2)
    (job.run / "jobs" / "stop").touch()
    job.cancel("--batch", "--signal=USR1")
    assert job.ended() == "FAILED" and scene.cluster.job(job.job)["ExitCode"] == "3:0"
    assert job.begins[1] == job.endings[0][1]
    steps = min(STEPS, job.endings[-1][1])
    assert [one for one in job.records if one["step"] <= steps] == alone[:steps]


def test_scancel_ends_it_for_good(scene: Scene) -> None:
    job = scene.submit(*TWO, flags=scene.flags(*ENDLESS))
    job.until_step(EVERY + 5)
    job.cancel()
    assert job.ended() == "CANCELLED"
    time.sleep(8)  # longer than a requeued job waits before it may start again
    assert job.state() == "CANCELLED" and scene.cluster.job(job.job)["Restarts"] == "0"
    assert job.begins == [0]


@only("pretrain")
@pytest.mark.parametrize("order", ["--signal=USR1", "--signal=TERM", "--signal=USR1 --batch", "--signal=USR1 --full"])
def test_a_signal_by_hand_saves_and_requeues(scene: Scene, order: str) -> None:
    job = scene.submit(*TWO, flags=scene.flags(*ENDLESS))
    job.until_step(3)
    job.cancel(*order.split())
    job.until(lambda: len(job.begins) == 2)
    ((how, step),) = job.endings
    assert how == "stopped" and step >= 3
    job.until_step(step + 1, life=2)
    job.cancel()
    assert job.ended() == "CANCELLED"
    assert job.begins == [0, step]


@only("pretrain")
def test_sigterm_to_all_goes_on_from_the_last_checkpoint(scene: Scene) -> None:
    """srun, which gets it too, kills the ranks at once."""
    job = scene.submit(*TWO, flags=scene.flags(*ENDLESS))
    job.until_step(EVERY + 5)
    job.cancel("--signal=TERM", "--full")
    job.until(lambda: len(job.begins) == 2)
    ((how, step),) = job.endings
    assert how == "stopped" and step >= EVERY and job.begins == [0, step]
    job.until_step(step + 1, life=2)
    job.cancel()
    assert job.ended() == "CANCELLED"


def test_a_bad_node_with_one_to_spare(scene: Scene, alone: Records) -> None:
    """It is left out, and the job needs no second life."""
    options = ("--nodes=3", *TWO[1:])
    hide(scene.cluster, "n2", scene.data.parent)
    try:
        job = scene.submit(*options, flags=scene.flags(*FLAGS), variables={"SPARE_NODES": "1"})
        assert job.ended() == "COMPLETED", job.output
    finally:
        show(scene.cluster, "n2", scene.data.parent)
    assert job.endings == [("done", STEPS)] and "left out: n2: " in job.output
    assert job.records == alone


def test_a_bad_node_without_one_to_spare(scene: Scene, alone: Records) -> None:
    """The job waits for another node in its place."""
    hide(scene.cluster, "n2", scene.data.parent)
    try:
        job = scene.submit(*TWO, flags=scene.flags(*FLAGS))
        assert job.ended() == "COMPLETED", job.output
    finally:
        show(scene.cluster, "n2", scene.data.parent)
    assert job.endings == [("unfit", 0), ("done", STEPS)]
    described = scene.cluster.job(job.job)
    assert (described["ExcNodeList"], described["NodeList"]) == ("n2", "n[1,3]")
    assert "requeued: n2: " in job.output and "; without n2" in job.output
    assert job.records == alone


@only("stand-in")
def test_the_node_of_the_batch_script_does_not_see_the_run_folder(scene: Scene) -> None:
    """To it the other node is the silent one, and so is the next."""
    runs = scene.folder / "runs"
    runs.mkdir()
    hide(scene.cluster, "n1", runs)
    try:
        flags = scene.flags(*FLAGS, "--save", str(runs / "run"))
        job = scene.submit(*TWO, flags=flags, variables={"HEALTH_SECONDS": "60"}, run=runs / "run")
        assert job.ended() == "FAILED", job.output
    finally:
        show(scene.cluster, "n1", runs)
    assert scene.cluster.job(job.job)["Restarts"] == "1" and list(runs.iterdir()) == []
    assert (
        "stopped: n1, on which the batch script runs, is the only node whose report is in the run folder" in job.output
    )


@only("stand-in")
@pytest.mark.parametrize("with_output", [False, True])
def test_a_node_that_does_not_see_what_the_job_has_done(scene: Scene, alone: Records, with_output: bool) -> None:
    """The file system of the run folder, and perhaps of what it prints, goes away on the node of the batch script."""
    runs = scene.folder / "runs"
    runs.mkdir()
    scene = replace(scene, folder=runs if with_output else scene.folder)
    job = scene.submit(*TWO, flags=scene.flags(*FLAGS, "--save", str(runs / "run")), run=runs / "run")
    job.until_step(EVERY + 5)
    hide(scene.cluster, "n1", runs)
    try:
        job.strike(1)
        assert job.ended() == "COMPLETED", job.output
    finally:
        show(scene.cluster, "n1", runs)
    assert scene.cluster.job(job.job)["ExcNodeList"] == "n1"
    assert job.endings[-1] == ("done", STEPS) and job.records == alone


def test_a_fault_of_all_nodes_ends_it(scene: Scene) -> None:
    job = scene.submit(*TWO, flags=scene.flags(*FLAGS, "--data-path", "/nowhere/corpus"))
    assert job.ended() == "FAILED"
    assert scene.cluster.job(job.job)["Restarts"] == "0"
    assert "/nowhere/corpus.json: found is not there" in job.output
    assert "2 of 2 nodes" in job.output


@only("pretrain")
def test_a_mistake_that_ranks_find_ends_it(scene: Scene) -> None:
    job = scene.submit(*TWO, flags=scene.flags("--train-iters", "5", "--global-batch-size", "3"))
    assert job.ended() == "FAILED"
    assert [how for how, _ in job.endings] == ["mistake"], job.output
    assert scene.cluster.job(job.job)["ExitCode"] == "2:0" and "stopped: --global-batch-size 3" in job.output


def test_lives_without_a_new_checkpoint_end_it(scene: Scene) -> None:
    job = scene.submit(*TWO, flags=scene.flags("--train-iters", "100000"), variables={"MAX_WASTED": "2"})
    for life in (1, 2):
        job.until_step(3, life)
        job.strike(0)
    assert job.ended() == "FAILED"
    assert job.endings == [("failed", 0), ("failed", 0)], job.output
    assert "stopped: 2 lives in a row have failed without a checkpoint after the beginning; the last: " in job.output


def test_the_restart_cap(scene: Scene) -> None:
    """Also where every life gets on."""
    job = scene.submit(*TWO, flags=scene.flags(*ENDLESS), variables={"MAX_LIVES": "2"})
    for life in (1, 2):
        job.until_step(life * EVERY + 3, life)
        job.strike(1)
    assert job.ended() == "FAILED"
    assert [how for how, _ in job.endings] == ["failed", "failed"] and job.endings[1][1] > job.endings[0][1] >= EVERY
    assert "stopped: 2 lives are the most that a job gets (MAX_LIVES); the last: " in job.output


@only("stand-in")
def test_elements_of_an_array_live_by_themselves(scene: Scene) -> None:
    """By tools/ablation.py: the element that is asked to stop is requeued, alone; the last has the array's number."""
    output = scene.folder / "ablation"
    own = ("--output", str(output), "--variants", "attn-split", "--seeds", "1", "--gpus-per-node", "1", "--sbatch")
    flags = without_flag(scene.flags("--train-iters", "150"), "save")  # each element has its own
    scene.cluster.run(sys.executable, str(ROOT / "tools/ablation.py"), *own, *flags, folder=scene.folder)
    variables = {"PYTHON": scene.python, "HEALTH_SECONDS": str(PATIENCE)}
    words = ("sbatch", "--parsable", "--cpus-per-task=2", str(output / "array.sbatch"))
    array = scene.cluster.run(*words, folder=scene.folder, variables=variables)
    runs = [output / name for name in ("all-attn-seed1", "attn-split-seed1")]
    jobs = [Submission(scene, f"{array}_{place}", run) for place, run in enumerate(runs)]
    for job in jobs:
        job.until_step(5)
    jobs[1].cancel("--batch", "--signal=USR1")
    assert [job.ended() for job in jobs] == ["COMPLETED"] * 2
    assert jobs[0].endings == [("done", 150)]
    (how, step), done = jobs[1].endings
    assert how == "stopped" and 5 <= step < 150 and done == ("done", 150)


def test_the_controller_is_away_when_a_life_ends(scene: Scene, alone: Records) -> None:
    """The batch script asks for the requeue until it is heard."""
    job = scene.submit(*TWO, flags=scene.flags(*FLAGS))
    job.until_step(EVERY + 5)
    ranks = scene.cluster.ranks(job.job)
    scene.cluster.stop_controller()
    try:
        for pid in ranks.values():  # srun cannot end the others
            os.kill(pid, signal.SIGKILL)
        time.sleep(20)  # the training step is over by then
    finally:
        scene.cluster.start_controller()
    check_recovered(job, alone, "failed", EVERY)
