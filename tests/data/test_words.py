"""Words: ids by frequency, <unk> and <eos> by stated rules, text back with single spaces."""

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data.interface import Newline
from megatron_allattn.data.tokenizers import WordLearner, WordTokenizer, tokenizer_from_json

TEXT = "b a a\n\nc b a\n"


def learn(training: str, held_out: str = "", newline: Newline = "eos", min_frequency: int = 1) -> WordTokenizer:
    learner = WordLearner(newline=newline, min_frequency=min_frequency)
    return learner.learn(iter([training.encode()]), iter([held_out.encode()]), training.count("\n"))


def test_by_frequency_then_by_first_appearance() -> None:
    assert learn(TEXT).words == ("a", "<eos>", "b", "c")  # 3, 3, 2, 1; a comes before the first line end
    assert learn(TEXT, newline="symbol").words == ("a", "\n", "b", "c")
    assert learn(TEXT, newline="drop").words == ("a", "b", "c")
    assert learn("x y\nx z y z").words == ("x", "y", "z", "<eos>")
    assert learn("x", newline="symbol").words == ("x", "\n")  # there is one even if no line ends in training


def test_ids_follow_a_plain_count() -> None:
    generator = random.Random(3)
    words = [f"w{min(generator.randrange(60), generator.randrange(60))}" for _ in range(4000)]
    lines = [words[start : start + 7] for start in range(0, len(words), 7)]
    tokenizer = learn("".join(" ".join(line) + "\n" for line in lines))
    flat = [word for line in lines for word in (*line, "<eos>")]
    assert list(tokenizer.words) == [word for word, _ in Counter(flat).most_common()]
    text = "".join("\t ".join(line) + " \n" for line in lines)
    assert tokenizer.encode(text.encode()).tolist() == [tokenizer.words.index(word) for word in flat]


@pytest.mark.parametrize(
    ("newline", "ids", "text"),
    [
        ("eos", [2, 0, 0, 1, 1, 3], "b a a\n\nc"),
        ("symbol", [2, 0, 0, 1, 1, 3], "b a a\n\nc"),
        ("drop", [1, 0, 0, 2], "b a a c"),
    ],
)
def test_there_and_back(newline: Newline, ids: list[int], text: str) -> None:
    tokenizer = learn(TEXT, newline=newline)
    assert tokenizer.encode(b"b  a\ta \r\n\r\n c").tolist() == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(b"").tolist() == []
    assert tokenizer.decode([]) == ""
    assert tokenizer.newline_id == {"eos": 1, "symbol": 1, "drop": None}[newline]


def test_only_line_feeds_end_lines_and_white_space_is_pythons() -> None:
    tokenizer = learn("a\u0085b\u2028c\rd\u00a0e\x1cf\v g\r\nh")
    assert tokenizer.words == ("a", "b", "c", "d", "e", "f", "g", "<eos>", "h")
    assert tokenizer.encode(b"a\r\nb").tolist() == [tokenizer.words.index(word) for word in ("a", "<eos>", "b")]
    assert len(tokenizer.encode("a\u0085b\u2028c".encode())) == 3


def test_unknown_words() -> None:
    # none needed
    tokenizer = learn(TEXT, "a c b")
    assert (tokenizer.words, tokenizer.unknown_id) == (("a", "<eos>", "b", "c"), None)
    with pytest.raises(UsageError, match=r"prompt: the word 'zzz' is not in the vocabulary of 4, which has no <unk>"):
        tokenizer.encode(b"a zzz", source="prompt")
    # added, last, because another split needs it
    tokenizer = learn(TEXT, "a new b")
    assert (tokenizer.words, tokenizer.unknown_id) == (("a", "<eos>", "b", "c", "<unk>"), 4)
    ids, unknown = tokenizer.encode_counting(b"new a <unk> other")
    assert (ids.tolist(), unknown) == ([4, 0, 4, 4], 2)  # <unk> written in the text is no unknown word
    assert tokenizer.decode(ids) == "<unk> a <unk> <unk>"
    # the text's own
    assert learn("<unk> a <unk>\n", "b").words == ("<unk>", "a", "<eos>")


def test_rare_words_become_unknown() -> None:
    tokenizer = learn("a a a b b c d e\n", min_frequency=2)
    assert tokenizer.words == ("a", "<unk>", "b", "<eos>")  # 3, 3 (c d e, added last), 2, and line ends are no words
    assert tokenizer.encode_counting(b"c a\n")[1] == 1
    assert learn("a a a\n", min_frequency=2).words == ("a", "<eos>")
    assert learn("<unk> a a b c\n", min_frequency=2).words == ("<unk>", "a", "<eos>")
    with pytest.raises(UsageError, match="no word occurs at least 5 times"):
        learn("a a b\n", min_frequency=5)
    with pytest.raises(UsageError, match="it has no words; give text that has"):
        learn(" \n\n")
    with pytest.raises(UsageError, match="--min-frequency 0"):
        WordLearner(min_frequency=0)


def test_eos_written_in_the_text_is_not_taken_for_a_line_end() -> None:
    with pytest.raises(UsageError, match=r"--newline eos: .*the word <eos>.*; use --newline drop or symbol"):
        learn("a <eos> b\n")
    assert "<eos>" in learn("a <eos>\n", newline="drop").words
    tokenizer = learn("a b\n", "<eos>")
    assert tokenizer.encode_counting(b"a <eos>\n")[0].tolist() == [0, tokenizer.unknown_id, tokenizer.newline_id]


def test_json_and_bad_ids() -> None:
    tokenizer = learn(TEXT, "new")
    description = json.loads(json.dumps(tokenizer.to_json()))
    again = tokenizer_from_json(description, "x.json")
    assert (again.fingerprint, again.newline_id, again.vocab_size) == (tokenizer.fingerprint, 1, 5)
    assert (again.name, again.unit) == ("word", "token")
    others = [learn(TEXT, "new", newline="symbol"), learn(TEXT)]
    assert len({tokenizer.fingerprint, *(other.fingerprint for other in others)}) == 3
    for bad in (5, -1):
        with pytest.raises(UsageError, match=rf"token id {bad}: is not in the word tokenizer's vocabulary of 5"):
            tokenizer.decode([0, bad])
    assert tokenizer.encode(b"a").dtype == np.uint8
    with pytest.raises(UsageError, match="NUL"):
        tokenizer.encode(b"a\0")


@pytest.mark.parametrize(
    ("words", "newline", "message"),
    [
        (["a", "a", "<eos>"], "eos", "'a' stands in it twice"),
        (["a"], "eos", "lacks '<eos>'"),
        (["a"], "symbol", r"lacks '\\n'"),
        (["a b", "<eos>"], "eos", "entry 0: is 'a b'"),
        (["a", "b", " c", "<eos>"], "eos", "entry 2: is ' c'"),
        (["a", "b\0c"], "drop", r"entry 1: is 'b\\x00c'"),
        (["", "<eos>"], "eos", "entry 0"),
        (["\n", "<eos>"], "eos", "entry 0"),
        (["a", 1], "drop", "entry 1: is 1"),
        (["a"], "none", "is not a newline rule; choose eos, symbol, drop"),
    ],
)
def test_bad_vocabularies(words: list[Any], newline: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WordTokenizer(words, newline)
