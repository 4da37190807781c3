"""A save that is killed or runs out of space at any point: the step before it, or the new one, loads bit for bit."""

import errno
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import torch

from megatron_allattn.checkpoint import tensors
from megatron_allattn.checkpoint.files import StorageError, write_json_atomic
from megatron_allattn.checkpoint.folder import abort, begin, commit, find_latest
from megatron_allattn.checkpoint.manifest import verify
from tests.support.checkpoints import read_tensors, write_tensors_to
from tests.support.forked import kill_before_call, run_forked


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(300, generator=generator),
        "layer.value": torch.randn(20, 10, generator=generator).to(torch.bfloat16),
        "position": torch.tensor(seed),
    }


def _save(run: Path, step: int, seed: int) -> None:
    temporary = begin(run, step)
    try:
        write_tensors_to(temporary, "weights", _tensors(seed), max_bytes=1000)
        write_json_atomic(temporary / "state.json", {"step": step, "seed": seed})
    except StorageError:
        abort(temporary)
        raise
    commit(temporary, step, replace=True)


def _loaded_seed(run: Path) -> tuple[int, int]:
    """(step, seed) of the newest complete step, after every byte of it was compared."""
    folder, _skipped = find_latest(run)
    step = verify(folder)["step"]
    found = dict(read_tensors(folder, "weights"))
    seed = int(found["position"])
    for name, tensor in _tensors(seed).items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    return step, seed


def _entries(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A run with steps 50 (seed 1) and 100 (seed 2)."""
    run = tmp_path / "template"
    _save(run, 50, 1)
    _save(run, 100, 2)
    return run


@pytest.mark.parametrize("step", [150, 100], ids=["next_step", "same_step_again"])
def test_kill_9_before_every_file_operation(template: Path, tmp_path: Path, step: int):
    outcomes: list[tuple[int, int]] = []
    for number in range(1, 200):
        run = tmp_path / f"run_{number}"
        shutil.copytree(template, run)

        def save(run: Path = run, number: int = number) -> None:
            kill_before_call(number)
            _save(run, step, 3)

        code, text = run_forked(save)
        assert code in (0, -signal.SIGKILL), text
        outcomes.append(_loaded_seed(run))
        _save(run, 200, 4)  # the resumed run's next save cleans up
        assert _loaded_seed(run) == (200, 4)
        left = set(_entries(run)) - {"step_00000150"}  # which may be there without its marker: it is not loaded
        assert left == {"step_00000050", "step_00000100", "step_00000200"}
        for name in left:
            verify(run / "checkpoints" / name)
        if code == 0:
            break
    old, new = (100, 2), (step, 3)
    assert len(outcomes) > 20 and outcomes[-1] == new
    turn = outcomes.index(new)
    assert outcomes == [old] * turn + [new] * (len(outcomes) - turn)
    assert turn > 10 and len(outcomes) - turn > 3


def _limited_save(run: Path, limit: int, action: signal.Handlers) -> Callable[[], None]:
    def save() -> None:
        signal.signal(signal.SIGXFSZ, action)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        _save(run, 150, 3)

    return save


def test_killed_within_a_write_at_random_bytes(template: Path):
    draw = random.Random(0)
    largest = max(path.stat().st_size for path in template.glob("checkpoints/*/*"))
    for _ in range(50):
        limit = draw.randrange(largest)
        code, _text = run_forked(_limited_save(template, limit, signal.SIG_DFL))
        assert code == -signal.SIGXFSZ, f"limit {limit}"
        assert _loaded_seed(template) == (100, 2)
    _save(template, 150, 3)
    assert _loaded_seed(template) == (150, 3)
    assert _entries(template) == ["step_00000050", "step_00000100", "step_00000150"]


@pytest.mark.parametrize("limit", [10, 200, 700])
def test_a_full_disk_says_so_and_leaves_nothing(template: Path, limit: int):
    code, text = run_forked(_limited_save(template, limit, signal.SIG_IGN))
    assert code == 1
    assert text.startswith(f"StorageError: {template}/checkpoints/.step_00000150.tmp-") and "\n" not in text
    assert "bytes needed, " in text and "bytes free; " in text
    assert _entries(template) == ["step_00000050", "step_00000100"]
    assert _loaded_seed(template) == (100, 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_file_that_is_always_full(template: Path, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, *how: str, **more: int) -> IO[bytes]:
        return open("/dev/full" if path.name == "weights-00002.safetensors" else path, "wb", **more)

    monkeypatch.setattr(tensors, "open", full, raising=False)
    with pytest.raises(StorageError) as caught:
        _save(template, 150, 3)
    monkeypatch.undo()
    said = str(caught.value)
    assert said.startswith(f"{template}/checkpoints/.step_00000150.tmp-") and "weights-00002.safetensors: " in said
    assert "no space left: " in said and " bytes needed, " in said
    assert _entries(template) == ["step_00000050", "step_00000100"]
    assert _loaded_seed(template) == (100, 2)


@pytest.mark.parametrize("step", [150, 100], ids=["next_step", "same_step_again"])
def test_an_error_at_every_file_operation_of_the_commit(
    template: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
):
    """No space left at call n of fsync, rename or replace: one line, no temporary folder, a loadable run."""
    originals = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}
    outcomes = []
    for number in range(1, 100):
        run = tmp_path / f"run_{number}"
        shutil.copytree(template, run)
        temporary = begin(run, step)
        write_json_atomic(temporary / "state.json", {"seed": 3})
        write_tensors_to(temporary, "weights", _tensors(3))
        calls = 0

        def fail(name: str, number: int = number) -> Callable[..., object]:
            def call(*args: object) -> object:
                nonlocal calls
                calls += 1
                if calls == number:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return originals[name](*args)

            return call

        for name in originals:
            monkeypatch.setattr(os, name, fail(name))
        try:
            commit(temporary, step, replace=True)
            ended = True
        except StorageError as error:
            assert ": no space left: " in str(error)
            ended = False
        monkeypatch.undo()
        assert not temporary.exists()
        outcomes.append(_loaded_seed(run))
        if ended:
            break
        left = [name for name in _entries(run) if name.startswith(".step_00000150")]
        assert left == []
    assert outcomes[0] == (100, 2) and outcomes[-1] == (step, 3)
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome == (step, 3)) and len(outcomes) > 8
