"""Tokenizers: exact ids both ways, and errors that name the id or character at fault."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data.tokenizers import (
    ByteTokenizer,
    CharLearner,
    CharTokenizer,
    NullTokenizer,
    Tokenizer,
    WordTokenizer,
    difference,
    tokenizer_from_file,
    tokenizer_from_json,
)

TOKENIZERS: list[Tokenizer] = [ByteTokenizer(), CharTokenizer(["\n", "a", "é", "😀"]), NullTokenizer(300)]


def test_bytes() -> None:
    byte = ByteTokenizer()
    assert byte.encode("aé".encode()).tolist() == [97, 0xC3, 0xA9]
    assert byte.decode([97, 0xC3, 0xA9]) == "aé".encode()
    assert byte.decode(byte.encode(bytes(range(256)))) == bytes(range(256))
    assert (byte.name, byte.unit, byte.vocab_size) == ("byte", "byte", 256)


def test_characters() -> None:
    char = CharTokenizer(["\n", "a", "é", "😀"])
    ids = char.encode("😀a\né".encode())
    assert ids.tolist() == [3, 1, 0, 2]
    assert ids.dtype == np.uint8
    assert char.decode(ids) == "😀a\né"
    assert (char.name, char.unit, char.vocab_size) == ("char", "char", 4)
    assert char.encode(b"").tolist() == []


def test_large_character_vocabularies_need_wider_ids() -> None:
    char = CharTokenizer([chr(0x4E00 + i) for i in range(300)])
    ids = char.encode(f"{chr(0x4E00 + 299)}{chr(0x4E00)}".encode())
    assert (ids.tolist(), ids.dtype) == ([299, 0], np.uint16)


def test_character_vocabulary_of_a_text_is_sorted() -> None:
    learned = CharLearner().learn(iter(["zé\n".encode()]), iter(["€a😀z".encode()]), 2)
    assert learned.characters == ("\n", "a", "z", "é", "€", "😀")


def test_ids_as_text() -> None:
    null = NullTokenizer(300)
    ids = null.encode(b"0 299\n 17\t5")
    assert (ids.tolist(), ids.dtype) == ([0, 299, 17, 5], np.uint16)
    assert null.decode(ids) == "0 299 17 5"
    assert (null.name, null.unit, null.vocab_size) == ("null", "token", 300)
    with pytest.raises(UsageError, match=r"token id 300: .*vocabulary of 300"):
        null.encode(b"1 300")
    for text in (b"1 -2", b"x", b"1.5", b"9" * 30):
        with pytest.raises(UsageError, match="not a token id"):
            null.encode(text)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: tokenizer.name)
def test_a_bad_id_is_named_with_the_vocabulary_size(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    for bad in (size, size + 7, -1):
        with pytest.raises(UsageError, match=rf"token id {bad}: .*vocabulary of {size}"):
            tokenizer.decode(np.array([0, bad, 1]))
    with pytest.raises(TypeError, match="float64"):
        tokenizer.decode([0.5])
    assert len(tokenizer.decode([])) == 0


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: tokenizer.name)
def test_json_round_trip(tokenizer: Tokenizer) -> None:
    again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())), "x.json")
    assert type(again) is type(tokenizer)
    assert again.to_json() == tokenizer.to_json()
    assert again.fingerprint == tokenizer.fingerprint


def test_fingerprints() -> None:
    canonical = b'{"type":"byte","vocab_size":256}'
    assert ByteTokenizer().fingerprint == hashlib.sha256(canonical).hexdigest()
    different = [*TOKENIZERS, NullTokenizer(256), CharTokenizer(["a", "\n", "é", "😀"])]
    assert len({tokenizer.fingerprint for tokenizer in different}) == 5


def test_unknown_character_is_named_with_file_and_offset() -> None:
    char = CharTokenizer(["a", "é"])
    with pytest.raises(UsageError) as refusal:
        char.encode("éaéxa".encode(), source="book.txt", offset=1000)
    message = str(refusal.value)
    for word in ("book.txt", "'x'", "U+0078", "offset 1005", "vocabulary of 2"):
        assert word in message
    with pytest.raises(UsageError, match=r"U\+1F600 GRINNING FACE.*offset 0 "):
        char.encode("😀".encode())


@pytest.mark.parametrize(
    ("characters", "words"),
    [
        ([], "empty"),
        (["a", "bc"], "entry 1.*'bc'"),
        (["a", ""], "entry 1"),
        (["a", "b", "a"], "'a' .*twice"),
        ([1], "1"),
    ],
)
def test_bad_character_lists(characters: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CharTokenizer(characters)


@pytest.mark.parametrize(
    "content",
    [
        {"type": "byte", "vocab_size": 255},
        {"type": "byte"},
        {"type": "char", "characters": "abc"},
        {"type": "char", "characters": ["a"], "more": 1},
        {"type": "null", "vocab_size": "5"},
        {"type": "word"},
        ["a", "b"],
        None,
    ],
)
def test_descriptions_that_are_none(content: object) -> None:
    with pytest.raises(UsageError, match=r"some\.json.*does not describe"):
        tokenizer_from_json(content, "some.json")


def test_model_file_is_a_tokenizer_or_a_manifest(tmp_path: Path) -> None:
    char = CharTokenizer(["b", "a"])
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(char.to_json()))
    assert tokenizer_from_file(path).fingerprint == char.fingerprint
    path.write_text(json.dumps({"format": "x", "tokenizer": char.to_json()}))
    assert tokenizer_from_file(path).fingerprint == char.fingerprint
    path.write_bytes(b"\xff\x00")
    with pytest.raises(UsageError, match=r"--tokenizer-model .*vocab\.json: is not JSON"):
        tokenizer_from_file(path)
    with pytest.raises(UsageError, match=r"none\.json: cannot be read \(No such file"):
        tokenizer_from_file(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (ByteTokenizer(), ByteTokenizer(), ""),
        (ByteTokenizer(), ByteTokenizer(newline="eos"), "newline rule symbol, not eos"),
        (ByteTokenizer([97, 98]), CharTokenizer(["a", "b", "c"]), "kind byte, not char; vocabulary size 2, not 3"),
        (CharTokenizer(["a", "b", "c"]), CharTokenizer(["a", "c", "b"]), "id 1 is 'b', not 'c'"),
        (ByteTokenizer(), ByteTokenizer(range(256)), "every id has the same text, but they are described differently"),
        (
            WordTokenizer(["the", "cat"], "drop"),
            WordTokenizer(["the", "<eos>", "mat"]),
            "vocabulary size 2, not 3; newline rule drop, not eos; id 1 is 'cat', not '\\n'",
        ),
    ],
)
def test_difference_in_words(one: Tokenizer, other: Tokenizer, words: str) -> None:
    assert difference(one, other) == words
