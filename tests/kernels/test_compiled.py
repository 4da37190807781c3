"""Compiling the heads: once, for any number of processes, and a plain reason where it cannot be done."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_allattn.kernels import compiled
from megatron_allattn.kernels.compiled import load_library

pytestmark = pytest.mark.skipif(load_library()[0] is None, reason=load_library()[1])


@pytest.fixture(autouse=True)
def made_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FLAGS", tuple(flag for flag in compiled.FLAGS if flag != "-O3"))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that gives at once what the usual one has made."""
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(place))
        library, how = load_library()
    assert library is not None and how == "compiled heads"
    (made,) = (place / "megatron_allattn").iterdir()
    return script(place / "compiler", f'while [ "$1" != -o ]; do shift; done; exec cp "{made}" "$2"')


@pytest.fixture
def folder(quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries go, empty."""
    monkeypatch.setenv("CXX", quick)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions" / "megatron_allattn"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_they_are_compiled_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_library()[0] is not None
    (library,) = folder.iterdir()  # and nothing else
    made = library.stat().st_mtime_ns

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert load_library()[0] is not None
    assert library.stat().st_mtime_ns == made


def test_many_may_compile_at_once(folder: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: load_library(), range(3)))
    assert all(library is not None for library, _ in found)
    assert len(list(folder.iterdir())) == 1


def test_another_source_or_compiler_is_another_library(
    folder: Path, quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library()
    monkeypatch.setenv("CXX", f"{quick} -g0")
    load_library()
    assert len(list(folder.iterdir())) == 2
    for place, source in enumerate(compiled.SOURCES):
        copies = tmp_path / f"changed {place}"
        shutil.copytree(source.parent, copies, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        with (copies / source.name).open("a") as file:
            file.write("\n// changed\n")
        monkeypatch.setattr(compiled, "SOURCES", tuple(copies / one.name for one in compiled.SOURCES))
        assert load_library()[0] is not None
        assert len(list(folder.iterdir())) == 3 + place


def test_no_compiler_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_library() == (None, "heads of PyTorch: no C++ compiler no-such-compiler")
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("printf 'in x.cpp\\nerror: no \\351\\ncompilation terminated.\\n' >&2; exit 1", "error: no"),
        ("printf 'ld: cannot find -lgomp\\ncollect2: error: ld returned 1\\n' >&2; exit 1", "ld: cannot find -lgomp"),
        ("echo killed >&2; exit 1", "killed"),
        ("exit 1", "exit code 1"),
        ("exit 0", "/compiler wrote nothing, and tells of no error"),
        ('for last; do :; done; : > "$last"', "/compiler wrote nothing, and tells of no error"),
        ('for last; do :; done; echo nonsense > "$last"', "invalid ELF header|file too short"),
        ("sleep 20", "took more than 1 seconds"),
    ],
    ids=[
        "error",
        "linker",
        "something else",
        "silent",
        "writes nothing",
        "writes an empty file",
        "writes nonsense",
        "hangs",
    ],
)
def test_a_compiler_that_fails_is_no_error(
    text: str, reason: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    monkeypatch.setattr(compiled, "SECONDS", 1)
    library, how = load_library()
    assert library is None
    assert how.startswith("heads of PyTorch: ") and "\n" not in how
    assert any(part in how for part in reason.split("|")), how
    assert [path for path in folder.iterdir() if path.suffix != ".so"] == []  # no half-made files


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(blocked))
    library, how = load_library()
    assert library is None and "Not a directory" in how


def test_a_library_that_was_cut_short_is_made_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library()
    (library,) = folder.iterdir()
    other = tmp_path / "other" / folder.name  # what this process has loaded it would not open again
    other.mkdir(mode=0o700, parents=True)
    (other / library.name).touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "other"))
    assert load_library()[0] is not None
    assert (other / library.name).stat().st_size == library.stat().st_size


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.03, 0.25, 0.5, 0.9, 0.999])
def test_a_library_that_was_cut_short_anywhere_is_not_loaded(kept: float, folder: Path) -> None:
    """Loading the rest of one would end the process by a signal."""
    load_library()
    (library,) = folder.iterdir()
    whole = library.read_bytes()
    short = folder.parent / "short.so"
    short.write_bytes(whole[: int(kept * len(whole))])
    assert compiled._is_whole(library) and not compiled._is_whole(short)


def test_a_blank_compiler_is_the_usual_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", " ")
    assert load_library()[0] is not None


def test_a_compiler_with_an_open_quotation_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "')
    assert load_library() == (None, 'heads of PyTorch: CXX g++ ": No closing quotation')


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_nothing_is_loaded_from_where_others_may_write(folder: Path, mode: int) -> None:
    load_library()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    library, how = load_library()
    assert library is None and f"others may write to {folder}" in how


@pytest.mark.parametrize("name", ["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "CXX"])
def test_an_empty_variable_is_as_none(name: str, quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", quick)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name, "")
    assert load_library()[0] is not None
    assert len(list((tmp_path / ".cache" / "torch_extensions" / "megatron_allattn").iterdir())) == 1


def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    library, how = load_library()
    assert library is None and "home" in how


def test_a_compiler_with_another_openmp_library_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "c++ -D__clang__=15")
    library, how = load_library()
    assert library is None and "clang brings an OpenMP library of its own" in how


def test_there_is_one_openmp_library_in_the_process() -> None:
    """Two would each keep threads of their own, which wait for work by spinning on the same cores."""
    program = (
        "import torch; from pathlib import Path; from megatron_allattn.kernels.compiled import load_library\n"
        "torch.ones(2, 2) @ torch.ones(2, 2); load_library()\n"
        "maps = Path('/proc/self/maps').read_text().splitlines()\n"
        "print(len({line.split()[-1] for line in maps if 'omp' in line.split()[-1].rsplit('/')[-1]}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "1", done.stdout
