"""The paper's corpora from small archives of the same structure: ids worked out by hand, counts, hashes, notes."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data.indexed import IndexedReader
from megatron_allattn.data.interface import Newline
from megatron_allattn.data.manifest import Manifest
from megatron_allattn.data.prepare import prepare
from megatron_allattn.data.published import (
    PUBLISHED,
    Published,
    given_archive,
    preparation,
    wanted_sha256,
)
from tests.support.corpora import ARCHIVES, ENWIK8, TEXT8, zipped


def made(folder: Path, corpus: Published, newline: Newline = "eos", sha256: str | None = None) -> Manifest:
    path = folder / corpus.archive.name
    path.write_bytes(ARCHIVES[corpus.name])
    archive = given_archive(corpus, path, sha256)
    return prepare(preparation(corpus, archive, folder / "out" / "P", newline, overwrite=True))


def ids(folder: Path) -> dict[str, list[int]]:
    return {split: IndexedReader(folder / "out" / f"P_{split}").tokens.tolist() for split in ("train", "valid", "test")}


# byte values in their order:      \0 \n \r sp  a  b  c a9 c3 ff
# ids under eos and symbol:         0  1  2  3  4  5  6  7  8  9
# ids under drop:                   0     1  2  3  4  5  6  7  8
UNIT = [4, 5, 1, 1, 5, 4, 8, 7, 3, 9, 0, 6, 4, 5, 2, 1, 5]
DROPPED = [3, 4, 4, 3, 7, 6, 2, 8, 0, 5, 3, 4, 1, 4]


@pytest.mark.parametrize(
    ("newline", "symbols", "train", "valid", "test"),
    [
        ("eos", 10, [*UNIT, *UNIT, 4, 8, 1], [7, 1], [5, 5, 1]),
        ("symbol", 10, [*UNIT, *UNIT, 4, 8], [7, 1], [5, 5]),
        ("drop", 9, [*DROPPED, *DROPPED, 3, 7], [6], [4, 4]),
    ],
)
def test_enwik8_by_hand(
    tmp_path: Path, newline: Newline, symbols: int, train: list[int], valid: list[int], test: list[int]
) -> None:
    manifest = made(tmp_path, PUBLISHED["enwik8"], newline)
    assert ids(tmp_path) == {"train": train, "valid": valid, "test": test}
    assert (manifest.tokenizer.vocab_size, manifest.tokenizer.newline) == (symbols, newline)
    assert [record.bytes for record in manifest.splits.values()] == [36, 2, 2]
    assert [record.lines for record in manifest.splits.values()] == [7, 1, 1]
    assert manifest.dtype == "uint8"


# under eos the line end is 0, space 1, and the letters a b c d e f g h i m n o r s t u follow from 2 on
LETTERS = " abcdefghimnorstu"


@pytest.mark.parametrize(("newline", "first", "end"), [("eos", 1, [0]), ("symbol", 0, []), ("drop", 0, [])])
def test_text8_by_hand(tmp_path: Path, newline: Newline, first: int, end: list[int]) -> None:
    manifest = made(tmp_path, PUBLISHED["text8"], newline)
    expected = [LETTERS.index(chr(byte)) + first for byte in TEXT8]
    assert ids(tmp_path) == {
        "train": expected[:36] + end,
        "valid": expected[36:38] + end,
        "test": expected[38:] + end,
    }
    assert manifest.tokenizer.vocab_size == 17 + first
    assert [record.characters for record in manifest.splits.values()] == [36, 2, 2]


# by frequency, equal ones as they first occur: line end 4, = 2, the 2, cat 2, Title 1, <unk> 1, dog 1
@pytest.mark.parametrize(
    ("newline", "words", "train", "valid", "test"),
    [
        (
            "eos",
            ["<eos>", "=", "the", "cat", "Title", "<unk>", "dog"],
            [0, 1, 4, 1, 0, 0, 2, 3, 5, 2, 6, 3, 0],
            [2, 5, 0, 0],
            [6, 0],
        ),
        (
            "drop",
            ["=", "the", "cat", "Title", "<unk>", "dog"],
            [0, 3, 0, 1, 2, 4, 1, 5, 2],
            [1, 4],
            [5],
        ),
    ],
)
def test_wikitext_by_hand(
    tmp_path: Path, newline: Newline, words: list[str], train: list[int], valid: list[int], test: list[int]
) -> None:
    manifest = made(tmp_path, PUBLISHED["wikitext-103"], newline)
    assert manifest.tokenizer.to_json()["words"] == words
    assert ids(tmp_path) == {"train": train, "valid": valid, "test": test}
    assert [record.words for record in manifest.splits.values()] == [9, 2, 1]
    assert [record.lines for record in manifest.splits.values()] == [4, 2, 1]
    assert [record.unknown_words for record in manifest.splits.values()] == [0, 1, 0]
    assert [record.name for record in manifest.inputs] == [
        f"wikitext-103-v1.zip:wikitext-103/wiki.{split}.tokens" for split in ("train", "valid", "test")
    ]


def test_manifest_says_where_it_comes_from(tmp_path: Path) -> None:
    manifest = made(tmp_path, PUBLISHED["enwik8"])
    digest = hashlib.sha256(ARCHIVES["enwik8"]).hexdigest()
    assert manifest.source == {
        "corpus": "enwik8",
        "archive": "enwik8.zip",
        "bytes": len(ARCHIVES["enwik8"]),
        "sha256": digest,
        "published": False,
    }
    assert manifest.notes[-1] == (
        f"the archive (SHA-256 {digest}) is not the published one, as --archive-sha256 allows: "
        "10 symbols instead of 205, 36 train bytes instead of 90,000,000, "
        "2 valid bytes instead of 5,000,000, 2 test bytes instead of 5,000,000"
    )
    assert json.loads((tmp_path / "out" / "P.json").read_text())["source"] == manifest.source
    assert manifest.inputs[0].sha256 == hashlib.sha256(ENWIK8).hexdigest()


def as_published(name: str, **changes: object) -> Published:
    """The corpus as if its small archive were the one that was published."""
    corpus = PUBLISHED[name]
    digest = hashlib.sha256(ARCHIVES[name]).hexdigest()
    archive = replace(corpus.archive, sha256=digest, num_bytes=len(ARCHIVES[name]))
    return replace(corpus, archive=archive, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"counts": {"bytes": (36, 2, 2)}, "vocabulary": {"eos": 11}}, "gives 10 symbols instead of 11;"),
        ({"counts": {"bytes": (36, 1, 2)}, "vocabulary": {"eos": 10}}, "gives 2 valid bytes instead of 1;"),
    ],
)
def test_published_archive_must_give_the_published_counts(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=rf"archive .*enwik8\.zip: {words}"):
        made(tmp_path, as_published("enwik8", **changes))
    assert not (tmp_path / "out").exists()


def test_published_archive_needs_no_note(tmp_path: Path) -> None:
    corpus = as_published("enwik8", counts={"bytes": (36, 2, 2), "lines": (7, 1, 1)}, vocabulary={"eos": 10})
    manifest = made(tmp_path, corpus, sha256=corpus.archive.sha256)
    assert manifest.source is not None
    assert manifest.source["published"] is True
    assert not any("archive" in note for note in manifest.notes)


def test_published_text_in_another_archive_is_recognized(tmp_path: Path) -> None:
    known = {
        "member_sha256": (hashlib.sha256(ENWIK8).hexdigest(),),
        "counts": {"bytes": (36, 2, 2)},
        "vocabulary": {"eos": 10},
    }
    corpus = replace(PUBLISHED["enwik8"], **known)
    assert made(tmp_path, corpus).notes[-1] == "another archive than the published one, with the same text"
    with pytest.raises(UsageError, match="10 symbols instead of 205"):
        made(tmp_path, replace(corpus, vocabulary={"eos": 205}))


def test_facts_hang_together() -> None:
    for corpus in PUBLISHED.values():
        assert len(corpus.members) == len(corpus.member_sha256) in (1, 3)
        for digest in (corpus.archive.sha256, *filter(None, corpus.member_sha256)):
            assert len(bytes.fromhex(digest)) == 32
        assert all(url.endswith("/" + corpus.archive.name) for url in corpus.archive.urls)
    wikitext = PUBLISHED["wikitext-103"]
    tokens = np.add(wikitext.counts["words"], wikitext.counts["lines"])
    assert tokens.tolist() == [103_227_021, 217_646, 245_569]  # table 1 of Merity et al. 2016
    for name in ("enwik8", "text8"):
        assert sum(PUBLISHED[name].counts["bytes"]) == 10**8


def test_wikitext_counts_are_what_the_text_gives(shared: Path, tmp_path: Path) -> None:
    """WikiText-2 has the validation and test text of WikiText-103 (with more <unk>s)."""
    texts = {split: (shared / "data" / f"wikitext2.{split}.tokens").read_bytes() for split in ("valid", "test")}
    members = {"train": texts["test"], **texts}
    path = tmp_path / "wikitext-103-v1.zip"
    path.write_bytes(zipped({f"wikitext-103/wiki.{split}.tokens": text for split, text in members.items()}))
    corpus = PUBLISHED["wikitext-103"]
    splits = prepare(
        preparation(corpus, given_archive(corpus, path, None), tmp_path / "P", "eos", overwrite=True)
    ).splits
    for number, split in enumerate(("train", "valid", "test")):
        if split != "train":
            assert splits[split].words == corpus.counts["words"][number]
            assert splits[split].lines == corpus.counts["lines"][number]
            assert splits[split].tokens == corpus.counts["words"][number] + corpus.counts["lines"][number]


def test_wanted_hashes() -> None:
    corpus = PUBLISHED["text8"]
    assert wanted_sha256(corpus, None) == corpus.archive.sha256
    assert wanted_sha256(corpus, "none") is None
    assert wanted_sha256(corpus, "AB" * 32) == "ab" * 32
    for value in ("", "any", "ab" * 31, "xy" * 32, "None"):
        with pytest.raises(
            UsageError, match=r"--archive-sha256 .*is not a SHA-256; give 64 hexadecimal digits, or none"
        ):
            wanted_sha256(corpus, value)


def test_given_archives_that_are_refused(tmp_path: Path) -> None:
    corpus, path = PUBLISHED["enwik8"], tmp_path / "enwik8.zip"
    for kind, words in ((lambda: None, "no such file"), (path.mkdir, "is no regular file")):
        kind()
        with pytest.raises(UsageError, match=rf"--archive .*enwik8\.zip: {words}; give the corpus' zip"):
            given_archive(corpus, path, None)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(UsageError, match="is no regular file"):
        given_archive(corpus, path, None)
    path.unlink()
    path.write_bytes(ARCHIVES["enwik8"])
    digest = hashlib.sha256(ARCHIVES["enwik8"]).hexdigest()
    words = (
        rf"--archive .*: has {path.stat().st_size} bytes with SHA-256 {digest}, expected 5479.*\(36,445,475 bytes\); "
    )
    with pytest.raises(UsageError, match=words + ".*--archive-sha256 HASH"):
        given_archive(corpus, path, corpus.archive.sha256)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("enwik8", b"", "File is not a zip file"),
        ("enwik8", ARCHIVES["text8"], "member enwik8 of archive .*: is missing, it holds text8;"),
        ("enwik8", ARCHIVES["enwik8"][:-25], "is damaged or cut short"),
        ("enwik8", zipped({"enwik8": b""}), "holds no text; get the archive again, or give another one with --archive"),
        ("enwik8", zipped({"enwik8": b"ten bytes."}), "leaves none of 10 tokens to valid"),
        (
            "text8",
            zipped({"text8": TEXT8[:-1] + b"\xff"}),
            r"text8\.zip:text8: line 1, byte offset 39 .*not valid UTF-8",
        ),
        (
            "wikitext-103",
            zipped({"wikitext-103/wiki.train.tokens": b"a\n"}),
            r"member .*wiki\.valid\.tokens of archive",
        ),
    ],
)
def test_archives_that_hold_something_else(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    corpus, path = PUBLISHED[name], tmp_path / "a" / PUBLISHED[name].archive.name
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words) as refusal:
        prepare(preparation(corpus, given_archive(corpus, path, None), tmp_path / "P", "eos", overwrite=True))
    assert str(refusal.value).count("\n") == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
