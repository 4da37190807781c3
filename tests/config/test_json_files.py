"""JSON files of any content: a value or one line, and no more memory than what is there."""

import os
from pathlib import Path

import pytest

from megatron_allattn.config import UsageError
from megatron_allattn.config.json_files import read_bytes, read_json, read_json_object


def test_what_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "a.json").write_text('{"a": [1, 0.1, null]}')
    assert read_json("file", path, "give one") == read_json_object("file", path, "give one") == {"a": [1, 0.1, None]}
    assert read_bytes("file", path, "give one", limit=21) == path.read_bytes()


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\xfa", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"1" * 5000, "is not JSON"),
        (b"[]", "holds no object"),
        (b'"' + b"x" * 2**20 + b'"', "has more than 1,048,576 bytes, the most that is read of it"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, rule: str) -> None:
    (path := tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UsageError, match=rf"^--flag {path}: {rule}.*; give one$"):
        read_json_object("--flag", path, "give one", limit=2**20)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, rule in (
        ("pipe", "is not a regular file"),
        (".", "is not a regular"),
        ("none", r"cannot be read \(No such"),
    ):
        with pytest.raises(UsageError, match=rule):
            read_json("file", tmp_path / name, "give one")
