"""Vocabularies of the paper's code: the ids of its prepared files are those of the tokenizer on the original text."""

import json
from pathlib import Path

import pytest

from megatron_allattn.config import UsageError
from megatron_allattn.data.code_vocabulary import tokenizer_of
from tests.support.template import ROOT


def code_ids(prepared: str, vocabulary: list[str]) -> list[int]:
    """How that code reads a prepared file: what stands between white space, and `<eos>` after every line."""
    return [vocabulary.index(word) for line in prepared.splitlines() for word in [*line.split(), "<eos>"]]


@pytest.mark.parametrize(
    ("text", "prepared", "kind", "unit"),
    [
        (b"ab\n\nb\xff\n", "97 98\n\n98 255\n", "byte", "byte"),
        ("a_b\n ä\n".replace("_", " ").encode(), "a _ b\n_ ä\n", "char", "char"),
        (b"the cat  the\n\nmat\n", " the cat  the \n\n mat \n", "word", "token"),
    ],
)
def test_ids_are_those_of_that_code(text: bytes, prepared: str, kind: str, unit: str) -> None:
    vocabulary = list(dict.fromkeys(word for line in prepared.splitlines() for word in [*line.split(), "<eos>"]))
    tokenizer = tokenizer_of(vocabulary)
    assert (tokenizer.name, tokenizer.unit, tokenizer.vocab_size) == (kind, unit, len(vocabulary))
    assert tokenizer.encode(text).tolist() == code_ids(prepared, vocabulary)
    assert (tokenizer.newline, tokenizer.newline_id) == ("eos", vocabulary.index("<eos>"))


def test_the_recorded_vocabularies() -> None:
    kinds = []
    for name in ("char", "word"):
        path = ROOT / "tests/data/reference" / f"adaptive_span_{name}.json"
        vocabulary = json.loads(path.read_bytes())["vocabulary"]
        tokenizer = tokenizer_of(vocabulary)
        kinds.append((tokenizer.name, tokenizer.vocab_size, tokenizer.newline_id))
    assert kinds == [("char", 61, 11), ("word", 4716, 7)]
    assert tokenizer.encode(b"the <unk> , .\nof never-seen-word").tolist() == [0, 1, 2, 3, 7, 4, 1]


def test_without_line_ends() -> None:
    tokenizer = tokenizer_of(["_", "a", "b"])
    assert (tokenizer.newline, tokenizer.encode(b"a b\na").tolist()) == ("drop", [1, 0, 2, 1])


def test_a_token_twice_is_an_error(tmp_path: Path) -> None:
    for vocabulary in (["a", "b", "a"], ["1", "<eos>", "1"], ["the", "cat", "the"]):
        with pytest.raises(UsageError, match="stands in it twice"):
            tokenizer_of(vocabulary)


def test_a_space_twice_is_explained() -> None:
    with pytest.raises(UsageError, match=r"has both _ and ' ', and _ is read as ' '.*; leave one .* P.json"):
        tokenizer_of(["a", "_", " ", "<eos>"])
    with pytest.raises(UsageError, match=r"has both <eos> and '\\n'"):
        tokenizer_of(["a", "\n", "<eos>"])
