"""The job of 64 ranks, on 8 nodes × 8 tasks of this machine: TP 4 × PP 4 × DP 4 (17 GB of memory; up to an hour)."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.jobs import Scene, Submission
from tests.support.slurm import Cluster, Site, cluster, why_none

pytestmark = pytest.mark.cluster
GRACE = 1200  # seconds that a job gets which is driven out, on a machine that has not 64 cores
HOURS = 4 * 3600.0
STEPS = 10
FLAGS = (
    *("--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "4", "--num-layers", "4"),
    *("--global-batch-size", "16", "--micro-batch-size", "1", "--attention-dropout", "0.1", "--eval-iters", "1"),
    *("--train-iters", str(STEPS), "--stop-deadline-minutes", str(GRACE // 60)),
    *("--startup-timeout-minutes", "240", "--step-timeout-minutes", "120", "--evaluation-timeout-minutes", "120"),
    *("--save-timeout-minutes", "120", "--distributed-timeout-minutes", "120"),
)


@pytest.fixture(scope="module")
def eight_nodes() -> Iterator[Cluster]:
    if (why := why_none()) is not None:
        pytest.skip(why)
    with cluster(Site(nodes=8, gpus=8, cpus=64, grace=GRACE, kill_wait=30, down_after=600)) as started:
        yield started


def train(scene: Scene, driven_out: bool, told: Callable[[str, object], None]) -> Submission:
    """A job of the shipped script, as it is, to its end. told: how many seconds what has taken."""
    began = time.monotonic()
    job = scene.submit(flags=scene.flags(*FLAGS), variables={"HEALTH_SECONDS": "3000"})
    if driven_out:
        job.until_step(3, seconds=HOURS)
        told("seconds until step 3", time.monotonic() - began)
        asked = time.monotonic()
        urgent = scene.drive_out()
        job.until(lambda: len(job.endings) == 1, GRACE + 120)
        told("seconds from the signal until all is saved", time.monotonic() - asked)
        assert scene.cluster.ended(urgent, HOURS) == "COMPLETED"
    assert job.ended(HOURS) == "COMPLETED", job.output
    told("seconds in all", time.monotonic() - began)
    return job


def test_driven_out_requeued_done(
    eight_nodes: Cluster, data: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for name in ("driven", "alone"):
        (tmp_path / name).mkdir()
    driven = train(Scene(eight_nodes, tmp_path / "driven", data), True, record_property)
    ((how, step), end), (first, second) = driven.endings, driven.begins
    assert how == "stopped" and 3 <= step < STEPS and end == ("done", STEPS)
    assert (first, second) == (0, step)
    assert driven.outcome == {"outcome": "done", "step": STEPS, "reason": "reached --train-iters"}
    header = (driven.run / "jobs/life-0002/rank-000.log").read_text()
    assert "64 × cpu: TP 4 × PP 4 (1 + 1 + 1 + 1 layers) × DP 4" in header

    alone = train(Scene(eight_nodes, tmp_path / "alone", data), False, record_property)
    assert alone.endings == [("done", STEPS)]
    assert driven.records == alone.records  # to the last bit
    assert [one["step"] for one in driven.records if one["kind"] == "train"] == list(range(1, STEPS + 1))
