"""A job of the shipped script on two nodes of a real SLURM: driven out, requeued, done (more: test_job_faults.py)."""

from pathlib import Path

from tests.support.commands import records, run_ranks
from tests.support.jobs import Scene
from tests.support.template import Template

TWO = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2")
STEPS = "150"
FLAGS = ("--train-iters", STEPS, "--tensor-model-parallel-size", "2", "--attention-dropout", "0.1")


def test_a_job_that_is_driven_out_saves_goes_on_and_ends(scene: Scene, tmp_path: Path, template: Template) -> None:
    job = scene.submit(*TWO, flags=scene.flags(*FLAGS))
    job.until_step(3)
    urgent = scene.drive_out()
    assert job.ended() == "COMPLETED", job.output
    assert scene.cluster.job(urgent)["JobState"] == "COMPLETED"
    (how, step), *rest = job.endings
    assert (how, rest) == ("stopped", [("done", int(STEPS))]) and 3 <= step < int(STEPS)
    assert job.begins == [0, step]
    assert job.outcome == {"outcome": "done", "step": int(STEPS), "reason": "reached --train-iters"}
    assert "resumed from run/checkpoints" in (job.run / "jobs/life-0002/rank-000.log").read_text()

    alone = tmp_path / "alone"
    alone.mkdir()
    for rank in run_ranks(2, *scene.flags(*FLAGS), folder=alone, template=template):
        assert rank.returncode == 0, rank.output
    expected = [{k: v for k, v in one.items() if k != "tokens_per_second"} for one in records(alone / "run")]
    assert job.records == expected  # to the last bit


def test_a_mistake_ends_the_job_with_its_reason(scene: Scene) -> None:
    job = scene.submit(*TWO, flags=scene.flags("--lr", "fast"))
    assert job.ended() == "FAILED"
    assert scene.cluster.job(job.job)["ExitCode"] == "2:0" and scene.cluster.job(job.job)["Restarts"] == "0"
    assert "error: --lr fast: must be a number; the default is 0.001\n" in job.output
    assert not job.run.exists()
