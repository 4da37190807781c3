"""How a run stands, by what it has left, its lock and its clock."""

import os
import signal
import time
from pathlib import Path

import pytest

from megatron_allattn.checkpoint.lock import RunLock, is_held
from megatron_allattn.config import UsageError
from megatron_allattn.watching.standing import is_run, standing
from tests.support.forked import run_forked
from tests.support.watched import begin, end


def aged(folder: Path, seconds: float) -> None:
    """As if nothing had been written for so long."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        ("done", "done at step 400: why"),
        ("stopped", "stopped at step 400: why"),
        ("guard", "ended by its guard at step 400: why"),
        ("failed", "failed at step 400: why"),
    ],
)
def test_ends_that_the_run_knows_of(tmp_path: Path, outcome: str, text: str) -> None:
    begin(tmp_path, steps=3)
    end(tmp_path, outcome, reason="why\n")
    assert (standing(tmp_path).how, standing(tmp_path).text) == (outcome, text)


def test_a_start_that_failed_has_no_step(tmp_path: Path) -> None:
    end(begin(tmp_path), "failed", None, "port in use")
    assert standing(tmp_path).text == "failed: port in use"


def test_under_way_quiet_and_gone(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    begin(tmp_path)
    assert is_run(tmp_path) and standing(tmp_path).how == "starting"
    aged(tmp_path, 600)
    assert standing(tmp_path).text.startswith("no sign of it for 10m0")
    begin(tmp_path, steps=3)
    assert standing(tmp_path).how == "running"
    aged(tmp_path, 600)
    gone = standing(tmp_path)
    assert gone.how == "gone" and gone.text.startswith("no record for 10m0") and "no lock held" in gone.text
    lock = RunLock(tmp_path)
    quiet = standing(tmp_path)
    assert quiet.how == "quiet" and quiet.text.startswith("running, no record for 10m0")
    lock.release()
    assert standing(tmp_path).how == "gone"


def test_a_killed_run_is_gone_though_its_lock_file_is_there(tmp_path: Path) -> None:
    begin(tmp_path, steps=3)

    def killed() -> None:
        RunLock(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_forked(killed) == (-signal.SIGKILL, "")
    aged(tmp_path, 100)
    assert (tmp_path / "lock").exists() and standing(tmp_path).how == "gone"


def test_looking_keeps_no_run_from_its_lock(tmp_path: Path) -> None:
    """While one process looks again and again, another one gets the lock every time."""
    RunLock(tmp_path).release()
    (tmp_path / "lock").touch()
    stop = tmp_path / "stop"
    looking = os.fork()
    if looking == 0:
        while not stop.exists():
            is_held(tmp_path)
        os._exit(0)
    try:
        for _ in range(200):
            lock = RunLock(tmp_path)
            os.close(lock._descriptor)  # as a killed run: the file stays
    finally:
        stop.touch()
        os.waitpid(looking, 0)


@pytest.mark.parametrize("text", ["{", "[]", '{"outcome": "fine"}', '{"outcome": ["done"]}', "{}"])
def test_an_outcome_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "outcome.json").write_text(text)
    with pytest.raises(UsageError, match=f"^file {tmp_path / 'outcome.json'}: "):
        standing(tmp_path)
