"""Saves beside training: the same bytes, one at a time, and nothing that goes wrong is lost; which steps are kept."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_allattn.checkpoint import folder, saver
from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.checkpoint.run_folder import prepare_run_folder
from megatron_allattn.checkpoint.saver import Saver
from megatron_allattn.config.errors import UsageError
from tests.support.checkpoints import write_tensors_to
from tests.support.pool import WorkerPools
from tests.support.trajectories import Case, build

CASES = [
    Case(2, 2, 1, 1, "adam", "float32", "deepspeed"),
    Case(1, 2, 3, 1, "adam", "float32", "deepspeed"),
    Case(2, 1, 1, 2, "adagrad", "float32", "deepspeed", 2),
]
TOKENS = np.random.default_rng(3).integers(0, 61, (8, 400))


def _files(run: Path, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "checkpoints" / f"step_{step:08d}").glob("*.safetensors")}


def _beside(rank: int, world_size: int, case: Case, path: Path) -> None:
    """A save that training waits for, and one of the same state that is held up until two steps later."""
    engine = build(case, 61)
    own = TOKENS[engine.streams.start : engine.streams.stop]

    def step(number: int) -> None:
        block = own[:, 32 * number : 32 * number + 33]
        engine.train_step(block[:, :-1], block[:, 1:], number + 1, 1e-2, engine.spans())

    step(0)
    for name, asynchronous in (("sync", False), ("async", True)):
        one = Saver(path / name, engine, asynchronous=asynchronous, after_commit=lambda *_: None)
        going_on, true = threading.Event(), saver.write_step

        def held_up(*arguments: Any, going_on: threading.Event = going_on, true: Any = true) -> None:
            going_on.wait(60.0)
            true(*arguments)

        if asynchronous:
            saver.write_step = held_up
        try:
            one.save(1, {"step_done": 1})
        finally:
            saver.write_step = true
        if asynchronous:
            assert one.finished() is None
            step(1)
            step(2)
            going_on.set()
            one.save(3, {})  # waits for the one before
            assert folder.is_complete(path / name / "checkpoints" / "step_00000001") or rank
            one.wait()
        assert one.finished() == (3 if asynchronous else 1)
        assert one.finished() is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_save_beside_training_has_the_bytes_of_one_that_is_waited_for(
    case: Case, pools: WorkerPools, tmp_path: Path
) -> None:
    pools(case.world_size).run(_beside, case, tmp_path)
    assert _files(tmp_path / "sync", 1) == _files(tmp_path / "async", 1) != {}
    assert _files(tmp_path / "async", 3).keys() == _files(tmp_path / "async", 1).keys()
    assert _files(tmp_path / "async", 3) != _files(tmp_path / "async", 1)


def _fails(rank: int, world_size: int, case: Case, path: Path) -> str:
    engine = build(case, 61)
    one = Saver(path / "run", engine, asynchronous=True, after_commit=lambda *_: None)
    if rank == 0:
        (path / "run").write_text("a file where the folder should be")
    one.save(1, {})
    try:
        one.wait()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_what_goes_wrong_beside_training_is_raised_on_all_ranks(pools: WorkerPools, tmp_path: Path) -> None:
    assert pools(2).run(_fails, Case(2, 1, 1, 1, "adam", "float32", "deepspeed"), tmp_path) == [
        StorageError.__name__,
        "PeerFailed",
    ]


def _steps(run: Path, *steps: int) -> None:
    for step in steps:
        temporary = folder.begin(run, step)
        write_tensors_to(temporary, "weights", {})
        (temporary / "state.json").write_text("{}")
        folder.commit(temporary, step)


def test_only_own_complete_steps_are_deleted(tmp_path: Path) -> None:
    """B24 of the public reports."""
    _steps(tmp_path, 2, 4, 5, 6, 8, 10)
    parent = tmp_path / "checkpoints"
    (parent / "step_00000004.bak").mkdir()
    (parent / "foo_step_00000004").mkdir()
    (parent / "step_00000003").write_text("a file")
    (parent / "step_00000001").symlink_to(parent / "step_00000002")
    (parent / "step_00000007").mkdir()  # not complete
    os.rename(parent / "step_00000006", parent / "step_006")
    assert folder.retain(tmp_path, 10, 2, 5) == []
    assert sorted(os.listdir(parent)) == [
        "foo_step_00000004",
        "step_00000001",
        "step_00000003",
        "step_00000004.bak",
        "step_00000005",
        "step_00000007",
        "step_00000008",
        "step_00000010",
        "step_006",
    ]
    assert (
        folder.retain(tmp_path, 10, 2, 0)
        == folder.retain(tmp_path, 10, 9, 0)
        == folder.retain(tmp_path, 10, 0, 0)
        == []
    )
    assert not (parent / "step_00000005").exists() and (parent / "step_00000008").exists()
    assert folder.find_latest(tmp_path)[0].name == "step_00000010"


@pytest.mark.parametrize("call", ["rename", "unlink"])
def test_what_cannot_be_deleted_is_told_and_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Somebody else's file in a step, a mount, what NFS keeps for a reader: saves go on, and it is tried again."""
    original = getattr(os, call)

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if os.path.basename(path) == ("step_00000002" if call == "rename" else "state.json"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.fspath(path))
        return original(path, *arguments, **options)

    _steps(tmp_path, 2, 4)
    monkeypatch.setattr(os, call, refuse)
    (line,) = folder.retain(tmp_path, 4, 1, 0)
    left = "step_00000002" if call == "rename" else f".step_00000002.tmp-{os.getpid()}"
    assert line.startswith(f"{tmp_path / 'checkpoints' / left} cannot be deleted (")
    assert line.endswith(": Device or resource busy); remove it by hand")
    _steps(tmp_path, 6)
    assert folder.find_latest(tmp_path)[0].name == "step_00000006"
    assert folder.retain(tmp_path, 6, 2, 0) == [line]
    monkeypatch.undo()
    assert folder.retain(tmp_path, 6, 2, 0) == []
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_00000004", "step_00000006"]


def test_steps_after_the_one_just_saved_count_for_nothing(tmp_path: Path) -> None:
    """A run that has gone back to an older step: what it saves is not deleted in favour of what it has left behind."""
    _steps(tmp_path, 50, 60, 90, 100)
    assert folder.retain(tmp_path, 60, 1, 0) == []
    parent = tmp_path / "checkpoints"
    assert sorted(os.listdir(parent)) == ["step_00000060", "step_00000090", "step_00000100"]


def test_complete_steps_after_the_one_that_is_gone_on_from_are_set_aside(tmp_path: Path) -> None:
    _steps(tmp_path, 50, 90, 100)
    parent = tmp_path / "checkpoints"
    (parent / "step_00000120").mkdir()  # its save did not end
    (parent / "step_00000110").write_text("a file")
    lines = folder.set_aside_after(tmp_path, parent / "step_00000050")
    assert len(lines) == 2 and lines[0].startswith(f"{parent / 'step_00000090'} is now step_00000090.damaged-")
    assert [name.partition(".damaged-")[0] for name in sorted(os.listdir(parent))] == [
        *("step_00000050", "step_00000090", "step_00000100", "step_00000110", "step_00000120")
    ]
    assert folder.find_latest(tmp_path)[0].name == "step_00000050"


def test_a_run_without_steps_has_nothing_to_delete(tmp_path: Path) -> None:
    prepare_run_folder(tmp_path)
    assert folder.retain(tmp_path, 10, 1, 0) == []
    with pytest.raises(UsageError):
        folder.find_latest(tmp_path)
