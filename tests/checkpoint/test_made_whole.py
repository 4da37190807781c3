"""Outputs that are made under another name: of one process at a time, and nothing is replaced by them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_allattn.checkpoint import files
from megatron_allattn.checkpoint.files import made_whole
from megatron_allattn.config import UsageError


def make(path: Path, kind: str, text: str) -> None:
    if kind == "folder":
        path.mkdir()
        path = path / "a"
    path.write_text(text)


@pytest.fixture(params=["renameat2", "a file system without it"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the output gets its name."""
    if request.param != "renameat2":
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_it_gets_its_name(tmp_path: Path, kind: str) -> None:
    with made_whole(tmp_path / "out") as temporary:
        make(temporary, kind, "new")
        assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "a" if kind == "folder" else tmp_path / "out").read_text() == "new"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("there", ["file", "empty folder", "folder", "dangling link"])
def test_what_appears_meanwhile_is_kept(tmp_path: Path, kind: str, there: str) -> None:
    out = tmp_path / "out"

    def appear() -> None:
        if there == "dangling link":
            out.symlink_to(tmp_path / "nowhere")
        elif there == "empty folder":
            out.mkdir()
        else:
            make(out, there, "theirs")

    with (
        pytest.raises(UsageError, match=r"^--output .*out: has appeared meanwhile; name another one or remove it$"),
        made_whole(out) as temporary,
    ):
        make(temporary, kind, "new")
        appear()
    assert os.listdir(tmp_path) == ["out"]
    found = sorted(path.name for path in tmp_path.rglob("*"))
    assert found == ["a", "out"] if there == "folder" else found == ["out"]
    assert there != "file" or out.read_text() == "theirs"
    assert out.is_symlink() == (there == "dangling link")


def test_what_another_process_is_making_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        theirs = tmp_path / f".out.tmp-{other.pid}"
        make(theirs, "folder", "theirs")
        rule = rf"process {other.pid} is making it as {theirs}; wait for its end, or remove that if it is no conversion"
        with pytest.raises(UsageError, match=rf"^--output {tmp_path}/out: {rule}$"), made_whole(tmp_path / "out"):
            pass
        assert (theirs / "a").read_text() == "theirs"
        other.communicate(b"\n")
    make(tmp_path / f".out.tmp-{os.getpid()}", "file", "left by an earlier process with this number")
    with made_whole(tmp_path / "out") as temporary:
        make(temporary, "file", "new")
    assert os.listdir(tmp_path) == ["out"]


def test_what_is_no_number_of_a_process_is_removed(tmp_path: Path) -> None:
    make(tmp_path / f".out.tmp-{10**30}", "file", "")
    make(tmp_path / ".out.tmp-1x", "file", "no name of ours")
    with made_whole(tmp_path / "out") as temporary:
        make(temporary, "file", "new")
    assert sorted(os.listdir(tmp_path)) == [".out.tmp-1x", "out"]
