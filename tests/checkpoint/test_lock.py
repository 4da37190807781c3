"""The lock of a run folder: one holder, freed by any end of its process, and nothing left of it."""

import errno
import fcntl
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.checkpoint.lock import RunLock, forget_outcome
from megatron_allattn.config import UsageError
from tests.support.forked import run_forked


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    assert lock.notes == []
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    line = f"UsageError: --save {tmp_path}: is in use by {owner}; wait for its end or choose another folder"
    assert run_forked(lambda: RunLock(tmp_path)) == (1, line)
    assert (tmp_path / "lock").read_text() == f"{owner}\n"
    lock.release()
    assert run_forked(lambda: RunLock(tmp_path).release()) == (0, "None")


def test_nothing_is_left(tmp_path: Path) -> None:
    RunLock(tmp_path / "a" / "b").release()
    assert list(tmp_path.iterdir()) == []
    lock = RunLock(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "metrics.jsonl").touch()
    lock.release()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["metrics.jsonl"]


def test_a_folder_removed_meanwhile(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    (tmp_path / "run" / "lock").unlink()
    (tmp_path / "run").rmdir()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_another_runs_by_now_stays(tmp_path: Path) -> None:
    """Somebody has removed the first one's file."""
    first = RunLock(tmp_path)
    (tmp_path / "lock").unlink()
    second = RunLock(tmp_path)
    first.release()
    assert run_forked(lambda: RunLock(tmp_path))[0] == 1
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("of somebody else")
    (tmp_path / "lock").symlink_to("other")
    with pytest.raises(UsageError, match=r"cannot be written \(Too many levels of symbolic links\)"):
        RunLock(tmp_path)
    assert (tmp_path / "other").read_text() == "of somebody else"


def test_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    def die_with_it() -> None:
        RunLock(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_forked(die_with_it)[0] == -signal.SIGKILL
    assert (tmp_path / "lock").exists()
    lock = RunLock(tmp_path)
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_file_removed_between_opening_and_locking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder has just ended: a lock on the removed file would guard nothing."""
    original, calls = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / "lock").unlink()
        calls.append(operation)
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = RunLock(tmp_path)
    assert len(calls) == 2
    assert run_forked(lambda: RunLock(tmp_path))[1].startswith("UsageError: --save ")
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = RunLock(tmp_path)
    assert lock.notes == [f"{tmp_path} is not locked ({os.strerror(number)}): start no second run on it"]
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--save .*file: cannot be written .*; choose another folder"):
        RunLock(tmp_path / "file")
    with pytest.raises(UsageError, match=r"file/run: cannot be written \(Not a directory\)"):
        RunLock(tmp_path / "file" / "run")
    (tmp_path / "run" / "lock").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"run: cannot be written \(Is a directory\)"):
        RunLock(tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_an_earlier_outcome_is_forgotten_unless_a_run_is_alive(tmp_path: Path) -> None:
    outcome = tmp_path / "outcome.json"
    outcome.write_text("{}")
    lock = RunLock(tmp_path)
    assert run_forked(lambda: forget_outcome(tmp_path)) == (0, "None")
    assert outcome.exists()
    lock.release()
    for left in (False, True):  # nothing, or the file of a run that was killed
        outcome.write_text("{}")
        if left:
            (tmp_path / "lock").touch()
        forget_outcome(tmp_path)
        assert not outcome.exists() and (tmp_path / "lock").exists() == left
    forget_outcome(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("change", ["file removed", "folder removed", "folder moved", "folder of another run"])
def test_a_run_is_told_that_its_folder_is_not_its_own_any_more(tmp_path: Path, change: str) -> None:
    run = tmp_path / "run"
    lock = RunLock(run)
    lock.check()
    if change == "file removed":
        (run / "lock").unlink()
    elif change == "folder removed":
        shutil.rmtree(run)
    else:
        run.rename(tmp_path / "elsewhere")
    other = RunLock(run) if change == "folder of another run" else None
    with pytest.raises(
        StorageError, match="run/lock: is not the file that this run has locked; the folder was removed"
    ):
        lock.check()
    lock.release()
    if other is not None:
        other.check()
        other.release()
