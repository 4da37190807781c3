"""Pieces: what is cut, counted and ended does not depend on where the chunks end."""

import random
from collections.abc import Iterator

import pytest

from megatron_allattn.data import pieces as pieces_module
from megatron_allattn.data.pieces import (
    ANYWHERE,
    BETWEEN_CHARACTERS,
    Cutter,
    TextCounter,
    TextCounts,
    TooLongError,
    ended,
    whole_characters_end,
)
from megatron_allattn.data.subwords import BETWEEN_LINES, BETWEEN_WINDOWS
from megatron_allattn.data.words import BETWEEN_WORDS

TEXT = "one  two\u3000thréé\r\n\n😀\u2028x \u0085y\x1cz \n\nlast line"


def chunks(text: bytes, size: int) -> Iterator[bytes]:
    return (text[start : start + size] for start in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("cutter", [ANYWHERE, BETWEEN_CHARACTERS, BETWEEN_WORDS, BETWEEN_LINES, BETWEEN_WINDOWS])
def test_pieces_make_the_whole(cutter: Cutter, size: int) -> None:
    parts = list(cutter.pieces(chunks(TEXT.encode(), size)))
    assert b"".join(parts) == TEXT.encode()
    assert all(parts)
    if cutter is BETWEEN_CHARACTERS:
        assert "".join(part.decode() for part in parts) == TEXT
    if cutter is BETWEEN_WORDS:
        assert [word for part in parts for word in part.decode().split()] == TEXT.split()
    if cutter in (BETWEEN_LINES, BETWEEN_WINDOWS):
        assert all(part.endswith(b"\n") for part in parts[:-1])


def test_whole_characters() -> None:
    for text in ("", "a", "aé", "a€", "a😀", "😀😀"):
        encoded = text.encode()
        assert whole_characters_end(encoded) == len(encoded)
        for cut in range(1, len(text[-1:].encode())):
            assert whole_characters_end(encoded[:-cut]) == len(text[:-1].encode())


@pytest.mark.parametrize("size", [1, 7, 16, 64])
@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("a" * 21, 0),
        ("é" * 11, 0),
        ("one two\n" + "b" * 21 + " c", 8),
        ("\u3000" + "€" * 7 + "x", 3),
    ],
)
def test_a_word_over_the_limit_is_found_at_any_chunk_size(
    monkeypatch: pytest.MonkeyPatch, size: int, text: str, offset: int
) -> None:
    monkeypatch.setattr(pieces_module, "LONGEST_PIECE", 16)  # and 4 bytes of slack
    with pytest.raises(TooLongError) as error:
        list(BETWEEN_WORDS.pieces(chunks(text.encode(), min(size, 16))))
    assert error.value.offset == offset
    assert b"".join(BETWEEN_WORDS.pieces(chunks(b"z " + b"a" * 16 + b" b", min(size, 16)))).endswith(b"a b")


@pytest.mark.parametrize(
    ("text", "expected"), [(b"", b""), (b"a", b"a\n"), (b"a\n", b"a\n"), (b"\n\n", b"\n\n"), (b"a\r", b"a\r\n")]
)
def test_the_last_line_is_ended_once(text: bytes, expected: bytes) -> None:
    assert b"".join(ended(chunks(text, 1))) == expected


def counted(*files: bytes, size: int) -> TextCounts:
    counter = TextCounter()
    for file in files:
        for chunk in chunks(file, size):
            counter.add(chunk)
        counter.end_file()
    return counter.counts()


def test_counts_are_pythons_own_at_any_chunk_size() -> None:
    generator = random.Random(7)
    alphabet = "ab é€😀 \t\n\r\u3000\u0085\u2028\x1c"
    for _ in range(60):
        text = "".join(generator.choice(alphabet) for _ in range(generator.randrange(1, 40)))
        expected = TextCounts(
            bytes=len(text.encode()),
            characters=len(text),
            words=len(text.split()),
            lines=text.count("\n") + (not text.endswith("\n")),
        )
        assert counted(text.encode(), size=generator.choice([1, 2, 3, 100])) == expected, text


def test_counts_of_files_add_up() -> None:
    assert counted(b"one tw", b"o\nthree\n", size=2) == TextCounts(bytes=14, characters=14, words=4, lines=3)
    # a character in two splits counts where it starts; what is no UTF-8 belongs to a word
    assert counted(b"a \xc3", b"\xa9b \xff", size=9) == TextCounts(bytes=7, characters=6, words=4, lines=2)
