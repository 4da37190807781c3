"""SentencePiece: learned deterministically, lossless, in pieces as in one, and its refusals in one line."""

import io
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data import subwords
from megatron_allattn.data.interface import Newline
from megatron_allattn.data.subwords import (
    WINDOW_BYTES,
    ModelType,
    SentencePieceTokenizer,
    SubwordLearner,
    window_end,
)
from megatron_allattn.data.tokenizers import tokenizer_from_file, tokenizer_from_json
from tests.support.commands import english

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "LICENSE").read_text() + "caf\u00e9 and na\u00efve\n" * 9
MODELS: list[ModelType] = ["unigram", "bpe"]


def learn(text: str = TEXT, vocab_size: int = 600, **settings: Any) -> SentencePieceTokenizer:
    learner = SubwordLearner(vocab_size=vocab_size, **settings)
    pieces = learner.cutter.pieces(iter([text.encode()]))
    return learner.learn(pieces, iter([]), text.count("\n"))


@pytest.fixture(scope="module", params=MODELS)
def tokenizer(request: pytest.FixtureRequest) -> SentencePieceTokenizer:
    return learn(model_type=request.param)


def foreign(**settings: Any) -> SentencePieceTokenizer:
    """A model as others make them: SentencePiece's own defaults."""
    model = io.BytesIO()
    values = {"vocab_size": 120, "hard_vocab_limit": False, "minloglevel": 2, **settings}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT.split("\n")), model_writer=model, **values)
    return SentencePieceTokenizer(model.getvalue(), settings.get("newline", "drop"), "their.model")


TRAPS = [
    "",
    "\n",
    "\n\n a\n",
    "  two  spaces   three ",
    "tab\tand\ttab\t",
    "\u2581 \u2581\u2581x\u2581",  # SentencePiece's own mark for a space
    "\u2585",  # and for unknown
    "<s> </s> <unk> <pad> <0x0A> <0x41> <eos>",
    "\r\n CR\r LF\r\n",
    "e\u0301 \u00e9 \ufb01 \u3000 \u00a0 \u0085 \u2028 \u2029 \ufeff",
    "\x00\x01\x07\x1b[0m\x7f",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0010ffff",
    "\u4e2d\u6587 \u0627\u0644",
    "\u2047 ??",
]


@pytest.mark.parametrize("newline", ["symbol", "eos"])
def test_everything_comes_back(tokenizer: SentencePieceTokenizer, newline: Newline) -> None:
    if newline == "eos":
        tokenizer = learn(vocab_size=500, newline="eos")
    generator = random.Random(11)
    alphabet = [
        *"ab \t\n\r",
        *"the ",
        "  ",
        "\u2581",
        "\u2585",
        "<s>",
        "</s>",
        "<0x0A>",
        "\0",
        "\x1f",
        "\u0301",
        "\u00e9",
    ]
    alphabet += [
        "\U0001f600",
        "\ufffd",
        "\ufeff",
        "\u2028",
        "\u0085",
        *(chr(generator.randrange(0xD800)) for _ in range(9)),
    ]
    fuzz = ["".join(generator.choices(alphabet, k=generator.randrange(60))) for _ in range(400)]
    for text in [*TRAPS, *fuzz, TEXT]:
        ids = tokenizer.encode(text.encode())
        assert tokenizer.decode(ids) == text
        assert not (ids == tokenizer.unknown_id).any()
        assert int((ids == tokenizer.newline_id).sum()) == text.count("\n")
    assert tokenizer.lossless


def test_dropped_line_ends() -> None:
    tokenizer = learn(newline="drop")
    assert tokenizer.decode(tokenizer.encode(b"the \n\nat\n")) == "the at"
    assert (tokenizer.newline_id, tokenizer.lossless) == (None, True)


def test_ids_of_lines_are_sentencepieces_own(tokenizer: SentencePieceTokenizer) -> None:
    model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    expected = []
    for line in TEXT.split("\n"):
        expected += [*model.encode(line), model.piece_to_id("<0x0A>")]
    assert tokenizer.encode(TEXT.encode()).tolist() == expected[:-1]
    assert (tokenizer.name, tokenizer.unit, tokenizer.vocab_size) == ("sentencepiece", "token", 600)


def test_a_long_line_has_the_ids_of_the_whole_at_any_chunk_size(
    tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = english(60, 5) + "   spaces " + english(60, 6)
    whole = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).encode(line)
    assert WINDOW_BYTES == 65536
    for window in (16, 50, 100):
        monkeypatch.setattr(subwords, "WINDOW_BYTES", window)
        assert tokenizer.encode(line.encode()).tolist() == whole
        for size in (1, 7, 64, 1000):
            chunks = (line[start : start + size].encode() for start in range(0, len(line), size))
            parts = list(tokenizer.cutter.pieces(chunks))
            assert max(map(len, parts)) <= max(window, size + window)
            assert [i for part in parts for i in tokenizer.encode(part)] == whole


def test_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subwords, "WINDOW_BYTES", 8)

    def windows(text: str) -> Iterator[str]:
        line, start = text.encode(), 0
        while start < len(line):
            end = window_end(line, start)
            yield line[start:end].decode()
            start = end

    assert list(windows("ab cd ef gh")) == ["ab cd ef", " gh"]
    assert list(windows("ab   cdefgh")) == ["ab", "   cdefg", "h"]  # cut before the run of spaces, else after 8 bytes
    assert list(windows("abcdefgh ij")) == ["abcdefgh", " ij"]
    assert list(windows("abcd\u20ac\u20ac\u20ac")) == ["abcd\u20ac", "\u20ac\u20ac"]  # between characters
    assert list(windows(" " * 20)) == [" " * 8, " " * 8, " " * 4]
    assert list(windows("12345678")) == ["12345678"]


def test_a_stretch_without_spaces_is_cut_and_comes_back() -> None:
    tokenizer = learn()
    text = "caf\u00e9" * 30_000 + "\n" + "x" * 70_000
    parts = list(tokenizer.cutter.pieces(iter([text.encode()])))
    assert b"".join(parts) == text.encode()
    ids = tokenizer.encode(text.encode())
    assert [i for part in parts for i in tokenizer.encode(part)] == ids.tolist()
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("model_type", MODELS)
def test_same_text_same_model_in_any_process(model_type: ModelType) -> None:
    script = (
        "import sys; from megatron_allattn.data.subwords import SubwordLearner\n"
        f"learner = SubwordLearner(vocab_size=600, model_type={model_type!r})\n"
        "print(learner.learn(iter([sys.stdin.buffer.read()]), iter([]), 1).fingerprint)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, input=TEXT.encode(), capture_output=True, check=True, timeout=120)
    assert done.stdout.decode().strip() == learn(model_type=model_type).fingerprint


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("text", [TEXT, "one single line\n"])
def test_too_large_a_vocabulary_names_the_largest(model_type: ModelType, text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        learn(text, 32_000, model_type=model_type)
    message = str(refusal.value)
    assert message.startswith("--vocab-size 32000: the training text allows at most ")
    largest = int(message.split("at most ")[1].split()[0])
    assert f"give --vocab-size {largest} or less" in message
    assert learn(text, largest, model_type=model_type).vocab_size == largest
    with pytest.raises(UsageError, match=f"--vocab-size {largest + 1}: .*at most {largest} "):
        learn(text, largest + 1, model_type=model_type)


@pytest.mark.parametrize("model_type", MODELS)
def test_too_small_a_vocabulary_and_no_text(model_type: ModelType) -> None:
    with pytest.raises(UsageError, match=r"--vocab-size 258: .*needs at least (\d+) pieces") as refusal:
        learn(vocab_size=258, model_type=model_type)
    least = int(str(refusal.value).split("at least ")[1].split()[0])
    assert learn(vocab_size=least, model_type=model_type).vocab_size == least
    for text in ("", "\n\n", "\t\n"):
        with pytest.raises(UsageError, match="holds nothing to learn pieces of"):
            learn(text, model_type=model_type)


def test_a_trainer_that_dies_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "subword_trainer.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    monkeypatch.setattr(subwords, "__file__", str(tmp_path / "subwords.py"))
    with pytest.raises(UsageError, match=r"SentencePiece unigram: its trainer failed \(ended by signal 6\)"):
        learn()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subwords.tempfile, "TemporaryFile", partial(open, "/dev/full", "w+b"))
    monkeypatch.setattr(subwords.tempfile, "gettempdir", lambda: "/small")
    with pytest.raises(OSError, match="No space left") as refusal:
        learn()
    assert refusal.value.filename == "temporary files in /small (TMPDIR)"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pad_id": 0, "eos_id": 1}, r"--pad-id 0: is the id of --unk-id too; move one of --unk-id and --pad-id"),
        ({"bos_id": 1, "eos_id": 1}, r"--eos-id 1: is the id of --bos-id too"),
        ({"bos_id": 1, "newline": "eos"}, r"--eos-id 1: is the id of --bos-id too"),
        ({"eos_id": 600}, r"--eos-id 600: is not an id of a vocabulary of 600; give 0 to 599, or -1"),
        ({"bos_id": -2}, r"--bos-id -2: "),
        ({"unk_id": -1}, r"--unk-id -1: "),
        ({"eos_id": -1, "newline": "eos"}, r"--eos-id -1: the newline rule eos needs it"),
        ({"vocab_size": 0}, r"--vocab-size 0"),
        ({"sentences": 0}, r"--sentencepiece-sentences 0"),
        ({"model_type": "word"}, r"--sentencepiece-model-type word: is not one of unigram, bpe"),
    ],
)
def test_settings_that_clash(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SubwordLearner(**{"vocab_size": 600, **settings})


def test_special_ids_are_as_asked() -> None:
    model = sentencepiece.SentencePieceProcessor(model_proto=learn(unk_id=3, bos_id=0, eos_id=1, pad_id=2).model)
    assert (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()) == (3, 0, 1, 2)
    eos = learn(newline="eos")
    assert eos.newline_id == 1
    assert eos.encode(b"\n").tolist() == [1]


def test_an_id_outside_is_named(tokenizer: SentencePieceTokenizer) -> None:
    for bad in (600, 10**6, -1):
        with pytest.raises(UsageError, match=rf"token id {bad}: is not in the sentencepiece .* vocabulary of 600"):
            tokenizer.decode([1, bad])


def test_sampled_lines_are_spread_and_reproducible() -> None:
    text = "".join(f"{number:03d}\n" for number in range(100))
    learner = SubwordLearner(vocab_size=300, sentences=10)
    for size in (400, 7):
        pieces = (text[start : start + size].encode() for start in range(0, len(text), size))
        counts = learner._count_words(learner.cutter.pieces(pieces), 100)
        assert sorted(counts) == [f"{number:03d}" for number in range(9, 100, 10)]
    assert len(SubwordLearner(vocab_size=300, sentences=100)._count_words(iter([text.encode()]), 100)) == 100


def test_words_are_counted_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = SubwordLearner(vocab_size=300)
    text = f"a a  b{' ' * 200}c\t\u2581d {'x' * 2500}\n a"
    counts = learner._count_words(iter([text.encode()]), 2)
    assert sum(len(word) * count for word, count in counts.items()) == len(text) - 3  # all but tab, mark, line end
    assert max(len(word.encode()) for word in counts) <= 4192  # beyond it the trainer leaves a word out
    assert counts["a"] == 1
    assert counts[" a"] == 2
    monkeypatch.setattr(subwords, "MOST_WORDS", 3)
    pieces = iter([b"x y y y z", b" u v y"])
    assert dict(learner._count_words(pieces, 1)) == {" y": 4}  # at the end of a piece, words seen once were forgotten


def test_counts_are_thinned_without_favour(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"the": 90_000, **{f"w{number:04d}": 1 + number % 2 for number in range(4000)}}
    assert subwords.thinned(counts) is counts
    total = sum(len(word) * count for word, count in counts.items())
    monkeypatch.setattr(subwords, "MOST_CHARACTERS", total // 3)
    smaller = subwords.thinned(counts)
    assert sum(len(word) * count for word, count in smaller.items()) == pytest.approx(total / 3, rel=0.02)
    assert smaller["the"] == pytest.approx(30_000, abs=1)
    once = sum(smaller.get(f"w{number:04d}", 0) for number in range(0, 4000, 2))
    assert once == pytest.approx(2000 / 3, rel=0.1)
    assert subwords.thinned(counts) == smaller


def test_models_made_elsewhere() -> None:
    theirs = foreign()
    assert not theirs.lossless
    # a dummy prefix and stripped spaces: whole lines only
    assert theirs.cutter is subwords.BETWEEN_LINES
    line = english(9, 1)
    assert theirs.decode(theirs.encode(line.encode())) == line
    ids, unknown = theirs.encode_counting("the \U0001f600\u4e2d the".encode())
    assert unknown == 1
    assert "\u2047" in theirs.decode(ids)
    with pytest.raises(UsageError, match=r"their\.model: has no piece for a line end.*--newline eos or drop"):
        SentencePieceTokenizer(theirs.model, "symbol", "their.model")
    assert SentencePieceTokenizer(theirs.model, "eos").newline_id == 2
    no_eos = foreign(eos_id=-1)
    with pytest.raises(UsageError, match=r"m: has no end-of-sentence piece"):
        SentencePieceTokenizer(no_eos.model, "eos", "m")
    # pieces that span words must not be cut at spaces
    spanning = foreign(
        vocab_size=900,
        split_by_whitespace=False,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        model_type="bpe",
    )
    assert spanning.cutter is subwords.BETWEEN_LINES
    llama = foreign(
        byte_fallback=True, vocab_size=600, normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    with_newlines = SentencePieceTokenizer(llama.model, "symbol")
    text = "the cat\n\n  indented\nlast"
    assert with_newlines.decode(with_newlines.encode(text.encode())) == text


def test_json_and_files(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    description = json.loads(json.dumps(tokenizer.to_json()))
    again = tokenizer_from_json(description, "x.json")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode(b"the\n").tolist() == tokenizer.encode(b"the\n").tolist()
    path = tmp_path / "FILE.model"
    path.write_bytes(tokenizer.model)
    assert tokenizer_from_file(path).fingerprint == tokenizer.fingerprint
    assert tokenizer_from_file(path, "drop").newline == "drop"
    path.write_bytes(tokenizer.model[:1000])
    with pytest.raises(UsageError, match=r"--tokenizer-model .*FILE\.model: is not a SentencePiece model"):
        tokenizer_from_file(path)
    with pytest.raises(UsageError, match=r"x\.json: does not describe"):
        tokenizer_from_json({**description, "model": "!!"}, "x.json")


def test_without_the_package_only_these_tokenizers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UsageError, match="--tokenizer-type sentencepiece: needs the Python package sentencepiece"):
        learn()
