"""The commit protocol: what is on the disk after it, which folder is the newest, and what verification finds."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.checkpoint.folder import Damaged, abort, begin, commit, find_latest, retain, set_aside_after
from megatron_allattn.checkpoint.lock import RunLock
from megatron_allattn.checkpoint.manifest import check_hashes, verify
from megatron_allattn.checkpoint.run_folder import check_outside, has_saved, prepare_run_folder, run_around
from megatron_allattn.config.disk import sha256_of
from megatron_allattn.config.errors import UsageError, unreadable
from megatron_allattn.config.json_files import read_bytes
from tests.support.checkpoints import read_tensors, write_tensors_to
from tests.support.forked import run_forked


def _save(run: Path, step: int, value: float | None = None, *, replace: bool = False) -> Path:
    temporary = begin(run, step)
    tensor = torch.full((10,), float(step) if value is None else value)
    write_tensors_to(temporary, "weights", {"a": tensor, "b": tensor}, max_bytes=64)
    write_json_atomic(temporary / "state.json", {"step": step})
    return commit(temporary, step, replace=replace)


def _value(folder: Path) -> float:
    (value,) = {number for _name, tensor in read_tensors(folder, "weights") for number in tensor.tolist()}
    return value


def _entries(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("part", ["latest", "checkpoints", "checkpoints/step_00000100", "checkpoints/step_00000007"])
def test_a_part_of_a_run_is_told_from_a_run(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "run", 100)
    monkeypatch.chdir(tmp_path)
    for path in (Path("run") / part, tmp_path / "run" / part):
        run = run_around(path)
        assert run is not None and run.samefile("run") and run.is_absolute() == path.is_absolute()
        with pytest.raises(UsageError, match=f"{part}: no checkpoint to load: .*; name the run folder {run}$"):
            find_latest(path)


def test_damage_is_told_before_names_that_are_no_steps(tmp_path: Path) -> None:
    folder = _save(tmp_path, 100)
    for name in ("a.bak", "b.bak", "c.bak"):
        (tmp_path / "checkpoints" / name).mkdir()
    _flip(folder)
    with pytest.raises(Damaged, match=f"passed over: {folder}: weights-00001.safetensors: damaged: expected SHA-256 "):
        find_latest(tmp_path, check=check_hashes, way_out="give another")


@pytest.mark.parametrize(
    "name",
    [
        ".step_0000000001.tmp-1",
        ".step_00000001.tmp-0012",
        ".step_٠٠٠٠٠١٠٠.tmp-١",
        ".step_00000001.old-0",
        ".step_000000001.old-7",
    ],
)
def test_only_names_that_a_save_gives_are_deleted(tmp_path: Path, name: str) -> None:
    for own in (name, ".step_00000001.tmp-12", ".step_123456789.tmp-3"):
        (tmp_path / "checkpoints" / own).mkdir(parents=True)
        (tmp_path / "checkpoints" / own / "file").touch()
    _save(tmp_path, 100)
    assert _entries(tmp_path) == [name, "step_00000100"]


def test_runs_may_lie_in_a_folder_of_the_same_name(tmp_path: Path) -> None:
    _save(tmp_path / "checkpoints/one", 100)
    for path in (tmp_path / "checkpoints/one", tmp_path / "checkpoints/two", tmp_path / "latest", tmp_path):
        assert run_around(path) is None
    assert run_around(tmp_path / "checkpoints/one/latest") == tmp_path / "checkpoints/one"


def test_what_a_commit_leaves(tmp_path: Path):
    folder = _save(tmp_path, 100)
    assert folder == tmp_path / "checkpoints" / "step_00000100"
    tensors = ["weights-00001.safetensors", "weights-00002.safetensors"]
    assert sorted(os.listdir(folder)) == ["COMPLETE", "manifest.json", "state.json", *tensors]
    content = (folder / "manifest.json").read_bytes()
    assert (folder / "COMPLETE").read_text() == hashlib.sha256(content).hexdigest() + "\n"
    assert json.loads(content) == {
        "format": "megatron-allattn-checkpoint",
        "version": 1,
        "step": 100,
        "files": {
            name: {
                "bytes": len((folder / name).read_bytes()),
                "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
            }
            for name in ["state.json", *tensors]
        },
    }
    assert verify(folder) == json.loads(content)
    assert (tmp_path / "latest").read_text() == "step_00000100\n"
    assert _entries(tmp_path) == ["step_00000100"]


def test_the_newest_complete_step_is_found(tmp_path: Path):
    """By its number: clocks of several hosts, or a copy's, say nothing."""
    for number, step in enumerate((5, 123_456_789, 100)):
        for path in _save(tmp_path, step).iterdir():
            os.utime(path, (1e9 * (number + 1), 1e9 * (number + 1)))
    folder, skipped = find_latest(tmp_path)
    assert folder.name == "step_123456789"
    assert skipped == [
        f"{tmp_path / 'latest'}: it names 'step_00000100', but step_123456789 is the newest complete step"
    ]


def test_foreign_and_incomplete_names_are_passed_over_and_kept(tmp_path: Path):
    good = _save(tmp_path, 100)
    parent = good.parent
    os.rename(_save(tmp_path, 200), parent / "step_00000200.backup")
    os.rename(_save(tmp_path, 300), parent / "foo_step_00000300")
    os.rename(_save(tmp_path, 400), parent / "step_400")
    os.rename(_save(tmp_path, 500), parent / "step_0000000500")
    os.rename(_save(tmp_path, 600), parent / "step_00000601")
    (parent / "step_00009999").mkdir()
    (parent / "step_00000700").symlink_to(parent / "step_00000200.backup")
    (parent / "step_00000800").write_text("a file")
    (_save(tmp_path, 900) / "COMPLETE").unlink()
    os.truncate(_save(tmp_path, 950) / "weights-00001.safetensors", 60)
    (tmp_path / "latest").write_text("step_00000950")
    before = _entries(tmp_path)
    folder, skipped = find_latest(tmp_path)
    assert folder == good
    reasons = {line.removeprefix(f"{parent}/").partition(": ")[0]: line.partition(": ")[2] for line in skipped}
    assert reasons == {
        "foo_step_00000300": "not the name of a step folder",
        "step_00000200.backup": "not the name of a step folder",
        "step_0000000500": "not the name of a step folder",
        "step_400": "not the name of a step folder",
        "step_00000700": "not a folder",
        "step_00000800": "not a folder",
        "step_00009999": "expected a file COMPLETE, found none (its save did not end)",
        "step_00000900": "expected a file COMPLETE, found none (its save did not end)",
        "step_00000950": "weights-00001.safetensors: damaged: expected 104 bytes, found 60",
        "step_00000601": "manifest.json: expected step 601 (from the folder's name), found 600",
        f"{tmp_path}/latest": "it names 'step_00000950', but step_00000100 is the newest complete step",
    }
    _save(tmp_path, 1000)
    assert _entries(tmp_path) == sorted([*before, "step_00001000"])


def test_a_check_passes_over_a_damaged_step(tmp_path: Path):
    good, damaged = _save(tmp_path, 1), _save(tmp_path, 2)
    path = damaged / "weights-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert find_latest(tmp_path)[0] == damaged
    folder, skipped = find_latest(tmp_path, check=check_hashes)
    assert folder == good
    assert skipped[0].startswith(f"{damaged}: {path.name}: damaged: expected SHA-256 ")


def test_nothing_to_load_names_the_folder(tmp_path: Path):
    with pytest.raises(UsageError, match=f"^{tmp_path / 'run'}: no checkpoint to load: there is no folder"):
        find_latest(tmp_path / "run")
    (_save(tmp_path, 3) / "COMPLETE").unlink()
    with pytest.raises(
        UsageError, match=f"^{tmp_path}: no complete checkpoint in .*step_00000003: expected a file COM"
    ):
        find_latest(tmp_path)


def _flip(folder: Path) -> None:
    path = folder / "weights-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)


def _edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))


def _other_version(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    (folder / "COMPLETE").write_text(hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip, r"weights-00001\.safetensors: damaged: expected SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}"),
        (
            lambda folder: (folder / "weights-00002.safetensors").unlink(),
            r"00002\S+: expected a file of 104 bytes, found",
        ),
        (lambda folder: os.truncate(folder / "state.json", 3), r"state\.json: damaged: expected 16 bytes, found 3"),
        (lambda folder: (folder / "weights-00003.safetensors").touch(), r"00003\.safetensors: expected no such file"),
        (_edit_manifest, r"manifest\.json: damaged: expected SHA-256 \w+ \(from COMPLETE\), found"),
        (_other_version, r"manifest\.json: expected megatron-allattn-checkpoint version 1, found \S+ version 2"),
        (lambda folder: (folder / "COMPLETE").write_bytes(b""), r"manifest\.json: damaged: expected SHA-256"),
        (lambda folder: (folder / "COMPLETE").unlink(), r"expected a file COMPLETE, found none"),
        (lambda folder: (folder / "manifest.json").unlink(), r"expected a file manifest\.json, found none"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], object], message: str):
    folder = _save(tmp_path, 7)
    damage(folder)
    with pytest.raises(UsageError, match=message) as caught:
        verify(folder)
    assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value)


def test_a_complete_step_is_replaced_only_on_request(tmp_path: Path):
    folder = _save(tmp_path, 4, 1.0)
    with pytest.raises(FileExistsError, match="is complete already"):
        _save(tmp_path, 4, 2.0)
    assert _value(folder) == 1.0 and _entries(tmp_path) == ["step_00000004"]
    assert _save(tmp_path, 4, 3.0, replace=True) == folder
    assert _value(folder) == 3.0 and _entries(tmp_path) == ["step_00000004"]
    verify(folder)


def test_an_incomplete_step_is_replaced_and_a_foreign_folder_set_aside(tmp_path: Path):
    (_save(tmp_path, 4, 1.0) / "COMPLETE").unlink()
    assert _value(_save(tmp_path, 4, 2.0)) == 2.0
    foreign = tmp_path / "checkpoints" / "step_00000005"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("keep me")
    assert _value(_save(tmp_path, 5)) == 5.0
    aside = "step_00000005.set-aside-1"
    assert _entries(tmp_path) == ["step_00000004", "step_00000005", aside]
    _save(tmp_path, 6)
    assert (tmp_path / "checkpoints" / aside / "notes.txt").read_text() == "keep me"


def test_abort_leaves_nothing(tmp_path: Path):
    temporary = begin(tmp_path, 8)
    (temporary / "state.json").write_text("{}")
    assert _entries(tmp_path) == [f".step_00000008.tmp-{os.getpid()}"]
    abort(temporary)
    assert _entries(tmp_path) == []
    with pytest.raises(AssertionError):
        abort(tmp_path)


def test_the_run_folder_is_made_or_refused(tmp_path: Path):
    prepare_run_folder(tmp_path / "new" / "run")
    assert os.listdir(tmp_path / "new" / "run") == ["checkpoints"] and _entries(tmp_path / "new" / "run") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--save .*file: cannot be written .*; choose another folder"):
        prepare_run_folder(tmp_path / "file")


def test_a_read_only_run_folder(tmp_path: Path):
    run = tmp_path / "run"
    prepare_run_folder(run)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    (run / "checkpoints").chmod(0o555)

    def unprivileged(function: Callable[[], object]) -> Callable[[], object]:
        def call() -> object:
            if os.getuid() == 0:  # root may write anywhere
                os.setgid(65534)
                os.setuid(65534)
            return function()

        return call

    code, text = run_forked(unprivileged(lambda: prepare_run_folder(run)))
    assert (code, text.partition(" (")[0]) == (1, f"UsageError: --save {run}: cannot be written")
    code, text = run_forked(unprivileged(lambda: begin(run, 1)))
    assert code == 1
    assert text.startswith(f"StorageError: {run}/checkpoints/.step_00000001.tmp-")
    assert ": the folder is not writable: " in text


@pytest.mark.parametrize("lost", ["checkpoints/step_00000008/COMPLETE", "checkpoints/step_00000008", "checkpoints"])
def test_a_run_whose_latest_names_a_step_has_saved_whatever_is_left(tmp_path: Path, lost: str) -> None:
    _save(tmp_path, 8)
    path = tmp_path / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert has_saved(tmp_path)
    with pytest.raises(UsageError, match=f"though {tmp_path / 'latest'} names 'step_00000008'; "):
        find_latest(tmp_path, way_out="ask")


def test_a_first_save_that_did_not_end_is_none(tmp_path: Path) -> None:
    (_save(tmp_path, 8) / "COMPLETE").unlink()
    (tmp_path / "latest").unlink()
    assert not has_saved(tmp_path)


@pytest.mark.parametrize("link", [False, True])
def test_a_step_that_latest_names_and_that_is_gone_is_damage(tmp_path: Path, link: bool) -> None:
    older, newest = _save(tmp_path, 50), _save(tmp_path, 100)
    os.rename(newest, tmp_path / "elsewhere")
    if link:
        newest.symlink_to(tmp_path / "elsewhere")
    why = "not a folder" if link else "it is gone"
    with pytest.raises(Damaged, match=f"^{newest}: {why}; ask$"):
        find_latest(tmp_path, way_out="ask")
    found, skipped = find_latest(tmp_path)
    assert found == older and skipped[0] == f"{newest}: {why}"
    assert set_aside_after(tmp_path, older) == []
    assert (tmp_path / "latest").read_text() == "step_00000050\n"  # so that it is asked about once
    assert find_latest(tmp_path, way_out="ask") == (older, [f"{newest}: {why}"] if link else [])


def test_a_step_moved_aside_and_one_older_than_the_newest_are_not_missed(tmp_path: Path) -> None:
    """What a kill leaves while a step is replaced, and before `latest` is written and older steps are deleted."""
    older, newest = _save(tmp_path, 50), _save(tmp_path, 100)
    aside = newest.with_name(".step_00000100.old-1")
    os.rename(newest, aside)
    assert find_latest(tmp_path, way_out="ask")[0] == aside
    os.rename(aside, newest)
    (tmp_path / "latest").write_text("step_00000050\n")
    shutil.rmtree(older)
    assert find_latest(tmp_path, way_out="ask")[0] == newest


def test_a_latest_of_other_bytes_is_told_shortly_and_escaped(tmp_path: Path) -> None:
    folder = _save(tmp_path, 5)
    (tmp_path / "latest").write_bytes(b"\x1b\xff" * 50_000)
    (line,) = find_latest(tmp_path, way_out="ask")[1]
    assert line.isascii() and line.isprintable() and len(line) < len(str(tmp_path)) + 300
    assert line.endswith(f"...', but {folder.name} is the newest complete step")


def test_what_is_set_aside_never_takes_a_name_that_is_taken(tmp_path: Path) -> None:
    """Every start of a container may have the same process number."""
    first = _save(tmp_path, 50)
    for value in (1.0, 2.0):
        _save(tmp_path, 100, value)
        set_aside_after(tmp_path, first)
        foreign = first.with_name("step_00000200")
        foreign.mkdir()
        (foreign / "notes.txt").touch()
        shutil.rmtree(_save(tmp_path, 200))
        (tmp_path / "latest").unlink()
    assert [_value(first.with_name(f"step_00000100.damaged-{number}")) for number in (1, 2)] == [1.0, 2.0]
    assert all((first.with_name(f"step_00000200.set-aside-{number}") / "notes.txt").exists() for number in (1, 2))


@pytest.mark.parametrize(
    "part", ["checkpoints", "checkpoints/step_00000100", "checkpoints/step_00000007", "x/../latest"]
)
def test_nothing_is_made_within_a_run(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    _save(run, 100)
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run / "checkpoints")
    for path in (run / part, tmp_path / "link" / part, Path("..") / part):
        with pytest.raises(UsageError, match=r"^--save .*: is a part of the run .*; name a folder outside"):
            check_outside("--save", path)
    with pytest.raises(UsageError, match="is a part of the run"):
        check_outside("--save", Path("step_00000009"))
    check_outside("--save", run)
    check_outside("--save", tmp_path / "other")


def _as_another_user(function: Callable[[], object]) -> tuple[int, str]:
    """In a child with no rights to what is root's own."""

    def child() -> object:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return function()

    return run_forked(child)


@pytest.mark.parametrize(
    "which", ["", "latest", "checkpoints", "checkpoints/step_00000002", "checkpoints/step_00000002/state.json"]
)
@pytest.mark.parametrize("way_out", [None, "give --load-fallback"])
def test_a_step_that_may_not_be_read_is_not_taken_for_damaged(tmp_path: Path, which: str, way_out: str | None) -> None:
    """With --load-fallback an older one would take its place otherwise."""
    run, locked = tmp_path / "run", tmp_path / "run" / which
    _save(run, 1)
    _save(run, 2)
    for path in (*tmp_path.parents[:3], tmp_path):
        path.chmod(path.stat().st_mode | 0o755)
    mode = locked.stat().st_mode
    locked.chmod(0)
    try:
        found = _as_another_user(lambda: find_latest(run, check=check_hashes, way_out=way_out))
    finally:
        locked.chmod(mode)
    assert found[0] == 1 and "Permission denied" in found[1] and "damaged" not in found[1].lower()


def test_a_step_that_may_not_be_read_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, number = tmp_path / "run", iter(range(10))
    for step in (1, 2, 3):
        _save(run, step)

    def fail(what: str, path: Path, *others: object, **limits: object) -> bytes:
        if path.parent.name == "step_00000001":
            raise (
                unreadable(what, path, OSError(errno.EACCES, os.strerror(errno.EACCES)), "look")
                if next(number)
                else (OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path)))
            )
        return read_bytes(what, path, *others, **limits)  # type: ignore[arg-type]

    monkeypatch.setattr("megatron_allattn.checkpoint.manifest.read_bytes", fail)
    for _ in range(2):
        assert retain(run, 3, 1, 0) == []
        assert _entries(run) == ["step_00000001", "step_00000003"]


def test_a_disk_that_cannot_give_a_file_any_more_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    _save(run, 1)
    _save(run, 2)

    def fail(path: Path) -> str:
        if path.parent.name == "step_00000002":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return sha256_of(path)

    monkeypatch.setattr("megatron_allattn.checkpoint.files.sha256_of", fail)
    found, skipped = find_latest(run, check=check_hashes)
    assert found.name == "step_00000001" and "cannot be read (Input/output error)" in skipped[0]


@pytest.mark.parametrize("name", ["x" * 300, "loop", "nothing"])
def test_paths_that_cannot_be_run_folders(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nothing").symlink_to("gone")
    with pytest.raises(UsageError) as caught:
        check_outside("--save", tmp_path / name)
        RunLock(tmp_path / name)
    words = {"loop": "is a link to loop, which is not there", "nothing": "is a link to gone, which is not there"}
    assert words.get(name, "File name too long") in str(caught.value) and "choose another folder" in str(caught.value)
