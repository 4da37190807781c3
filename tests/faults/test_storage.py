"""Disks that are full, limited or read-only, and a second run on the same folder."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import FAULTY, PATH, Runs
from tests.support.commands import environment, outcome, world
from tests.support.template import ROOT

COMMON = ("--train-iters", "4", "--save-interval", "2")


def in_a_namespace(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A shell script with mounts of its own."""
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", script]
    return subprocess.run(
        command, cwd=folder, env=environment(PATH), capture_output=True, text=True, timeout=240, check=False
    )


def pretrain(runs: Runs, *flags: str) -> str:
    """The command, quoted."""
    command = [sys.executable, str(ROOT / "pretrain.py"), *runs.flags(*flags)]
    return shlex.join(command)


namespaces = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


@namespaces
def test_a_file_system_that_fills_up_keeps_the_old_checkpoint(runs: Runs) -> None:
    """One of 1 MiB, with room for one checkpoint: told with the path and the bytes, nothing half-written is left."""
    command = pretrain(runs, "--train-iters", "20", "--save-interval", "2", "--save", "small/run")
    script = (
        f"mkdir small; mount -t tmpfs -o size=1m none small; set +e; {command}; echo code $?; "
        "ls -A small/run/checkpoints; cat small/run/latest"
    )
    done = in_a_namespace(script, runs.folder)
    assert "error: small/run/checkpoints/" in done.stderr and "no space left: " in done.stderr, done.stderr
    assert "bytes needed, " in done.stderr and "bytes free; free some space or save to another folder" in done.stderr
    assert done.stdout.splitlines()[-3:] == ["code 1", "step_00000002", "step_00000002"]


@namespaces
def test_a_read_only_folder_is_refused_before_training(runs: Runs) -> None:
    script = (
        f"mkdir there; mount --bind there there; mount -o remount,bind,ro there; set +e; "
        f"{pretrain(runs, '--save', 'there/run')}; echo code $?"
    )
    done = in_a_namespace(script, runs.folder)
    assert done.stdout.splitlines()[-1] == "code 2" and "step 1/" not in done.stdout
    assert "error: --save there/run: cannot be written (Read-only file system); choose another folder" in done.stderr


@namespaces
@pytest.mark.parametrize(
    ("mount", "told"),
    [
        ("mount -o remount,bind,ro there", "cannot be written by rank 1 on HOST (Read-only file system)"),
        pytest.param(
            "mount -t tmpfs none there",
            "is not the folder of rank 0 on rank 1 on HOST: a file made there is not seen after 7.5 s",
            marks=pytest.mark.faults,
        ),
    ],
)
def test_a_folder_that_one_rank_alone_cannot_use_is_refused_before_training(runs: Runs, mount: str, told: str) -> None:
    """As on another host, where it is not mounted or not to be written."""
    command = pretrain(runs, "--save", "there/run", "--distributed-timeout-minutes", "0.25")
    variables = " ".join(f"{name}={value}" for name, value in world(2).items())
    other = f"{mount}; RANK=1 LOCAL_RANK=1 exec {command}"
    script = (
        f"mkdir there; mount --bind there there; export {variables}; set +e; "
        f"unshare --mount --propagation private sh -euc {shlex.quote(other)} & "
        f"RANK=0 LOCAL_RANK=0 {command}; echo code $?; wait $!; echo code $?; find there"
    )
    done = in_a_namespace(script, runs.folder)
    assert done.stdout.splitlines()[-3:] == ["code 2", "code 2", "there"], done.stdout  # nothing is left
    assert "step 1/" not in done.stdout, done.stderr
    told = told.replace("HOST", socket.gethostname())
    fix = "name a folder that every host sees, and may write"
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: --save there/run: {told}; {fix}"
    ]


@pytest.mark.faults
@pytest.mark.parametrize("more", [(), ("--async-save",)], ids=str)
def test_a_limit_on_files_keeps_the_old_checkpoint(runs: Runs, more: tuple[str, ...]) -> None:
    runs.succeeds(1, "--train-iters", "2")
    command = [sys.executable, FAULTY, "0", "pause@0", *runs.flags(*COMMON, *more, "--load", "run")]
    script = f"trap '' XFSZ; ulimit -f 40; {shlex.join(command)}; echo code $?"
    done = subprocess.run(
        ["sh", "-c", script], cwd=runs.folder, env=environment(PATH), capture_output=True, text=True, timeout=240
    )
    assert done.stdout.splitlines()[-1] == "code 1"
    assert "the file size limit is reached: " in done.stderr and "raise it (ulimit -f)" in done.stderr
    names = sorted(path.name for path in (runs.folder / "run/checkpoints").iterdir())
    assert names == ["step_00000002"]


@pytest.mark.parametrize("more", [("--async-save",), pytest.param((), marks=pytest.mark.faults)], ids=str)
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.faults)])
def test_of_two_ranks_the_one_that_cannot_write_says_so(runs: Runs, rank: int, more: tuple[str, ...]) -> None:
    """However long it takes to remove what was written."""
    flags = ("--train-iters", "60", "--save-interval", "10", "--tensor-model-parallel-size", "2", *more)
    ended = runs.plain(2, rank, "limit@18,pause@abort", *flags)
    assert ended.codes == [1, 1]
    (line,) = ended.errors
    assert line.startswith("error: run/checkpoints/.step_00000020.tmp-") and "the file size limit is reached: " in line
    assert line.endswith(f" or save to another folder (rank {rank} on {socket.gethostname()})")
    assert outcome(runs.folder / "run")["reason"] == line.removeprefix("error: ")
    names = sorted(path.name for path in (runs.folder / "run/checkpoints").iterdir())
    assert names == ["step_00000010"]
