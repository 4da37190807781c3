"""Text in pieces: where it may be cut, what it counts, and how its last line is ended.

Files are read in chunks of a fixed size, whose ends mean nothing. A `Cutter` joins and cuts them anew at places where a
tokenizer may encode the two sides apart, so that memory is bounded and the ids are those of the whole text.
"""

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LONGEST_PIECE = 2**20  # bytes of a word (or whatever cannot be cut)
_SLACK = 4  # bytes of a character


@dataclass(frozen=True)
class Cutter:
    """end(text): how many bytes at the start of `text`, which more may follow, can be encoded apart from the rest.

    uncuttable: the name of what a cut never falls into, such as "word"; one longer than 1 MiB is refused.
    """

    end: Callable[[bytes], int]
    uncuttable: str = "character"

    def pieces(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """The text of `chunks` cut anew. TooLong, with where it starts, for what cannot be cut and has over 1 MiB.

        Chunks are at most 1 MiB, so at most twice that is in memory.
        """
        pending, offset = b"", 0
        for chunk in chunks:
            pending += chunk
            if len(pending) > LONGEST_PIECE + _SLACK and not self.end(pending[: LONGEST_PIECE + _SLACK]):
                raise TooLongError(offset)
            end = self.end(pending)
            if end:
                yield pending[:end]
                pending = pending[end:]
                offset += end
        if pending:
            yield pending


class TooLongError(Exception):
    """Something that cannot be cut is too long; `offset`: bytes of the text before it."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def whole_characters_end(text: bytes) -> int:
    """Length of valid UTF-8 text without a character that is cut at its end."""
    tail = text[-_SLACK:]
    return len(text) - len(tail) + codecs.utf_8_decode(tail, "ignore")[1]


def starts_character(text: bytes) -> npt.NDArray[np.bool_]:
    """For each byte of UTF-8 text whether a character starts there (it does unless the byte continues one)."""
    return (np.frombuffer(text, np.uint8) & 0xC0) != 0x80


ANYWHERE = Cutter(len)
BETWEEN_CHARACTERS = Cutter(whole_characters_end)


def ended(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces, and a newline at the end if the text has none there; nothing for an empty text."""
    last = b"\n"
    for piece in pieces:
        yield piece
        last = piece[-1:]
    if last != b"\n":
        yield b"\n"


# whether code point i is white space to str.split(); the last one stands for all from there on
_IS_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """What a text consists of, before any tokenizer's rules, a byte-order mark aside.

    characters: code points · words: what Python's str.split() gives · lines: ended by \\n, and a last one that is not.
    """

    bytes: int
    characters: int
    words: int
    lines: int


class TextCounter:
    """Counts text that comes in pieces, cut anywhere, of one or more files.

    Bytes that are not valid UTF-8 (--raw-bytes, and a character that a split cuts) count as part of a word; a character
    is counted where it starts.
    """

    def __init__(self) -> None:
        self._bytes = self._characters = self._words = self._lines = 0
        self._start_file()

    def _start_file(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_word = self._in_line = False

    def add(self, piece: bytes) -> None:
        """Count a piece that is not empty."""
        self._bytes += len(piece)
        self._characters += int(np.count_nonzero(starts_character(piece)))
        self._lines += piece.count(b"\n")
        self._in_line = not piece.endswith(b"\n")
        self._add_words(self._decoder.decode(piece))

    def _add_words(self, text: str) -> None:
        if text.isascii():  # only faster
            space = _IS_SPACE[np.frombuffer(text.encode(), np.uint8)]
        else:
            space = _IS_SPACE[np.minimum(np.frombuffer(text.encode("utf-32-le"), "<u4"), len(_IS_SPACE) - 1)]
        if len(space):
            self._words += int(np.count_nonzero(space[:-1] & ~space[1:])) + (not (self._in_word or space[0]))
            self._in_word = not space[-1]

    def end_file(self) -> None:
        """What follows is a text of its own: the open word and line end here."""
        self._add_words(self._decoder.decode(b"", final=True))
        self._lines += self._in_line
        self._start_file()

    def counts(self) -> TextCounts:
        """The counts of all files that were ended."""
        return TextCounts(bytes=self._bytes, characters=self._characters, words=self._words, lines=self._lines)
