"""Atomic files, JSON that reads back to the same bits, and one-line errors of the storage."""

import errno
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_allattn.checkpoint.files import (
    StorageError,
    append_json_line,
    read_json_lines,
    storage_errors,
    write_json_atomic,
    write_json_lines_atomic,
    write_text_atomic,
)
from megatron_allattn.config import UsageError
from tests.support.forked import kill_before_call, run_forked
from tests.support.template import ROOT

FLOATS = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2.0**53 + 2]


def test_floats_read_back_to_the_same_bits(tmp_path: Path):
    append_json_line(tmp_path / "metrics.jsonl", {"step": 1, "loss": FLOATS})
    append_json_line(tmp_path / "metrics.jsonl", {"step": 2, "loss": math.nan, "text": "é\n"})
    first, second = read_json_lines(tmp_path / "metrics.jsonl")
    assert [value.hex() for value in first["loss"]] == [value.hex() for value in FLOATS]
    assert math.isnan(second["loss"]) and second["text"] == "é\n"


def test_a_torn_last_line_is_left_out_and_rewriting_drops_it(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert read_json_lines(path) == []
    for step in (1, 2, 3):
        append_json_line(path, {"step": step})
    with open(path, "ab") as handle:
        handle.write(b'{"step": 4, "lo')
    records = read_json_lines(path)
    assert [record["step"] for record in records] == [1, 2, 3]
    write_json_lines_atomic(path, [record for record in records if record["step"] <= 2])
    append_json_line(path, {"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path):
    path, seen = tmp_path / "config.json", set()
    for number in range(1, 20):
        write_text_atomic(path, "old")

        def write(number: int = number) -> None:
            kill_before_call(number)
            write_json_atomic(path, {"new": 1})

        code, _text = run_forked(write)
        assert path.read_text() in ("old", '{\n  "new": 1\n}\n')
        seen.add(path.read_text())
        if code == 0:
            assert number > 3 and len(seen) == 2
            return
        assert code == -signal.SIGKILL
    pytest.fail("the write never ended")


def test_a_file_size_limit_keeps_the_old_file_and_names_the_bytes(tmp_path: Path):
    path = tmp_path / "config.json"
    write_text_atomic(path, "old")

    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        write_text_atomic(path, "x" * 5000)

    code, text = run_forked(write)
    assert code == 1
    assert text.startswith(f"StorageError: {path}: the file size limit is reached: 5,000 bytes needed, ")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "no space left"),
        (errno.EROFS, "the folder is not writable"),
        (errno.EACCES, "the folder is not writable"),
        (errno.EIO, r"cannot be written \(Input/output error\)"),
    ],
)
def test_causes_are_told_apart(tmp_path: Path, number: int, cause: str):
    path = tmp_path / "not" / "there"
    free = f"{shutil.disk_usage(tmp_path).free:,}".rsplit(",", 3)[0]  # to the gigabyte: others write meanwhile
    message = f"{path}: {cause}: 1,234 bytes needed, {free},.* bytes free; .* another"
    with pytest.raises(StorageError, match=message), storage_errors(path, 1234):
        raise OSError(number, os.strerror(number))


def test_a_folder_without_write_permission(tmp_path: Path):
    folder = tmp_path / "closed"
    folder.mkdir()
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    folder.chmod(0o555)

    def write() -> None:
        if os.getuid() == 0:  # root may write anywhere
            os.setgid(65534)
            os.setuid(65534)
        write_text_atomic(folder / "config.json", "text")

    code, text = run_forked(write)
    assert code == 1
    assert text.startswith(f"StorageError: {folder / 'config.json'}: the folder is not writable: 4 bytes needed")


def test_a_full_disk(tmp_path: Path):
    script = (
        "import sys; from pathlib import Path\n"
        "from megatron_allattn.checkpoint.files import StorageError, write_text_atomic\n"
        "path = Path(sys.argv[1]) / 'config.json'; write_text_atomic(path, 'old')\n"
        "try: write_text_atomic(path, 'x' * 2_000_000)\n"
        "except StorageError as error: print(error, path.read_text(), len(list(path.parent.iterdir())), sep='|')\n"
    )
    mount = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, script]
    if shutil.which("unshare") is None or subprocess.run([*command[:4], "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs unshare and the right to use it")
    if subprocess.run([*command[:4], 'mount -t tmpfs none "$1"', "sh", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted")
    output = subprocess.check_output(command, cwd=ROOT, text=True, timeout=60)
    error, old, num_files = output.strip().split("|")
    assert error.startswith(f"{tmp_path / 'config.json'}: no space left: 2,000,000 bytes needed, ")
    assert int(error.partition("needed, ")[2].partition(" bytes free")[0].replace(",", "")) <= 1_048_576
    assert (old, num_files) == ("old", "1")


@pytest.mark.parametrize("line", ["{", "[" * 100_000, "[1]"])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    (path := tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + line + '\n{"torn')
    with pytest.raises(UsageError, match=rf"^file {path}: .*line 2.*take the line out"):
        read_json_lines(path)
