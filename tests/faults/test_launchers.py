"""Signals to launchers: the run is saved where they pass the signal on or are missed, and no rank is left behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Runs, until_step
from tests.support.commands import BIN, MARK, PRETRAIN, ROOT, Program, environment, free_port, marked, outcome

pytestmark = pytest.mark.faults
LAUNCH = ROOT / "launch"
ENDLESS = ("--train-iters", "100000")
TP2 = ("--tensor-model-parallel-size", "2")
PATIENCE = 60.0


def deepspeed() -> tuple[list[str], dict[str, str]]:
    return ["deepspeed", "--quiet", "--num_gpus", "2", "--master_port", str(free_port()), PRETRAIN], {}


def torchrun_alone() -> tuple[list[str], dict[str, str]]:
    return ["torchrun", "--nproc-per-node", "2", "--", PRETRAIN], {}


def torchrun() -> tuple[list[str], dict[str, str]]:
    return [str(LAUNCH / "torchrun.sh")], {"NPROC_PER_NODE": "2"}


def mpirun() -> tuple[list[str], dict[str, str]]:
    pytest.importorskip("mpi4py", reason="ranks under mpirun are found through mpi4py")
    if not (BIN / "mpirun").exists():
        pytest.skip(f"no mpirun beside this Python, {BIN}: pip install mpich")
    return [str(LAUNCH / "mpirun.sh")], {"NPROC": "2"}


def signalled(runs: Runs, launcher: tuple[list[str], dict[str, str]], number: signal.Signals) -> tuple[int, str]:
    """The launcher's code and what was on stderr, once every process of the run has ended."""
    command, variables = launcher
    env = environment({"PYTHONPATH": str(ROOT)} | variables)
    with Program([*command, *runs.flags(*ENDLESS, *TP2)], runs.folder, env) as program:
        until_step(4, program)
        program.process.send_signal(number)
        code = program.wait(PATIENCE).returncode
        deadline = time.monotonic() + PATIENCE
        while left := marked(env[MARK]):
            assert time.monotonic() < deadline, f"{left} are still there:\n{program.stdout}{program.stderr}"
            time.sleep(0.1)
        return code, program.stderr


def check_stopped(run: Path, name: str) -> None:
    told = outcome(run)
    assert (told["outcome"], told["reason"]) == ("stopped", name)
    assert (run / "latest").read_text() == f"step_{told['step']:08d}\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_the_deepspeed_command_is_missed(runs: Runs, name: str) -> None:
    """It dies of either without passing it on."""
    number = signal.Signals[name]
    code, _ = signalled(runs, deepspeed(), number)
    assert code == -number
    check_stopped(runs.folder / "run", "SIGHUP")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_torchrun_passes_sigterm_on(runs: Runs, name: str) -> None:
    """The script makes SIGUSR1, of which torchrun would die, a SIGTERM."""
    code, _ = signalled(runs, torchrun(), signal.Signals[name])
    assert code == 1
    check_stopped(runs.folder / "run", "SIGTERM")


def test_torchrun_starts_ranks_anew_that_go_on(runs: Runs) -> None:
    """--max-restarts: its store has what the ranks before have left there, which concerns the new ones not at all."""
    command = ["torchrun", "--nproc-per-node", "2", "--max-restarts", "2", "--master-port", str(free_port()), PRETRAIN]
    flags = runs.flags(*TP2, "--train-iters", "30", "--save-interval", "5", "--load", "run")
    env = environment({"PYTHONPATH": str(ROOT)})
    with Program([*command, *flags], runs.folder, env) as program:
        for step in (7, 17):  # of the second life too
            until_step(step, program)
            os.kill(rank_of(env[MARK], 1), signal.SIGKILL)
        assert program.wait(4 * PATIENCE).returncode == 0, program.stderr
        shown = program.stdout
    assert [step for step in (5, 15) if f"resumed from run/checkpoints/step_{step:08d}" in shown] == [5, 15]
    assert outcome(runs.folder / "run")["step"] == 30


def rank_of(mark: str, rank: int) -> int:
    """The process id of a rank."""
    for pid in marked(mark):
        content = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in content and PRETRAIN.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"no rank {rank} among {marked(mark)}")


def test_torchrun_dies_of_sigusr1_and_is_missed(runs: Runs) -> None:
    """With it the store is gone at which ranks tell each other, so that nothing is saved."""
    code, stderr = signalled(runs, torchrun_alone(), signal.SIGUSR1)
    assert code == -signal.SIGUSR1
    assert "error: the launcher on the first host is gone: " in stderr
    told = outcome(runs.folder / "run")
    assert told["outcome"] == "failed" and told["reason"].startswith("the launcher on the first host is gone: ")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_mpirun(runs: Runs, name: str) -> None:
    code, _ = signalled(runs, mpirun(), signal.Signals[name])
    print(code, os.listdir(runs.folder / "run"))
    assert code != 0
    check_stopped(runs.folder / "run", name)
