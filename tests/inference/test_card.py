"""The numbers on the card, worked out by hand from nats and counts, and the sentences around them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_allattn.config import ModelConfig, RunConfig
from megatron_allattn.data.dataset import Dataset
from megatron_allattn.data.manifest import SplitRecord
from megatron_allattn.data.tokenizers import ByteTokenizer, CharTokenizer, NullTokenizer, Tokenizer, WordTokenizer
from megatron_allattn.inference.card import Card, card_text, evaluation_card
from megatron_allattn.inference.model import LoadedModel
from megatron_allattn.inference.scoring import CodeProtocol, Score
from megatron_allattn.training.resume import UNKNOWN_TOKENS

LN2 = math.log(2)
SETTINGS = {"precision": "float32", "block_length": 32, "overlap": True}
STATE = {"step": 1200, "data": {}, "tokenizer": {"type": "byte", "vocab_size": 256}}
CODE = CodeProtocol(mean_nats=2 * LN2, predictions=512, dropped=7, num_streams=8, block_length=64)
TEXT = SplitRecord(
    tokens=80,
    documents=1,
    unigram_entropy_bits=1.0,
    bytes=121,
    characters=101,
    words=20,
    lines=5,
    unknown_words=0,
)


def card(
    tokenizer: Tokenizer,
    tokens: list[int],
    nats: list[float],
    text: SplitRecord | None = TEXT,
    code: CodeProtocol | str = CODE,
    settings: Card = SETTINGS,
    lost: int = 0,
    state: Mapping[str, Any] = MappingProxyType({}),
    **model: Any,
) -> Card:
    """The card of `tokens` whose predictions, from the second on, cost `nats`."""
    ids = np.array(tokens)
    size = tokenizer.vocab_size
    score = Score(
        nats_by_id=np.bincount(ids[1:], nats, size),
        count_by_id=np.bincount(ids[1:], minlength=size),
        num_streams=4,
        overlap=300,
        lost_context=lost,
        nats=None,
    )
    dataset = Dataset(
        train=ids[:0],
        valid=ids,
        test=ids[:0],
        tokenizer=tokenizer,
        unigram_entropy=1.0,
        description="P: a vocabulary",
        fingerprint="ab" * 32,
        splits={"valid": text} if text is not None else None,
    )
    run = RunConfig(model=ModelConfig(**model), recipe="demo")
    loaded = LoadedModel(
        SimpleNamespace(), run, {**STATE, **state}, Path("R/checkpoints/step_00001200"), ["passed over X"]
    )
    return evaluation_card(loaded, dataset, "valid", score, code, settings)


def test_bytes() -> None:
    """80 predictions of 2.5 bits: 200 bits for 120 bytes and 100 characters, one of each being context only."""
    found = card(ByteTokenizer(), [65] * 81, [2.5 * LN2] * 80)
    assert found["predictions"] == 80 and found["tokens"] == 81
    assert found["total_nats"] == pytest.approx(200 * LN2)
    assert found["nats_per_token"] == pytest.approx(2.5 * LN2)
    assert found["bits_per_token"] == pytest.approx(2.5)
    assert found["bits_per_byte"] == pytest.approx(200 / 120)
    assert found["bits_per_character"] == pytest.approx(200 / 100)
    assert found["word_perplexity"] == {
        "of": "original text",
        "with_line_ends": pytest.approx(2 ** (200 / 25)),
        "without_line_ends": pytest.approx(2 ** (200 / 20)),
        "missing": {},
    }


@pytest.mark.parametrize(
    ("tokenizer", "first", "size"),
    [
        (ByteTokenizer(), "é".encode()[0], (1, 1)),
        (ByteTokenizer(), "é".encode()[1], (1, 0)),
        (CharTokenizer(["a", "é", "€"]), 1, (2, 1)),
        (CharTokenizer(["a", "é", "€"]), 2, (3, 1)),
        (WordTokenizer(["the", "naïve", "<eos>"]), 1, (6, 5)),
    ],
)
def test_the_first_tokens_text_is_not_counted(tokenizer: Tokenizer, first: int, size: tuple[int, int]) -> None:
    found = card(tokenizer, [first] + [0] * 80, [2.5 * LN2] * 80)
    assert found["predicted_text"] == {"characters": 101 - size[1], "bytes": 121 - size[0]}
    assert found["bits_per_byte"] == pytest.approx(200 / (121 - size[0]))
    assert found["bits_per_character"] == pytest.approx(200 / (101 - size[1]))


def test_words_with_and_without_line_ends() -> None:
    """Six words of 3 bits and two ends of 1 bit: 20 bits on 8 tokens, 18 on 6 words."""
    tokenizer = WordTokenizer(["the", "cat", "<eos>"])
    assert tokenizer.newline_id == 2
    found = card(tokenizer, [0, 1, 0, 1, 2, 1, 0, 1, 2], [3 * LN2] * 3 + [LN2] + [3 * LN2] * 3 + [LN2])
    assert found["word_perplexity"] == {
        "of": "tokens",
        "with_line_ends": pytest.approx(2 ** (20 / 8)),
        "without_line_ends": pytest.approx(2**3),
        "missing": {},
    }


def test_words_without_line_ends_in_the_tokens() -> None:
    tokenizer = WordTokenizer(["the", "cat"], newline="drop")
    found = card(tokenizer, [0, 1, 0], [LN2, 3 * LN2])
    assert found["word_perplexity"] == {
        "of": "tokens",
        "with_line_ends": None,
        "without_line_ends": pytest.approx(4.0),
        "missing": {"with_line_ends": "no line end is a token"},
    }
    assert "none (no line end is a token) with line ends" in card_text(found)


def test_unknown_text() -> None:
    found = card(NullTokenizer(9), [1, 2, 3], [1.0, 2.0], text=None)
    assert found["bits_per_byte"] is found["bits_per_character"] is found["word_perplexity"] is None
    assert found["data"]["original_text"] is found["predicted_text"] is None
    text = card_text(found)
    assert text.count("unknown: the data does not say what its original text was") == 2
    assert "newline rule" not in text


def test_a_perplexity_beyond_floats_is_none() -> None:
    found = card(ByteTokenizer(), [1, 2], [1e6])
    assert found["word_perplexity"]["without_line_ends"] is None
    assert "none (it is beyond any float) without line ends" in card_text(found)
    assert found["total_nats"] == 1e6


def test_a_huge_perplexity_is_told_in_few_digits() -> None:
    code = replace(CODE, mean_nats=20.0)
    text = card_text(card(WordTokenizer(["a", "<eos>"]), [0, 0, 1], [50.0, 6.0], code=code))
    assert "per word: 1.446e+12 with line ends" in text and "5.185e+21 without line ends" in text
    assert "would report ppl 4.852e+08 (20.000000 nats)" in text
    text = card_text(card(WordTokenizer(["a", "<eos>"]), [0, 0, 1], [13.8, 13.9]))
    assert "per word: 1.035e+06 with line ends" in text and "984,609.1112 without line ends" in text


def test_no_word_has_no_perplexity() -> None:
    found = card(WordTokenizer(["a", "<eos>"]), [0, 1, 1], [1.0, 1.0])
    assert found["word_perplexity"]["missing"] == {"without_line_ends": "there is no word"}


@pytest.mark.parametrize(
    ("tokenizer", "absent"),
    [
        (ByteTokenizer(), []),
        (CharTokenizer(["\n", "a"], "eos"), []),
        (CharTokenizer(["\n", "a"], "drop"), ["line ends"]),
        (WordTokenizer(["a", "<eos>"]), ["which white space stands between words"]),
        (WordTokenizer(["a", "b"], "drop"), ["which white space stands between words", "line ends"]),
    ],
)
def test_text_that_is_in_no_token_makes_bits_a_lower_bound(tokenizer: Tokenizer, absent: list[str]) -> None:
    found = card(tokenizer, [0, 1], [1.0])
    assert found["data"]["not_in_the_tokens"] == absent
    bound = f"; lower bounds, for this is in the text and in no token: {', '.join(absent)}\n"
    assert (bound in card_text(found)) == bool(absent)
    assert card(tokenizer, [0, 1], [1.0], text=None)["data"]["not_in_the_tokens"] is None


def test_a_checkpoint_that_does_not_know_its_tokens() -> None:
    unknown = {"data": None, "tokenizer": {"type": "null", "vocab_size": 256}}
    found = card(ByteTokenizer(), [1, 2], [1.0], state=unknown)
    assert found["data"]["tokenizer"]["is_the_checkpoints"] is None
    assert found["notes"] == ["passed over X", UNKNOWN_TOKENS]
    assert f"note          {UNKNOWN_TOKENS}" in card_text(found).splitlines()
    for state in (
        {"data": None},
        {"data": {}, "tokenizer": unknown["tokenizer"]},
    ):  # converted with one; ours of bare ids
        found = card(ByteTokenizer(), [1, 2], [1.0], state=state)
        assert (found["data"]["tokenizer"]["is_the_checkpoints"], found["notes"]) == (True, ["passed over X"])


def test_the_codes_protocol_in_the_units_of_the_tokenizer() -> None:
    characters = card(ByteTokenizer(), [1, 2], [1.0])["code_protocol"]
    assert characters["bpc"] == pytest.approx(2.0) and "ppl" not in characters
    words = card(WordTokenizer(["a", "<eos>"]), [0, 0], [1.0])["code_protocol"]
    assert words["ppl"] == pytest.approx(4.0) and "bpc" not in words
    assert words["nats_per_token"] == CODE.mean_nats
    assert card(ByteTokenizer(), [1, 2], [1.0], code="too short")["code_protocol"] == {"missing": "too short"}


def test_the_text_of_a_full_card() -> None:
    text = card_text(card(ByteTokenizer(), [65] * 81, [2.5 * LN2] * 80))
    assert text.splitlines() == [
        "checkpoint    R/checkpoints/step_00001200 (step 1,200, recipe demo)",
        "data          valid split of P: a vocabulary; newline rule: symbol",
        "computed      precision float32, block length 32, overlap True",
        "scored        80 of 81 tokens, each once, tails included; the first has nothing before it and is context only",
        "loss          1.732868 nats = 2.500000 bits per token",
        "bits          2.000000 per character, 1.666667 per byte of the original text "
        "(100 of 101 characters and 120 of 121 bytes are predicted; 20 words, 5 lines)",
        "perplexity    per word: 256.0000 with line ends, exp(nats / (words + lines)); "
        "1,024.0000 without line ends, exp(nats / words)",
        "context       full: 4 streams in blocks of 32, each after an unscored overlap of 300 tokens, the sum of the "
        "layers' windows, capped at the split's start; before the split: zeros that are attended to",
        "paper's code  would report bpc 2.000000 (1.386294 nats): 8 streams in blocks of 64 with empty caches at their "
        "start, 512 tokens, 7 in tails dropped",
        "note          passed over X",
    ]


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (0, "unknown       0 of 80 tokens (0.00 %) are <unk> for words outside the vocabulary"),
        (
            4,
            "unknown       4 of 80 tokens (5.00 %) are <unk> for words outside the vocabulary; "
            "what they were is not scored, so bits per character and byte are a lower bound",
        ),
    ],
)
def test_unknown_words(count: int, line: str) -> None:
    found = card(WordTokenizer(["a", "<unk>", "<eos>"]), [0, 1, 2], [1, 2], text=replace(TEXT, unknown_words=count))
    assert line in card_text(found).splitlines()


def test_the_text_when_context_is_lost() -> None:
    settings = {**SETTINGS, "overlap": False}
    text = card_text(card(ByteTokenizer(), [65] * 81, [1.0] * 80, settings=settings, lost=12, empty_cache="mask"))
    assert (
        "context       lost: 4 streams in blocks of 32 start with empty caches (--no-overlap): 12 tokens (15.00 %) "
        "have less than the 300 before them that count; before the split: nothing"
    ) in text.splitlines()
