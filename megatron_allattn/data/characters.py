"""Tokens that are bytes or characters, and Megatron-LM's bare numbers.

A line end is the byte or character \\n. Under the newline rule `eos` it keeps its id, which then stands for <eos>: the
204 other byte values of enwik8 and <eos> are the 205 symbols of the paper's code.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.data.indexed import Tokens, dtype_for_vocabulary
from megatron_allattn.data.interface import Described, Newline, check_newline
from megatron_allattn.data.pieces import ANYWHERE, BETWEEN_CHARACTERS, Cutter

NUM_CODE_POINTS = 0x110000
NEWLINE = ord("\n")


class _Symbols(Described):
    """A vocabulary of numbers: byte values or code points. What a text's numbers are, the subclass says."""

    def __init__(self, codes: npt.ArrayLike, newline: Newline) -> None:
        check_newline(newline, f"{self.name} tokenizer")
        self.newline = newline
        self._codes = np.asarray(codes, np.uint32)
        self.vocab_size = len(self._codes)
        self._ids = np.full(max(int(self._codes.max()), NEWLINE) + 1, -1, np.int32)
        self._ids[self._codes] = np.arange(self.vocab_size)
        repeated = self._ids[self._codes] != np.arange(self.vocab_size)
        if repeated.any():
            rule = f"{self._label(int(self._codes[np.argmax(repeated)]))} stands in it twice"
            raise usage_error(f"{self.name} vocabulary", f"of {self.vocab_size}", rule, "each has one id")
        if newline == "eos" and self._ids[NEWLINE] < 0:
            rule = "has no newline, which becomes <eos> under the newline rule eos"
            raise usage_error(f"{self.name} vocabulary", f"of {self.vocab_size}", rule, "add it, or use another rule")
        self._dtype = dtype_for_vocabulary(self.vocab_size)

    @property
    def newline_id(self) -> int | None:
        number = int(self._ids[NEWLINE])
        return None if number < 0 or self.newline == "drop" else number

    def _numbers(self, text: bytes) -> npt.NDArray[Any]:
        """The numbers [symbols] of a text."""
        raise NotImplementedError

    def _offset(self, text: bytes, where: int) -> int:
        """Bytes of the text before symbol number `where`."""
        raise NotImplementedError

    def _label(self, code: int) -> str:
        """A symbol in words."""
        raise NotImplementedError

    def encode_counting(self, text: bytes, *, source: str = "text", offset: int = 0) -> tuple[Tokens, int]:
        codes = self._numbers(text)
        kept = codes != NEWLINE if self.newline == "drop" else np.ones(len(codes), np.bool_)
        known = codes < len(self._ids)
        ids = self._ids[np.where(known, codes, 0)]
        bad = (~known | (ids < 0)) & kept
        if bad.any():
            where = int(np.argmax(bad))
            place = f"at byte offset {offset + self._offset(text, where)}"
            rule = (
                f"{self._label(int(codes[where]))} {place} is not in the vocabulary of {self.vocab_size} {self.name}s"
            )
            fix = "use a vocabulary made from this text too, or the byte tokenizer with all bytes"
            raise usage_error("text of", source, rule, fix)
        return ids[kept].astype(self._dtype), 0

    def _described(self, **content: Any) -> dict[str, Any]:
        """The description; rule `symbol` goes without saying, as it did before there were others."""
        rule = {} if self.newline == "symbol" else {"newline": self.newline}
        return {"type": self.name, **content, **rule}


class ByteTokenizer(_Symbols):
    """A token is a byte. Its id is the byte's value, or its place among the values given."""

    name = "byte"
    unit: Literal["byte"] = "byte"
    cutter = ANYWHERE

    def __init__(self, values: Sequence[int] | None = None, newline: Newline = "symbol") -> None:
        """`values`: the bytes of the vocabulary in order of ids, each once; None: all 256."""
        if values is not None and not (len(values) and all(type(v) is int and 0 <= v < 256 for v in values)):
            raise UsageError("byte vocabulary: is not a list of numbers from 0 to 255; give the values of its bytes")
        self.values = None if values is None else tuple(values)
        super().__init__(range(256) if values is None else values, newline)

    def _numbers(self, text: bytes) -> npt.NDArray[Any]:
        return np.frombuffer(text, np.uint8)

    def _offset(self, text: bytes, where: int) -> int:
        return where

    def _label(self, code: int) -> str:
        return f"byte 0x{code:02x}"

    def decode(self, ids: npt.ArrayLike) -> bytes:
        return self._codes[self._checked(ids)].astype(np.uint8).tobytes()

    def to_json(self) -> dict[str, Any]:
        values = {} if self.values is None else {"bytes": list(self.values)}
        return self._described(vocab_size=self.vocab_size, **values)


class CharTokenizer(_Symbols):
    """A token is a Unicode character (code point) and its id the character's place in a list."""

    name = "char"
    unit: Literal["char"] = "char"
    cutter = BETWEEN_CHARACTERS

    def __init__(self, characters: Sequence[str], newline: Newline = "symbol") -> None:
        """`characters`: the vocabulary in order of ids, each once."""
        if not characters:
            raise UsageError("char vocabulary: is empty; it needs at least one character")
        for place, character in enumerate(characters):
            if not isinstance(character, str) or len(character) != 1 or "\ud800" <= character <= "\udfff":
                raise usage_error("char vocabulary", f"entry {place}", f"is {character!r}", "each is one character")
        self.characters = tuple(characters)
        super().__init__([ord(character) for character in self.characters], newline)

    def _numbers(self, text: bytes) -> npt.NDArray[Any]:
        return code_points(text)

    def _offset(self, text: bytes, where: int) -> int:
        return len(text.decode()[:where].encode())

    def _label(self, code: int) -> str:
        return f"character {chr(code)!r} (U+{code:04X} {unicodedata.name(chr(code), 'unnamed')})"

    def decode(self, ids: npt.ArrayLike) -> str:
        return self._codes[self._checked(ids)].astype("<u4").tobytes().decode("utf-32-le")

    def to_json(self) -> dict[str, Any]:
        return self._described(characters=list(self.characters))


class NullTokenizer(Described):
    """Megatron-LM's NullTokenizer: the text is ids, decimal and separated by white space.

    `vocab_size` counts all ids; where Megatron-LM's own flag leaves its end-of-document id out, give one more here.
    """

    name = "null"
    unit: Literal["token"] = "token"
    newline: Newline = "drop"
    newline_id: int | None = None
    cutter = ANYWHERE  # pieces end between ids; no file is prepared with it

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise usage_error("--vocab-size", vocab_size, "a vocabulary has at least 1 id", "give the number of ids")
        self.vocab_size = vocab_size

    def encode_counting(self, text: bytes, *, source: str = "text", offset: int = 0) -> tuple[Tokens, int]:
        words = text.split()
        bad = [word for word in words if not word.isdigit() or len(word) > 18]
        if bad:
            raise usage_error("text of", source, f"{bad[0]!r} is not a token id", "write ids as decimal numbers")
        return self._checked([int(word) for word in words]).astype(dtype_for_vocabulary(self.vocab_size)), 0

    def decode(self, ids: npt.ArrayLike) -> str:
        return " ".join(map(str, self._checked(ids)))

    def to_json(self) -> dict[str, Any]:
        return {"type": self.name, "vocab_size": self.vocab_size}


@dataclass(frozen=True, kw_only=True)
class ByteLearner:
    """A vocabulary of only the bytes that occur, in any split, by their values (--compact-vocabulary)."""

    newline: Newline = "symbol"
    name = "byte"
    cutter: Cutter = ANYWHERE

    def learn(self, training: Iterator[bytes], held_out: Iterator[bytes], num_lines: int) -> ByteTokenizer:
        present = np.zeros(256, np.bool_)
        for piece in chain(training, held_out):
            present[np.frombuffer(piece, np.uint8)] = True
        return ByteTokenizer(_occurring(present, self.newline, self.name), self.newline)


@dataclass(frozen=True, kw_only=True)
class CharLearner:
    """The sorted characters that occur in any split."""

    newline: Newline = "symbol"
    name = "char"
    cutter: Cutter = BETWEEN_CHARACTERS

    def learn(self, training: Iterator[bytes], held_out: Iterator[bytes], num_lines: int) -> CharTokenizer:
        present = np.zeros(NUM_CODE_POINTS, np.bool_)
        for piece in chain(training, held_out):
            present[code_points(piece)] = True
        return CharTokenizer([chr(code) for code in _occurring(present, self.newline, self.name)], self.newline)


def _occurring(present: npt.NDArray[np.bool_], newline: Newline, name: str) -> list[int]:
    """The numbers that occur, with the newline under `eos` and without it under `drop`."""
    if newline != "symbol":
        present[NEWLINE] = newline == "eos"
    if not present.any():
        raise usage_error("--newline", newline, f"leaves no {name}: the text is nothing but line ends", "use symbol")
    return np.flatnonzero(present).tolist()


def code_points(text: bytes) -> npt.NDArray[np.uint32]:
    """Code points [characters] of valid UTF-8."""
    return np.frombuffer(text.decode().encode("utf-32-le"), "<u4")
