"""Text that is shown token by token is the text of all tokens together, and never half a character."""

import io

import pytest
import sentencepiece

from megatron_allattn.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    SubwordLearner,
    Tokenizer,
    WordTokenizer,
)
from megatron_allattn.inference.text_stream import TextStream

TEXT = "a café, naïve\n\n  two spaces € \U0001f600\n"


def learned() -> Tokenizer:
    text = "the cat and the hat\n" * 20
    return SubwordLearner(vocab_size=265).learn(iter([text.encode()]), iter([]), 20)


def foreign() -> Tokenizer:
    """A model by SentencePiece's own defaults, which puts a space before each line and takes it away again."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "the cat and the hat"] * 20),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue(), "symbol", "their.model")


TOKENIZERS = {
    "bytes": (ByteTokenizer, TEXT),
    "characters": (lambda: CharTokenizer(sorted(set(TEXT))), TEXT),
    "a vocabulary with the sign of what is broken": (lambda: CharTokenizer(["a", "\ufffd"]), "a\ufffda\ufffd"),
    "words": (lambda: WordTokenizer(["<eos>", "b", "a", "<unk>"]), "a b\n\nb x a\na"),
    "words and no line ends": (lambda: WordTokenizer(["b", "a"], "drop"), "a b\nb a"),
    "pieces": (learned, TEXT + "the cat"),
    "pieces of another program": (foreign, TEXT + "the hat"),
    "numbers": (lambda: NullTokenizer(50), "3 17 0 49"),
}


def shown(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """What each token shows, and the rest at the end."""
    stream = TextStream(tokenizer)
    return [*map(stream.add, tokens), stream.end()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_all_together_it_is_the_decoded_text(name: str) -> None:
    make, text = TOKENIZERS[name]
    tokenizer = make()
    tokens = tokenizer.encode(text.encode()).tolist()
    decoded = tokenizer.decode(tokens)
    parts = shown(tokenizer, tokens)
    assert "".join(parts) == (decoded if isinstance(decoded, str) else decoded.decode())
    if "broken" not in name:
        assert parts[-1] == "" and not any("\ufffd" in part for part in parts)


def test_a_token_is_shown_as_it_comes() -> None:
    assert shown(WordTokenizer(["<eos>", "b", "a"]), [2, 1, 0, 1]) == ["a", " b", "\n", "b", ""]
    assert shown(ByteTokenizer(), list("aé€".encode())) == ["a", "", "é", "", "", "€", ""]


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        ([0xC3], ["", "\ufffd"]),
        ([0x80, 0x41], ["", "\ufffdA", ""]),
        ([0xE2, 0x82, 0x41], ["", "", "\ufffdA", ""]),
        ([0xC3, 0xC3, 0xA9], ["", "", "\ufffdé", ""]),
    ],
)
def test_bytes_that_are_no_character(tokens: list[int], parts: list[str]) -> None:
    assert shown(ByteTokenizer(), tokens) == parts
    assert "".join(parts) == bytes(tokens).decode(errors="replace")
