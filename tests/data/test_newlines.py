"""The newline rules through a preparation: every line an <eos>, a symbol, or nothing; what the text counts stays."""

from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.config.data import DataConfig
from megatron_allattn.config.errors import UsageError
from megatron_allattn.data.corpora import Corpus, files_corpus
from megatron_allattn.data.dataset import Dataset, open_dataset
from megatron_allattn.data.interface import Newline
from megatron_allattn.data.manifest import Manifest
from megatron_allattn.data.prepare import Preparation, prepare
from megatron_allattn.data.tokenizers import (
    ByteLearner,
    ByteTokenizer,
    CharLearner,
    CharTokenizer,
    SubwordLearner,
    WordLearner,
    tokenizer_from_json,
)

TEXT = "aé b\r\n\n\nb a"
RULES: list[Newline] = ["eos", "symbol", "drop"]
# the text that the tokens decode to
AFTER = {"eos": TEXT + "\n", "symbol": TEXT, "drop": "aé b\rb a"}


def corpus(folder: Path, *texts: str, name: str = "text") -> Corpus:
    paths = [folder / f"{name}{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    return files_corpus(paths)


def made(folder: Path, tokenizer: Any, *texts: str, split: str = "1,0,0", **settings: Any) -> tuple[Manifest, Dataset]:
    job = Preparation(
        corpus=corpus(folder, *texts),
        prefix=folder / "P",
        tokenizer=tokenizer,
        split=split,
        existing="overwrite",
        **settings,
    )
    manifest = prepare(job)
    return manifest, open_dataset(DataConfig(data_path=str(folder / "P")))


@pytest.mark.parametrize("newline", RULES)
@pytest.mark.parametrize("chunk_bytes", [1, 1000])
def test_each_kind_follows_the_rule(tmp_path: Path, newline: Newline, chunk_bytes: int) -> None:
    learners: dict[str, Any] = {
        "all bytes": ByteTokenizer(newline=newline),
        "bytes": ByteLearner(newline=newline),
        "char": CharLearner(newline=newline),
        "word": WordLearner(newline=newline),
        "sentencepiece": SubwordLearner(vocab_size=263 if newline == "eos" else 262, newline=newline),
    }
    for name, learner in learners.items():
        manifest, data = made(tmp_path, learner, TEXT, chunk_bytes=chunk_bytes)
        tokenizer, record = manifest.tokenizer, manifest.splits["train"]
        text = tokenizer.decode(data.train)
        text = text if isinstance(text, str) else text.decode()
        expected = AFTER[newline]
        if name == "word":
            expected = "\n".join(" ".join(line.split()) for line in expected.replace("\r", " ").split("\n"))
        assert text == expected, name
        ends = 0 if tokenizer.newline_id is None else int((data.train == tokenizer.newline_id).sum())
        assert ends == {"eos": 4, "symbol": 3, "drop": 0}[newline], name
        assert (record.bytes, record.characters, record.words, record.lines) == (12, 11, 4, 4)
        assert data.splits is not None
        assert record == data.splits["train"]
        assert tokenizer.newline == newline
        assert tokenizer_from_json(tokenizer.to_json(), "x").fingerprint == tokenizer.fingerprint


def test_every_file_and_split_ends_its_last_line(tmp_path: Path) -> None:
    manifest, data = made(tmp_path, ByteTokenizer(newline="eos"), "ab", "cd\n", "efgh", split="7,3,0")
    # 9 bytes: the first 6 are train, so "efgh" is cut behind e
    assert data.train.tobytes() == b"ab\ncd\ne\n"
    assert data.valid.tobytes() == b"fgh\n"
    assert [record.tokens for record in manifest.inputs] == [3, 3, 6]
    assert (manifest.splits["train"].lines, manifest.splits["valid"].lines) == (3, 1)
    assert "line ends are <eos>; the last line of a file and split has one too" in manifest.notes[0]


def test_enwik8_as_in_the_paper(tmp_path: Path) -> None:
    """205 symbols: the 204 other bytes and <eos>; a cut falls at an exact byte, also inside a line or a character."""
    text = bytes([10, *range(52, 256)])
    assert len(set(text)) == 205
    (tmp_path / "enwik8").write_bytes(text * 20)
    job = Preparation(
        corpus=files_corpus([tmp_path / "enwik8"]),
        prefix=tmp_path / "P",
        tokenizer=ByteLearner(newline="eos"),
        raw_bytes=True,
        split="3690,205,205",
    )
    made = prepare(job)
    data = open_dataset(DataConfig(data_path=str(tmp_path / "P")))
    assert made.tokenizer.vocab_size == 205
    assert [made.splits[name].bytes for name in ("train", "valid", "test")] == [3690, 205, 205]
    assert [len(data.train), len(data.valid), len(data.test)] == [3691, 206, 206]
    assert data.tokenizer.decode(data.valid) == text + b"\n"
    assert int(data.train.max()) == 204


def test_text8_as_in_the_paper(tmp_path: Path) -> None:
    """28 symbols: a to z, space, and one <eos> at the end of each split, which has no line end of its own."""
    text = " abcdefghijklmnopqrstuvwxyz" * 40
    manifest, data = made(tmp_path, CharLearner(newline="eos"), text, split="900,90,90")
    assert manifest.tokenizer.vocab_size == 28
    assert [len(data.train), len(data.valid), len(data.test)] == [901, 91, 91]
    assert data.tokenizer.decode(data.test) == text[990:] + "\n"
    assert manifest.splits["valid"].characters == 90


def test_vocabularies_of_only_what_occurs(tmp_path: Path) -> None:
    manifest, data = made(tmp_path, ByteLearner(), "ca", split="1,1,0")
    assert manifest.to_json()["tokenizer"] == {"type": "byte", "vocab_size": 2, "bytes": [97, 99]}
    assert (data.train.tolist(), data.valid.tolist()) == ([1], [0])
    with pytest.raises(UsageError, match=r"text of x: byte 0x62 at byte offset 11 is not in the vocabulary of 2 bytes"):
        data.tokenizer.encode(b"ab", source="x", offset=10)
    assert CharLearner(newline="eos").learn(iter([b"ba"]), iter([]), 1).characters == ("\n", "a", "b")
    assert CharLearner(newline="drop").learn(iter([b"b\na"]), iter([]), 1).characters == ("a", "b")
    with pytest.raises(UsageError, match=r"--newline drop: leaves no char"):
        CharLearner(newline="drop").learn(iter([b"\n"]), iter([]), 1)
    with pytest.raises(UsageError, match=r"char vocabulary of 1: has no newline, which becomes <eos>"):
        CharTokenizer(["a"], "eos")
    with pytest.raises(UsageError, match=r"byte vocabulary: is not a list of numbers from 0 to 255"):
        ByteTokenizer([256])
    with pytest.raises(UsageError, match=r"char tokenizer no: is not a newline rule"):
        CharTokenizer(["a"], "no")  # type: ignore[arg-type]
    assert CharTokenizer(["a"], "drop").encode(b"a\na\n").tolist() == [0, 0]
    with pytest.raises(UsageError, match=r"'b' .* at byte offset 2 "):
        CharTokenizer(["a"], "drop").encode(b"a\nb")


def test_a_split_of_nothing_but_dropped_line_ends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"split valid: its text has no tokens"):
        made(tmp_path, WordLearner(newline="drop"), "a b\n", "\n\n\n\n", split="1,1,0")
    assert not list(tmp_path.glob("P*"))
