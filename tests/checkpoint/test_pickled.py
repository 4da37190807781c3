"""Reading files of torch.save: no code runs, damage is one line. Writing: whole or not at all."""

import errno
import os
import pickle
import resource
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_allattn.checkpoint.files import StorageError, write_text_atomic
from megatron_allattn.checkpoint.pickled import read_pickled, write_pickled
from megatron_allattn.config import UsageError
from tests.support.forked import run_forked

CONTENT = {"model": {"a": torch.arange(2000.0)}, "step": 3}


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class Call:
    """Calls something that torch does not block by name, to make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def _saved(path: Path, content: Any = CONTENT, **how: Any) -> Path:
    torch.save(content, path, **how)
    return path


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "before torch 1.6"])
def test_what_was_saved_is_read(tmp_path: Path, zipped: bool) -> None:
    content = read_pickled(_saved(tmp_path / "a.pt", _use_new_zipfile_serialization=zipped))
    assert torch.equal(content["model"]["a"], CONTENT["model"]["a"]) and content["step"] == 3


@pytest.mark.parametrize("kind", [Touch, Call])
@pytest.mark.parametrize("form", ["archive", "before torch 1.6", "a bare pickle"])
def test_code_in_a_file_is_not_run(tmp_path: Path, kind: type, form: str) -> None:
    canary, path = tmp_path / "canary", tmp_path / "a.pt"
    content = {"model": kind(canary)}
    if form == "a bare pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        _saved(path, content, _use_new_zipfile_serialization=form == "archive")
    with pytest.raises(UsageError) as refusal:
        read_pickled(path)
    assert not canary.exists()
    assert str(refusal.value).startswith(f"file {path}: ") and "\n" not in str(refusal.value)
    if form != "a bare pickle":
        assert "would call " in str(refusal.value) and "nothing of it has run" in str(refusal.value)
    torch.load(path, weights_only=False) if form != "a bare pickle" else pickle.loads(path.read_bytes())
    assert canary.exists()  # the file does what it says to those who trust it


def _other_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes/readme.txt", "no checkpoint")


def _compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))


def _flipped(path: Path) -> None:
    content = bytearray(_saved(path).read_bytes())
    content[content.index(torch.arange(2000.0).numpy().tobytes()) + 4001] ^= 0x40
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["a"], CONTENT["model"]["a"])  # torch is silent


def _cut(num_bytes: int) -> Callable[[Path], None]:
    """Of an archive of 9,385 bytes or so; a negative number counts from its end."""

    def cut(path: Path) -> None:
        os.truncate(_saved(path), num_bytes if num_bytes > 0 else path.stat().st_size + num_bytes)

    return cut


def _truncated_old(path: Path) -> None:
    os.truncate(_saved(path, _use_new_zipfile_serialization=False), 4000)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "is not there"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.write_bytes(b"some text\n"), "is nothing that torch.save wrote"),
        (lambda path: path.write_bytes(b"\0" + os.urandom(3000)), "is nothing that torch.save wrote"),
        *((_cut(end), "is cut short: the end of the archive is missing; copy") for end in (4, 700, 4000, 8000, -1)),
        (_truncated_old, "is damaged or nothing that torch.save wrote"),
        (_other_archive, "is damaged or nothing that torch.save wrote"),
        (_compressed, "is a compressed archive, which torch.save does not write"),
        (_flipped, "is damaged: the check sum of a/data/0 does not fit"),
        (lambda path: _saved(path, torch.nn.Linear(2, 2)), "would call torch.nn.modules.linear.Linear when loaded"),
    ],
)
def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, make: Callable[[Path], object], reason: str) -> None:
    path = tmp_path / "a.pt"
    make(path)
    with pytest.raises(UsageError) as refusal:
        read_pickled(path)
    assert str(refusal.value).startswith(f"file {path}: {reason}")
    assert str(refusal.value).isprintable()


def test_an_unsafe_torch_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _saved(tmp_path / "a.pt")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1+cu128"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(UsageError, match=r"^torch 2.9.1\+cu128: .*CVE-2026-24747.*; install torch 2.10 or newer"):
        read_pickled(path)


def test_a_written_file_is_whole_and_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_pickled(path, CONTENT)
    before = path.read_bytes()
    assert torch.equal(read_pickled(path)["model"]["a"], CONTENT["model"]["a"])
    with pytest.raises(UsageError, match=r"--output .*a.pt: exists already"):
        write_pickled(path, {})
    with pytest.raises(UsageError, match="there is no folder"):
        write_pickled(tmp_path / "none" / "a.pt", {})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.pt"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write_with_little_space() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        write_pickled(tmp_path / "a.pt", CONTENT)

    code, text = run_forked(write_with_little_space)
    assert code == 1
    assert text.startswith(f"{StorageError.__name__}: {tmp_path / 'a.pt'}: ") and "8,000 bytes needed" in text, text
    assert "the file size limit is reached" in text and "torch.save" not in text, text
    assert os.listdir(tmp_path) == []


def test_a_clean_up_that_fails_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StorageError, match=r"a\.pt: the folder is not writable: [0-9,]+ bytes needed, .*permissions"):
        write_pickled(tmp_path / "a.pt", CONTENT)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match=r"b\.txt: the folder is not writable: .*permissions"):
        write_text_atomic(tmp_path / "b.txt", "text")


@pytest.mark.parametrize(
    ("read", "place"),
    [
        ({"model": {"a": torch.arange(2000.0) + 1e-3}, "step": 3}, "content/model/a"),
        ({"model": {"a": torch.arange(2000)}, "step": 3}, "content/model/a"),
        ({"model": {"a": torch.arange(2000.0)}, "step": 4}, "content/step"),
        ({"model": {"a": torch.arange(2000.0)}}, "content"),
        ({"model": [torch.arange(2000.0)], "step": 3}, "content/model"),
    ],
)
def test_what_is_not_read_back_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any, place: str
) -> None:
    monkeypatch.setattr("megatron_allattn.checkpoint.pickled.read_pickled", lambda _: read)
    with pytest.raises(UsageError, match=f"a.pt: does not read back what was written: {place};"):
        write_pickled(tmp_path / "a.pt", CONTENT)
    assert not list(tmp_path.iterdir())


def test_nan_and_tuples_are_read_back(tmp_path: Path) -> None:
    write_pickled(
        tmp_path / "a.pt", {"a": torch.tensor([float("nan"), -0.0]), "betas": (0.9, 0.99), "none": [None, ""]}
    )
