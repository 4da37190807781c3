"""Signals under SLURM, on a real cluster of two nodes on this machine: to the tasks, to srun and to the batch shell."""

import re
import shlex
import sys
import time
from collections.abc import Iterator

import pytest

from tests.faults.conftest import Runs
from tests.support.commands import PRETRAIN, outcome
from tests.support.slurm import Cluster, Site, cluster, why_none

pytestmark = pytest.mark.faults
ENDLESS = ("--train-iters", "100000", "--tensor-model-parallel-size", "2")
PATIENCE = 300.0


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    if (why := why_none()) is not None:
        pytest.skip(why)
    with cluster(Site(nodes=2, gpus=1)) as started:
        yield started


# srun passes SIGUSR1 on to its tasks; of SIGTERM it kills them (docs/reliability.md)
BATCH = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --mem=0 --output=log.txt --no-requeue
srun --kill-on-bad-exit=1 {command} &
step=$!
trap 'kill -USR1 "$step"' USR1 TERM
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
exit "$code"
"""


@pytest.mark.parametrize(
    ("order", "name"),
    [
        ("scancel --signal=USR1 {job}", "SIGUSR1"),
        ("scancel --signal=TERM {job}", "SIGTERM"),
        ("scancel --signal=USR1 --batch {job}", "SIGUSR1"),
        ("scancel --signal=TERM --batch {job}", "SIGUSR1"),
        ("scancel --signal=USR1 --full {job}", "SIGUSR1"),
    ],
)
def test_a_signal_to_a_job_stops_and_saves_it(runs: Runs, two_nodes: Cluster, order: str, name: str) -> None:
    words = [sys.executable, PRETRAIN, *runs.flags(*ENDLESS)]
    (runs.folder / "job.sh").write_text(BATCH.format(command=shlex.join(words)))
    job = two_nodes.run("sbatch", "--parsable", "job.sh", folder=runs.folder)
    log, deadline = runs.folder / "log.txt", time.monotonic() + PATIENCE
    while not (log.exists() and re.search("step +4/", log.read_text())):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.1)
    two_nodes.run(*order.format(job=job).split(), folder=runs.folder)
    state = two_nodes.ended(job, PATIENCE)
    text = log.read_text()
    told = outcome(runs.folder / "run")
    assert (told["outcome"], told["reason"]) == ("stopped", name), text
    assert (runs.folder / "run" / "latest").read_text() == f"step_{told['step']:08d}\n"
    assert state == "FAILED"  # exit code 3
