"""Tokenizers: bytes of text to token ids and back. Each is described fully by a small JSON object.

Text may come in pieces that end between characters (for null: between ids): the ids are those of the whole.
"""

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.data.indexed import Tokens, dtype_for_vocabulary

NUM_CODE_POINTS = 0x110000


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer."""

    @property
    def name(self) -> str:
        """The value of --tokenizer-type."""

    @property
    def unit(self) -> Literal["byte", "char", "token"]:
        """What one token is: losses in bits per token are bits per byte, bits per character or neither."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; ids are 0 … vocab_size − 1."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of to_json() in canonical form: equal exactly if two tokenizers are the same."""

    def encode(self, text: bytes, *, source: str = "text", offset: int = 0) -> Tokens:
        """Ids [n] of a piece of text; `source` and `offset` (bytes before the piece) only serve errors."""

    def decode(self, ids: npt.ArrayLike) -> bytes | str:
        """Text of ids [n]; an id outside the vocabulary is a UsageError that names it and the vocabulary's size."""

    def to_json(self) -> dict[str, Any]:
        """JSON object that `tokenizer_from_json` turns back into this tokenizer."""


class _Described:
    """The parts that follow from `to_json` and `vocab_size`."""

    name: str
    vocab_size: int

    def to_json(self) -> dict[str, Any]:
        return {"type": self.name, "vocab_size": self.vocab_size}

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        array = np.asarray(ids).reshape(-1)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"token ids are integers, not {array.dtype.name}")
        bad = (array < 0) | (array >= self.vocab_size)
        if bad.any():
            rule = f"is not in the {self.name} tokenizer's vocabulary of {self.vocab_size}"
            raise usage_error("token id", array[np.argmax(bad)], rule, f"ids are 0 to {self.vocab_size - 1}")
        return array.astype(np.int64)


class ByteTokenizer(_Described):
    """A token is a byte and its id the byte's value; any text, 256 ids."""

    name = "byte"
    unit: Literal["byte"] = "byte"
    vocab_size = 256

    def encode(self, text: bytes, *, source: str = "text", offset: int = 0) -> Tokens:
        return np.frombuffer(text, np.uint8)

    def decode(self, ids: npt.ArrayLike) -> bytes:
        return self._checked(ids).astype(np.uint8).tobytes()


class CharTokenizer(_Described):
    """A token is a Unicode character (code point) and its id the character's place in a list."""

    name = "char"
    unit: Literal["char"] = "char"

    def __init__(self, characters: Sequence[str]) -> None:
        """`characters`: the vocabulary in order of ids, each once."""
        if not characters:
            raise UsageError("char vocabulary: is empty; it needs at least one character")
        for place, character in enumerate(characters):
            if not isinstance(character, str) or len(character) != 1 or "\ud800" <= character <= "\udfff":
                raise usage_error("char vocabulary", f"entry {place}", f"is {character!r}", "each is one character")
        self.characters = tuple(characters)
        self.vocab_size = len(self.characters)
        self._code_points = np.array([ord(character) for character in self.characters], np.uint32)
        self._ids = np.full(int(self._code_points.max()) + 1, -1, np.int32)
        self._ids[self._code_points] = np.arange(self.vocab_size)
        repeated = self._ids[self._code_points] != np.arange(self.vocab_size)
        if repeated.any():
            rule = f"{self.characters[int(np.argmax(repeated))]!r} stands in it twice"
            raise usage_error("char vocabulary", f"of {self.vocab_size}", rule, "each character has one id")
        self._dtype = dtype_for_vocabulary(self.vocab_size)

    @classmethod
    def from_presence(cls, present: npt.NDArray[np.bool_]) -> "CharTokenizer":
        """The sorted characters whose code points are marked in `present` [NUM_CODE_POINTS]."""
        return cls([chr(code) for code in np.flatnonzero(present)])

    def encode(self, text: bytes, *, source: str = "text", offset: int = 0) -> Tokens:
        codes = code_points(text)
        known = codes < len(self._ids)
        ids = self._ids[np.where(known, codes, 0)]
        bad = ~known | (ids < 0)
        if bad.any():
            where = int(np.argmax(bad))
            character = chr(codes[where])
            offset += len(text.decode()[:where].encode())
            label = f"{character!r} (U+{ord(character):04X} {unicodedata.name(character, 'unnamed')})"
            rule = f"character {label} at byte offset {offset} is not in the vocabulary of {self.vocab_size} characters"
            raise usage_error(
                "text of", source, rule, "use a vocabulary made from this text too, or the byte tokenizer"
            )
        return ids.astype(self._dtype)

    def decode(self, ids: npt.ArrayLike) -> str:
        return self._code_points[self._checked(ids)].astype("<u4").tobytes().decode("utf-32-le")

    def to_json(self) -> dict[str, Any]:
        return {"type": self.name, "characters": list(self.characters)}


class NullTokenizer(_Described):
    """Megatron-LM's NullTokenizer: the text is ids, decimal and separated by white space.

    `vocab_size` counts all ids; where Megatron-LM's own flag leaves its end-of-document id out, give one more here.
    """

    name = "null"
    unit: Literal["token"] = "token"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise usage_error("--vocab-size", vocab_size, "a vocabulary has at least 1 id", "give the number of ids")
        self.vocab_size = vocab_size

    def encode(self, text: bytes, *, source: str = "text", offset: int = 0) -> Tokens:
        words = text.split()
        bad = [word for word in words if not word.isdigit() or len(word) > 18]
        if bad:
            raise usage_error("text of", source, f"{bad[0]!r} is not a token id", "write ids as decimal numbers")
        return self._checked([int(word) for word in words]).astype(dtype_for_vocabulary(self.vocab_size))

    def decode(self, ids: npt.ArrayLike) -> str:
        return " ".join(map(str, self._checked(ids)))


def code_points(text: bytes) -> npt.NDArray[np.uint32]:
    """Code points [characters] of valid UTF-8."""
    return np.frombuffer(text.decode().encode("utf-32-le"), "<u4")


def tokenizer_from_json(description: object, source: str) -> Tokenizer:
    """The tokenizer that `to_json` described; `source` (a file's name) serves errors."""
    if isinstance(description, dict):
        kind, keys = description.get("type"), set(description) - {"type"}
        if kind == "byte" and keys == {"vocab_size"} and description["vocab_size"] == 256:
            return ByteTokenizer()
        if kind == "char" and keys == {"characters"} and isinstance(description["characters"], list):
            return CharTokenizer(description["characters"])
        if kind == "null" and keys == {"vocab_size"} and isinstance(description["vocab_size"], int):
            return NullTokenizer(description["vocab_size"])
    rule = "does not describe a byte, char or null tokenizer"
    raise usage_error("tokenizer in", source, rule, 'expected e.g. {"type": "char", "characters": ["a", "b"]}')


def tokenizer_from_file(path: Path) -> Tokenizer:
    """Read --tokenizer-model: a tokenizer's JSON, or the P.json manifest of prepared data, whose tokenizer is taken."""
    fix = "give a tokenizer's JSON or the P.json of prepared data"
    try:
        description = json.loads(path.read_bytes())
    except OSError as error:
        raise usage_error("--tokenizer-model", path, f"cannot be read ({error.strerror})", fix) from None
    except ValueError as error:
        raise usage_error("--tokenizer-model", path, f"is not JSON ({error})", fix) from None
    if isinstance(description, dict) and "tokenizer" in description:
        description = description["tokenizer"]
    return tokenizer_from_json(description, str(path))
