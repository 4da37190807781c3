"""Words and SentencePiece through a preparation: splits at lines or by files, counts of the text, hard input."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_allattn.config.data import DataConfig
from megatron_allattn.config.errors import UsageError
from megatron_allattn.data.corpora import files_corpus
from megatron_allattn.data.dataset import Dataset, open_dataset
from megatron_allattn.data.indexed import IndexedWriter
from megatron_allattn.data.manifest import Manifest
from megatron_allattn.data.prepare import Preparation, prepare
from megatron_allattn.data.tokenizers import (
    ByteTokenizer,
    CharLearner,
    SentencePieceTokenizer,
    SubwordLearner,
    WordLearner,
    WordTokenizer,
    tokenizer_from_file,
)

ROOT = Path(__file__).resolve().parents[2]
LICENSE = (ROOT / "LICENSE").read_bytes()
LEARNERS: dict[str, Any] = {
    "word": WordLearner(),
    "unigram": SubwordLearner(vocab_size=500),
    "bpe": SubwordLearner(vocab_size=500, model_type="bpe", newline="eos"),
}


def job(
    folder: Path, learner: Any, text: bytes, valid: bytes | None = None, test: bytes | None = None, **settings: Any
) -> Preparation:
    corpora = {}
    for name, content in (("corpus", text), ("valid", valid), ("test", test)):
        if content is not None:
            (folder / f"{name}.txt").write_bytes(content)
            flag = "--input" if name == "corpus" else f"--{name}-input"
            corpora[name] = files_corpus([folder / f"{name}.txt"], flag)
    return Preparation(
        prefix=folder / "out" / "P", tokenizer=learner, **{"existing": "overwrite", **corpora, **settings}
    )


def made(folder: Path, *arguments: Any, **settings: Any) -> tuple[Manifest, Dataset]:
    manifest = prepare(job(folder, *arguments, **settings))
    return manifest, open_dataset(DataConfig(data_path=str(folder / "out" / "P")))


def test_splits_of_files_by_hand(tmp_path: Path) -> None:
    manifest, data = made(tmp_path, WordLearner(), b"b a a\nc\n\n", b"\xef\xbb\xbfa new\r\nb", b"new newer a\n")
    assert isinstance(data.tokenizer, WordTokenizer)
    assert data.tokenizer.words == ("<eos>", "a", "b", "c", "<unk>")
    assert data.train.tolist() == [2, 1, 1, 0, 3, 0, 0]
    assert data.valid.tolist() == [1, 4, 0, 2, 0]
    assert data.test.tolist() == [4, 4, 1, 0]
    assert data.splits is not None
    valid = data.splits["valid"]
    assert (valid.bytes, valid.characters, valid.words, valid.lines, valid.unknown_words) == (8, 8, 3, 2, 1)
    assert [data.splits[name].unknown_words for name in ("train", "test")] == [0, 2]
    assert (manifest.split, manifest.documents, manifest.bytes) == ("by files", 3, 9 + 8 + 12)
    assert [(record.byte_order_mark, record.crlf_lines) for record in manifest.inputs] == [
        (False, 0),
        (True, 1),
        (False, 0),
    ]
    notes = " | ".join(manifest.notes)
    for words in (
        "1 line end is \\r\\n: each is one line end",
        "<unk> is no word of the training text: it is in the vocabulary with frequency 0",
        "valid: 1 of 3 words are not in the vocabulary and became <unk>",
        "test: 2 of 3 words",
    ):
        assert words in notes
    content = json.loads((tmp_path / "out" / "P.json").read_text())
    assert content["notes"] == list(manifest.notes)
    with pytest.raises(UsageError, match=r"--split .*: has no effect: .* was split by files"):
        open_dataset(DataConfig(data_path=str(tmp_path / "out" / "P")), frozenset({"--split"}))


def test_notes_on_where_unknown_comes_from(tmp_path: Path) -> None:
    def notes(learner: WordLearner, text: bytes) -> str:
        return " | ".join(prepare(job(tmp_path, learner, text, split="1,0,0")).notes)

    assert "the vocabulary has no <unk>" in notes(WordLearner(), b"a b\n")
    assert "<unk> is a word of the training text itself, 2 times" in notes(WordLearner(), b"<unk> b <unk>\n")
    rare = notes(WordLearner(min_frequency=2), b"a a b\n")
    assert "there it stands for words that the vocabulary leaves out" in rare
    assert "train: 1 of 3 words are not in the vocabulary" in rare


@pytest.mark.parametrize("name", LEARNERS)
def test_same_bytes_at_any_chunk_size_and_splits_at_lines(tmp_path: Path, name: str) -> None:
    contents = set()
    for chunk_bytes in (17, 300, 2**16):
        manifest, data = made(tmp_path, LEARNERS[name], LICENSE, chunk_bytes=chunk_bytes, split="80,10,10")
        contents.add(b"".join(path.read_bytes() for path in sorted((tmp_path / "out").iterdir())))
    assert len(contents) == 1
    decoded = [data.tokenizer.decode(tokens) for tokens in (data.train, data.valid, data.test)]
    text = LICENSE.decode()
    if name == "word":
        text = "".join(" ".join(line.split()) + "\n" for line in text.split("\n")[:-1])
        # words of the other splits that training lacks
        assert [word for word in decoded[0].split() if word == "<unk>"] == []
        assert decoded[1].split().count("<unk>") == manifest.splits["valid"].unknown_words > 0
        assert len("".join(map(str, decoded)).split()) == len(text.split())
    else:
        assert "".join(map(str, decoded)) == text
    assert all(str(part).endswith("\n") for part in decoded)
    sizes = [manifest.splits[split].bytes for split in ("train", "valid", "test")]
    assert sum(sizes) == len(LICENSE)
    assert abs(sizes[0] - 0.8 * len(LICENSE)) < 80
    # the vocabulary is that of training alone
    again, _ = made(tmp_path, LEARNERS[name], LICENSE[: sizes[0]], LICENSE[sizes[0] :])
    assert again.tokenizer.fingerprint == manifest.tokenizer.fingerprint


@pytest.mark.parametrize("name", LEARNERS)
def test_progress_is_complete(tmp_path: Path, name: str) -> None:
    work = job(tmp_path, LEARNERS[name], LICENSE, b"valid text", b"test text\n")
    done: list[int] = []
    prepare(work, done.append)
    assert sum(done) == work.total_work() == 3 * (len(LICENSE) + 20)
    given = job(tmp_path, WordTokenizer(["a", "<eos>", "<unk>"]), LICENSE, split="1,0,0")
    done.clear()
    prepare(given, done.append)
    assert sum(done) == given.total_work() == 2 * len(LICENSE)


def test_bits_per_byte_of_the_original_text(tmp_path: Path) -> None:
    """The unigram cost of the same text by any tokenizer, over the same bytes."""
    costs = {}
    for name, learner in {**LEARNERS, "byte": ByteTokenizer(), "char": CharLearner()}.items():
        _, data = made(tmp_path, learner, LICENSE, split="1,0,0")
        assert data.splits is not None
        record = data.splits["train"]
        assert (record.bytes, record.words) == (len(LICENSE), len(LICENSE.split()))
        assert record.lines == LICENSE.count(b"\n")
        counts = np.bincount(data.train)
        nats = -sum(n * math.log(n / counts.sum()) for n in counts.tolist() if n)
        costs[name] = nats / math.log(2) / record.bytes
        assert record.unigram_entropy_bits == pytest.approx(costs[name] * record.bytes / record.tokens, rel=1e-12)
    assert costs["byte"] == costs["char"] > costs["bpe"] > costs["word"]


HARD = {
    "NUL": (b"one\ntwo \0\n\0", 2, 8, "NUL"),
    "0xFF": (b"one\n\xff two", 2, 4, "0xff"),
    "0xC0": (b"one\ntwo\n x \xc0", 3, 11, "0xc0"),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("kind", ["word", "unigram"])
def test_what_is_no_text_is_refused_by_file_line_and_offset(tmp_path: Path, name: str, kind: str) -> None:
    content, line, offset, words = HARD[name]
    with pytest.raises(UsageError, match=rf"valid\.txt: line {line}, byte offset {offset} .*{words}"):
        prepare(job(tmp_path, LEARNERS[kind], LICENSE, content))
    assert not (tmp_path / "out").exists()


FRESH = """
import sys
from megatron_allattn.config.data import DataConfig
from megatron_allattn.data.dataset import open_dataset
data = open_dataset(DataConfig(data_path=sys.argv[1]))
sys.stdout.buffer.write(data.tokenizer.decode(data.train).encode())
"""


def test_the_result_loads_in_a_fresh_process_and_gives_the_text_back(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbf" + LICENSE.replace(b"\n", b"\r\n") + "\u2581\t \u0085 \u2028\U0001f600  <s>\ufeff".encode()
    manifest, _ = made(tmp_path, LEARNERS["unigram"], text, split="1,0,0")
    (tmp_path / "corpus.txt").unlink()
    command = [sys.executable, "-c", FRESH, str(tmp_path / "out" / "P")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=True)
    assert done.stdout == text[3:]
    assert manifest.notes == (f"{LICENSE.count(10)} line ends are \\r\\n: the \\r stays in its line",)


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_too_large_a_vocabulary_leaves_nothing(tmp_path: Path, name: str) -> None:
    learner = SubwordLearner(vocab_size=32_000, model_type=LEARNERS[name].model_type)
    with pytest.raises(UsageError, match=r"--vocab-size 32000: the training text allows at most \d+ "):
        prepare(job(tmp_path, learner, LICENSE))
    assert not (tmp_path / "out").exists()


def test_a_model_that_lacks_bytes_counts_what_it_does_not_know(tmp_path: Path) -> None:
    model = tmp_path / "m"
    script = (
        "import sentencepiece, sys; sentencepiece.SentencePieceTrainer.train("
        "sentence_iterator=iter(sys.stdin), model_prefix=sys.argv[1], vocab_size=300, minloglevel=2)"
    )
    command = [sys.executable, "-c", script, str(model)]
    subprocess.run(command, input=LICENSE.decode(), text=True, check=True, timeout=120)
    theirs = SentencePieceTokenizer((tmp_path / "m.model").read_bytes(), "eos")
    manifest, data = made(tmp_path, theirs, LICENSE + "\n\u4e2d \u6587\n".encode(), split="1,0,0")
    assert manifest.splits["train"].unknown_words == int((data.train == 0).sum()) >= 2
    assert "the SentencePiece model changes text" in " ".join(manifest.notes)
    assert "tokens are not in the vocabulary and became <unk>" in manifest.notes[-1]
    with pytest.raises(
        UsageError, match=r"line 2, byte offset 2 starts a line of more than 1 MiB; use the byte or char"
    ):
        prepare(job(tmp_path, theirs, b"a\n" + b"x " * 600_000, split="1,0,0"))


@pytest.mark.parametrize("length", [2**20 + 5, 1_500_000, 3 * 2**20])
def test_a_word_over_a_mebibyte_is_refused(tmp_path: Path, length: int) -> None:
    text = b"one\ntwo three " + b"x" * length + b" four\n"
    with pytest.raises(
        UsageError, match=r"corpus\.txt: line 2, byte offset 14 starts a word of more than 1 MiB; use the byte"
    ):
        prepare(job(tmp_path, WordLearner(), text, split="1,0,0"))
    assert not (tmp_path / "out").exists()


def test_a_word_of_a_mebibyte_is_a_word(tmp_path: Path) -> None:
    word = b"\xc3\xa9" * 2**19
    _, data = made(tmp_path, WordLearner(), b"a " + word + b" a", split="1,0,0")
    assert data.train.tolist() == [0, 1, 0, 2]


LINE_CHILD = """
import resource, sys
from pathlib import Path
from megatron_allattn.data.corpora import files_corpus
from megatron_allattn.data.prepare import Preparation, prepare
from megatron_allattn.data.tokenizers import WordLearner
folder = Path(sys.argv[1])
job = Preparation(corpus=files_corpus([folder / "line"]), prefix=folder / "P", tokenizer=WordLearner(), split="1,0,0")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = prepare(job)
growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(growth, made.tokens, made.splits["train"].lines, made.tokenizer.vocab_size)
"""


def test_a_line_of_100_megabytes(tmp_path: Path) -> None:
    words = b"".join(bytes([97 + number]) * 999 + b" " for number in range(20))
    with (tmp_path / "line").open("wb") as file:
        for _ in range(100):
            file.write(words * 50)
    command = [sys.executable, "-c", LINE_CHILD, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    growth, tokens, lines, vocab_size = map(int, done.stdout.split())
    assert (tokens, lines, vocab_size) == (100_001, 1, 21)
    assert growth < 40_000  # KiB


def bare(folder: Path, tokens: list[int]) -> Path:
    with IndexedWriter(folder / "bare", "uint16") as writer:
        writer.add_sequence(np.array(tokens))
        writer.end_document()
    return folder / "bare"


def test_bare_files_of_words_and_pieces(tmp_path: Path) -> None:
    manifest, data = made(tmp_path, WordLearner(), b"b a a\nc\n", split="1,0,0")
    prefix = bare(tmp_path, data.train.tolist())
    settings = {"data_path": str(prefix), "split": "1,0,0"}
    model = tmp_path / "out" / "P.json"
    opened = open_dataset(DataConfig(tokenizer_type="word", tokenizer_model=model, **settings))
    assert opened.tokenizer.decode(opened.train) == "b a a\nc\n"
    assert opened.splits is None
    vocabulary = tmp_path / "vocabulary.json"
    vocabulary.write_text(json.dumps(manifest.tokenizer.to_json()))
    again = open_dataset(DataConfig(tokenizer_type="word", tokenizer_model=vocabulary, **settings))
    assert again.fingerprint == opened.fingerprint
    with pytest.raises(
        UsageError, match=r"describes a word tokenizer, --tokenizer-type is sentencepiece; give the FILE\.model"
    ):
        open_dataset(DataConfig(tokenizer_type="sentencepiece", tokenizer_model=vocabulary, **settings))
    with pytest.raises(UsageError, match=r"token 4 is 9, outside the word vocabulary of 4"):
        bare(tmp_path, [0, 1, 2, 3, 9])
        open_dataset(DataConfig(tokenizer_type="word", tokenizer_model=model, **settings))


def test_pipes_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "bare.idx"
    os.mkfifo(pipe)
    for flag in ("--input", "--valid-input", "--test-input"):
        with pytest.raises(UsageError, match=rf"{flag} .*bare\.idx: is not a regular file"):
            files_corpus([pipe], flag)
    with pytest.raises(UsageError, match=r"token file .*bare\.idx: is not a regular file"):
        open_dataset(DataConfig(data_path=str(tmp_path / "bare"), tokenizer_type="byte"))
    with pytest.raises(UsageError, match=r"--tokenizer-model .*bare\.idx: is not a regular file"):
        tokenizer_from_file(pipe)


def test_bare_file_of_pieces(tmp_path: Path) -> None:
    manifest, data = made(tmp_path, LEARNERS["unigram"], LICENSE, split="1,0,0")
    assert isinstance(manifest.tokenizer, SentencePieceTokenizer)
    model = tmp_path / "FILE.model"
    model.write_bytes(manifest.tokenizer.model)
    prefix = bare(tmp_path, data.train.tolist())
    settings: dict[str, Any] = {"tokenizer_type": "sentencepiece", "tokenizer_model": model, "split": "1,0,0"}
    opened = open_dataset(DataConfig(data_path=str(prefix), **settings))
    assert opened.tokenizer.decode(opened.train) == LICENSE.decode()
    # the flag may repeat what prepared data says of itself
    assert (
        open_dataset(DataConfig(data_path=str(tmp_path / "out" / "P"), tokenizer_model=model)).tokenizer.vocab_size
        == 500
    )
    with pytest.raises(UsageError, match=r"add --tokenizer-model with the FILE\.model"):
        open_dataset(DataConfig(data_path=str(prefix), tokenizer_type="sentencepiece"))
