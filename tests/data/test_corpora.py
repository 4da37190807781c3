"""Text: cut between characters at any chunk size, and what is no text is refused with file, line and offset."""

import os
from pathlib import Path

import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data import corpora
from megatron_allattn.data.corpora import Document, files_corpus, read_bytes, standard_library, whole_characters


def pieces(folder: Path, content: bytes, chunk_bytes: int) -> list[bytes]:
    path = folder / "text.txt"
    path.write_bytes(content)
    document = Document("text.txt", path)
    return list(whole_characters(document, read_bytes(document, chunk_bytes)))


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 4, 5, 7, 1000])
def test_pieces_end_between_characters(tmp_path: Path, chunk_bytes: int) -> None:
    text = "aé€😀\r\nz\n" * 5
    parts = pieces(tmp_path, text.encode(), chunk_bytes)
    assert b"".join(parts) == text.encode()
    assert "".join(part.decode() for part in parts) == text
    assert all(parts)
    assert max(map(len, parts)) <= chunk_bytes + 3


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 4, 1000])
def test_byte_order_mark_is_dropped_at_the_start_only(tmp_path: Path, chunk_bytes: int) -> None:
    mark = "\ufeff".encode()
    assert b"".join(pieces(tmp_path, mark + b"a\r\n" + mark + b"b", chunk_bytes)) == b"a\r\n" + mark + b"b"
    assert b"".join(pieces(tmp_path, mark + mark + b"b", chunk_bytes)) == mark + b"b"
    assert b"".join(pieces(tmp_path, mark, chunk_bytes)) == b""


# content, line, byte offset of the fault, a word of the reason
FAULTS = {
    "0xFF": (b"one\ntwo\nth\xffree", 3, 10, "0xff"),
    "lone 0xC0": (b"\xc0", 1, 0, "0xc0"),
    "cut character in the middle": ("é€".encode()[:-1] + b"\nmore", 1, 2, "0xe2"),
    "cut character at the end": (b"12\n" + "😀".encode()[:3], 2, 3, "unexpected end"),
    "continuation byte": (b"a\n\n\n\x80", 4, 4, "0x80"),
    "surrogate": (b"ab\xed\xa0\x80", 1, 2, "0xed"),
    "NUL": (b"a\r\nb\r\nc\0d", 3, 7, "NUL"),
    "NUL after a cut character": (b"\xe2\x82\0", 1, 0, "0xe2"),
    "NUL before bad UTF-8": (b"x\n\0\xff", 2, 2, "NUL"),
    "bad UTF-8 before NUL": (b"x\n\xff\0", 2, 2, "0xff"),
    "fault after a mark": (b"\xef\xbb\xbfab\n\xff", 2, 6, "0xff"),
    "UTF-16": ("hello".encode("utf-16"), 1, 0, "UTF-16"),
}


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(tmp_path: Path, name: str, chunk_bytes: int) -> None:
    content, line, offset, word = FAULTS[name]
    if name == "UTF-16" and chunk_bytes == 1:
        word = "0xff"  # one byte does not show it
    with pytest.raises(UsageError) as refusal:
        pieces(tmp_path, content, chunk_bytes)
    message = str(refusal.value)
    assert f"text.txt: line {line}, byte offset {offset} " in message
    assert word in message
    assert "--raw-bytes" in message


def test_files_are_documents_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(name)
    corpus = files_corpus([str(tmp_path / "b"), str(tmp_path / "a")])
    assert [document.path.name for document in corpus.documents] == ["b", "a"]


def test_bad_inputs(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, rule in [
        ("none", "no such file"),
        ("empty", "is empty"),
        (".", "is a folder"),
        ("pipe", "not a regular file"),
        ("empty/x", "cannot be read"),
    ]:
        with pytest.raises(UsageError, match=rf"--input .*{name if name != '.' else ''}: .*{rule}"):
            files_corpus([tmp_path / name])


def test_standard_library_follows_its_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "b.py": b"b = 1\n",
        "a/z.py": b"z = 1\n",
        "a/__init__.py": b"",
        "a/test/t.py": b"no\n",
        "a/tests/t.py": b"no\n",
        "site-packages/p.py": b"no\n",
        "__pycache__/p.py": b"no\n",
        "config-3.11-x/c.py": b"no\n",
        "_sysconfigdata_x.py": b"no\n",
        "sitecustomize.py": b"no\n",
        "latin.py": b"# \xe9\n",
        "notes.txt": b"no\n",
        "big.py": b"x" * 101,
        "c.py": b"c" * 90,
        "d.py": b"d = 1\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(corpora, "STANDARD_LIBRARY_FILE_LIMIT", 100)
    corpus = standard_library()
    assert [document.name for document in corpus.documents] == ["a/z.py", "b.py", "c.py", "d.py"]
    assert corpus.num_skipped == 1
    monkeypatch.setattr(corpora, "STANDARD_LIBRARY_LIMIT", 6 + 6 + 90 + 5)
    assert [document.name for document in standard_library().documents] == ["a/z.py", "b.py", "c.py"]
    monkeypatch.setattr(corpora, "STANDARD_LIBRARY_LIMIT", 0)
    with pytest.raises(UsageError, match="no Python sources"):
        standard_library()


def test_standard_library_of_this_python() -> None:
    corpus = standard_library()
    names = [document.name for document in corpus.documents]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    excluded = {"test", "tests", "idle_test", "site-packages"}
    assert not [name for name in names if excluded & set(name.split("/"))]
    assert 4_000_000 < sum(document.path.stat().st_size for document in corpus.documents) <= 32 * 2**20
