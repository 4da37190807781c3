"""Where an answer ends, and what is shown of it, for tokens that are bytes, characters, words or pieces."""

import io

import pytest
import sentencepiece

from megatron_allattn.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    SentencePieceTokenizer,
    SubwordLearner,
    Tokenizer,
    WordTokenizer,
)
from megatron_allattn.inference.answer import Answer

TEXT = "the café € \U0001f600 and the end. the hat\n"


def learned(eos_id: int = -1) -> Tokenizer:
    text = "the cat and the hat and the end\n" * 20
    return SubwordLearner(vocab_size=267, eos_id=eos_id).learn(iter([text.encode()]), iter([]), 20)


TOKENIZERS = {
    "bytes": ByteTokenizer,
    "characters": lambda: CharTokenizer(sorted(set(TEXT))),
    "words": lambda: WordTokenizer(["<eos>", *sorted(set(TEXT.split()))]),
    "pieces": learned,
}


def answered(tokenizer: Tokenizer, tokens: list[int], stops: list[str], num_tokens: int = 1000) -> Answer:
    """The answer, whose text only ever grows, once it is over or the tokens are."""
    answer, shown = Answer(tokenizer, [], num_tokens, stops), ""
    for token in tokens:
        if answer.finish is None:
            answer.add(token)
            assert answer.text.startswith(shown)
            shown = answer.text
    return answer


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stop", [" and", "and the end", "é", "fé €", "\U0001f600", "\n", ". the h"])
def test_a_stop_string_across_tokens(name: str, stop: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(TEXT.encode()).tolist()
    answer = answered(tokenizer, tokens, ["nowhere", stop])
    assert (answer.text, answer.finish, answer.stop) == (TEXT[: TEXT.index(stop)], "stop", stop)
    whole = tokenizer.decode(answer.tokens)
    assert stop in (whole if isinstance(whole, str) else whole.decode())  # with those of the stop string,
    less = tokenizer.decode(answer.tokens[:-1])
    assert stop not in (less if isinstance(less, str) else less.decode(errors="replace"))  # and no token more


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_number_of_tokens(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(TEXT.encode()).tolist()
    answer = answered(tokenizer, tokens, ["nowhere"], num_tokens=len(tokens))
    assert (answer.text, answer.finish, answer.stop, answer.tokens) == (TEXT, "length", None, tokens)
    short = answered(tokenizer, tokens, ["nowhere"], num_tokens=2)
    assert (short.finish, short.tokens) == ("length", tokens[:2])


def test_what_was_held_back_is_shown_at_the_end() -> None:
    answer = answered(ByteTokenizer(), list(b"abEN\xe2\x82"), ["END"])
    assert (answer.text, answer.finish) == ("ab", None)
    answer.end("interrupted")
    assert (answer.text, answer.finish) == ("abEN\ufffd", "interrupted")


def test_what_was_held_back_may_be_a_stop_string() -> None:
    answer = answered(ByteTokenizer(), list(b"ab\xe2"), ["b\ufffd"], num_tokens=3)
    assert (answer.text, answer.finish, answer.stop) == ("a", "stop", "b\ufffd")


def test_a_stop_string_in_the_prompt_is_none() -> None:
    answer = Answer(ByteTokenizer(), list(b"END EN"), 3, ["END"])
    assert answer.beginning == "END EN"
    for token in b"Dab":
        answer.add(token)
    assert (answer.text, answer.finish) == ("Dab", "length")


def test_a_word_after_a_prompt_has_its_space() -> None:
    tokenizer = WordTokenizer(["<eos>", "b", "a"])
    answer = Answer(tokenizer, [2, 1], 2)
    answer.add(2)
    answer.add(0)
    assert (answer.beginning, answer.text) == ("a b", " a\n")


def test_the_end_of_text() -> None:
    tokenizer = learned(eos_id=1)
    assert tokenizer.end_of_text_id == 1
    tokens = [*tokenizer.encode(b"the cat").tolist(), 1]
    answer = answered(tokenizer, [*tokens, *tokens], ["nowhere"])
    assert (answer.text, answer.finish, answer.tokens) == ("the cat", "end_of_text", tokens[:-1])


def test_which_tokenizers_have_an_end_of_text() -> None:
    assert [make().end_of_text_id for make in TOKENIZERS.values()] == [None] * 4
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat and the hat"] * 20),
        model_writer=model,
        vocab_size=290,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    foreign = [SentencePieceTokenizer(model.getvalue(), newline) for newline in ("symbol", "drop", "eos")]
    assert [one.end_of_text_id for one in foreign] == [2, 2, None]  # under `eos` it is a line end, and text
