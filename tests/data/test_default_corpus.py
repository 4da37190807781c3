"""The default corpus: built once into the cache, by one process while others wait, and never half."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_allattn.config.data import DataConfig
from megatron_allattn.config.errors import UsageError
from megatron_allattn.data import prepare
from megatron_allattn.data.corpora import files_corpus
from megatron_allattn.data.dataset import open_dataset
from megatron_allattn.data.prepare import Preparation, cache_folder, default_corpus

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import json, sys, time
from megatron_allattn.config.data import DataConfig
from megatron_allattn.data import prepare
from megatron_allattn.data.dataset import open_dataset
write = prepare._write_splits
builds = []
def slow(*arguments):
    builds.append(1)
    print("building", flush=True)
    time.sleep(float(sys.argv[1]))
    return write(*arguments)
prepare._write_splits = slow
data = open_dataset(DataConfig())
print(json.dumps([len(builds), data.fingerprint, len(data.train), data.unigram_entropy]))
"""


def start(cache: Path, delay: float) -> "subprocess.Popen[str]":
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", CHILD, str(delay)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def result(process: "subprocess.Popen[str]") -> list[object]:
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0
    return list(json.loads(output.splitlines()[-1]))


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "megatron_allattn").iterdir())


def test_one_process_builds_and_the_others_use_it(tmp_path: Path) -> None:
    slow = start(tmp_path, 2.0)
    assert slow.stdout is not None
    assert slow.stdout.readline() == "building\n"
    others = [start(tmp_path, 0.0) for _ in range(2)]
    results = [result(process) for process in (slow, *others)]
    assert [entry[0] for entry in results] == [1, 0, 0]
    assert len({str(entry[1:]) for entry in results}) == 1
    version = ".".join(map(str, sys.version_info[:3]))
    assert {name.rpartition("-")[0] for name in names(tmp_path)} == {f"stdlib-byte-{version}"}
    assert len(names(tmp_path)) == 7
    # another "host" with its own cache builds the same data
    assert result(start(tmp_path / "other", 0.0)) == [1, *results[0][1:]]


def test_killed_builder_is_replaced(tmp_path: Path) -> None:
    killed = start(tmp_path, 60.0)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "building\n"
    waiting = start(tmp_path, 0.0)
    time.sleep(1.0)
    assert waiting.poll() is None
    assert len(names(tmp_path)) == 1  # only the hidden folder
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert result(waiting)[0] == 1
    assert len(names(tmp_path)) == 7


def small(folder: Path) -> Path:
    (folder / "text.txt").write_bytes(b"abcdefghij" * 10)
    job = Preparation(
        corpus=files_corpus([folder / "text.txt"]), prefix=folder / "P", tokenizer="byte", existing="reuse"
    )
    prepare.prepare(job)
    return folder / "P"


def test_builder_can_be_replaced_and_flags_are_checked(tmp_path: Path) -> None:
    data = open_dataset(DataConfig(tokenizer_type="byte"), build_default=lambda: small(tmp_path))
    assert data.valid.tobytes() == b"abcde"
    with pytest.raises(UsageError, match="--split 90,5,5: has no effect"):
        open_dataset(DataConfig(), frozenset({"--split"}), build_default=lambda: small(tmp_path))


def test_damaged_cache_says_how_to_go_on(tmp_path: Path) -> None:
    prefix = small(tmp_path)
    Path(f"{prefix}_train.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=rf"P_train\.bin: has 0 bytes.*delete {prefix}\*, set XDG_CACHE_HOME"):
        open_dataset(DataConfig(), build_default=lambda: small(tmp_path))


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "megatron_allattn"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "megatron_allattn"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")
    with pytest.raises(UsageError, match="XDG_CACHE_HOME relative/cache: is not an absolute path"):
        default_corpus()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="default corpus: set XDG_CACHE_HOME or give --data-path"):
        open_dataset(DataConfig())
