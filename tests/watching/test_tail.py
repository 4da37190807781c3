"""A file that grows, is cut, replaced, rewritten or torn: every whole line once, and anew where it is another file."""

import json
import os
from pathlib import Path

import pytest

from megatron_allattn.config import UsageError
from megatron_allattn.watching import tail
from megatron_allattn.watching.tail import Tail
from tests.support.watched import append, train


def steps(found: Tail) -> list[int]:
    """Of what the next looks bring, until there is no more."""
    news = found.look()
    records = news.records
    while news.more:
        news = found.look()
        records += news.records
    return [record["step"] for record in records]


def test_each_line_once(tmp_path: Path) -> None:
    found = Tail(tmp_path / "metrics.jsonl")
    assert steps(found) == []
    for first in (1, 4, 9):
        append(tmp_path, *(train(step) for step in range(first, first + 2)))
        news = found.look()
        assert ([record["step"] for record in news.records], news.anew) == ([first, first + 1], False)
        assert steps(found) == []


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(tmp_path, *(train(step) for step in range(1, 2001)))
    found, read = Tail(tmp_path / "metrics.jsonl"), []
    pread = os.pread
    monkeypatch.setattr(tail.os, "pread", lambda *of: read.append(len(data := pread(*of))) or data)
    assert steps(found) == list(range(1, 2001))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    assert size <= sum(read) < size + 1000
    read.clear()
    for step in range(2001, 2011):
        append(tmp_path, train(step))
        assert steps(found) == [step]
    grown = (tmp_path / "metrics.jsonl").stat().st_size - size
    assert sum(read) < grown + 10 * 100


def test_a_long_file_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "PIECE", 100)
    append(tmp_path, *(train(step) for step in range(1, 30)))
    found = Tail(tmp_path / "metrics.jsonl")
    news = found.look()
    assert news.more and len(news.records) == 0
    assert steps(found) == list(range(1, 30))


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    found, line = Tail(tmp_path / "metrics.jsonl"), json.dumps(train(1, note="é"), ensure_ascii=False).encode() + b"\n"
    for i in range(len(line)):
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(line[i : i + 1])
        assert steps(found) == ([1] if i == len(line) - 1 else [])
    assert found.no_records == 0


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize("how", ["replaced", "in place"])
def test_a_rewritten_file_begins_anew(tmp_path: Path, how: str, longer: bool) -> None:
    path, found = tmp_path / "metrics.jsonl", Tail(tmp_path / "metrics.jsonl")
    append(tmp_path, *(train(step) for step in range(1, 9)))
    assert len(steps(found)) == 8
    count = 20 if longer else 4
    text = "".join(json.dumps(train(step, loss=9.0)) + "\n" for step in range(1, count + 1))
    if how == "replaced":
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(path)
    else:
        path.write_text(text)
    news = found.look()
    assert news.anew and [record["loss"] for record in news.records] == [9.0] * count
    append(tmp_path, train(21))
    news = found.look()
    assert not news.anew and [record["step"] for record in news.records] == [21]


def test_a_file_that_goes_and_comes_back(tmp_path: Path) -> None:
    found = Tail(tmp_path / "metrics.jsonl")
    append(tmp_path, train(1))
    assert steps(found) == [1]
    (tmp_path / "metrics.jsonl").unlink()
    assert found.look().anew
    assert not found.look().anew
    append(tmp_path, train(1))
    assert steps(found) == [1]


def test_lines_that_are_no_records_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "LONGEST", 2000)
    monkeypatch.setattr(tail, "PIECE", 512)
    lines = [b"{", b"[1]", b"{}", b'{"kind":"train","step":"1"}', b'{"kind":1,"step":1}', b"\xff\xfe", b"[" * 1500]
    content = b"\n".join([*lines, b"x" * 9000, json.dumps(train(7)).encode(), b""])
    (tmp_path / "metrics.jsonl").write_bytes(content)
    found = Tail(tmp_path / "metrics.jsonl")
    assert steps(found) == [7]
    assert found.no_records == len(lines) + 1


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(UsageError, match=f"^file {tmp_path / name}: is not a regular file; "):
            Tail(tmp_path / name).look()
