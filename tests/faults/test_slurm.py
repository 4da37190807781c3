"""Signals under SLURM, on a real cluster of two nodes on this machine: to the tasks, to srun and to the batch shell."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Runs
from tests.support.commands import PRETRAIN, ROOT, environment, outcome

pytestmark = pytest.mark.faults
ENDLESS = ("--train-iters", "100000", "--tensor-model-parallel-size", "2")
PATIENCE = 120.0


class Cluster:
    """Two nodes with namespaces of their own; commands of SLURM are given to `run`."""

    def __init__(self, scripts: Path, state: Path) -> None:
        self._scripts, self._state = scripts, state

    def start(self) -> None:
        env = {**os.environ, "NODES": "2", "GPUS": "1"}
        command = [str(self._scripts / "start_cluster.sh"), str(self._state)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        subprocess.run(
            [str(self._scripts / "stop_cluster.sh"), str(self._state)],
            capture_output=True,
            timeout=PATIENCE,
            check=True,
        )

    def run(self, command: str, folder: Path) -> str:
        env = environment({"PYTHONPATH": str(ROOT)})
        script = f". {shlex.quote(str(self._state / 'env.sh'))}; {command}"
        done = subprocess.run(
            ["bash", "-ec", script], cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def ended(self, job: str, folder: Path) -> str:
        """The state in which a job ends, such as COMPLETED."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            state = re.search("JobState=([A-Z_]+)", self.run(f"scontrol -o show job {job}", folder))
            if state is not None and state[1] not in ("RUNNING", "COMPLETING", "PENDING"):
                return state[1]
            time.sleep(0.5)
        raise AssertionError(f"job {job} does not end")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("a cluster on one machine needs root")
    if not Path("/usr/sbin/slurmctld").exists():
        pytest.skip("no SLURM: apt-get install slurmctld slurmd slurm-client munge iproute2")
    with tempfile.TemporaryDirectory() as state:  # not one of pytest's, which other users cannot enter
        os.chmod(state, 0o755)
        cluster = Cluster(shared / "slurm_cluster", Path(state))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


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
def test_a_signal_to_a_job_stops_and_saves_it(runs: Runs, cluster: Cluster, order: str, name: str) -> None:
    words = [sys.executable, PRETRAIN, *runs.flags(*ENDLESS)]
    (runs.folder / "job.sh").write_text(BATCH.format(command=shlex.join(words)))
    job = cluster.run("sbatch --parsable job.sh", runs.folder)
    log, deadline = runs.folder / "log.txt", time.monotonic() + PATIENCE
    while not (log.exists() and re.search("step +4/", log.read_text())):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.1)
    cluster.run(order.format(job=job), runs.folder)
    state = cluster.ended(job, runs.folder)
    text = log.read_text()
    told = outcome(runs.folder / "run")
    assert (told["outcome"], told["reason"]) == ("stopped", name), text
    assert (runs.folder / "run" / "latest").read_text() == f"step_{told['step']:08d}\n"
    assert state == "FAILED"  # exit code 3
