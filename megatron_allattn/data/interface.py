"""What a tokenizer is, how one is learned from text, and what a line end becomes.

Text is UTF-8 and only \\n ends a line. The newline rule of a tokenizer is one of

- `eos`: a line end becomes the symbol <eos>, which decodes to \\n again. When text is prepared, the last line of every
  file and split gets its <eos> too if nothing ends it, and so does an empty line (as in the paper's code);
- `symbol`: a line end is a symbol like any other, and nothing is added;
- `drop`: a line end is no token. It cannot be decoded again.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megatron_allattn.config.errors import usage_error
from megatron_allattn.data.indexed import Tokens
from megatron_allattn.data.pieces import Cutter

Newline = Literal["eos", "symbol", "drop"]
NEWLINES: tuple[Newline, ...] = ("eos", "symbol", "drop")


def sha256_of_json(content: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of an object as JSON in canonical form: keys sorted, no space."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
    def newline(self) -> Newline:
        """What a line end becomes."""

    @property
    def newline_id(self) -> int | None:
        """The id of a line end, under `eos` that of <eos>; None if it has none."""

    @property
    def end_of_text_id(self) -> int | None:
        """The id of what ends a text and is no part of it; None if there is none."""

    @property
    def cutter(self) -> Cutter:
        """Where text may be cut so that the ids of its pieces are those of the whole."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of to_json() in canonical form: equal exactly if two tokenizers are the same."""

    def encode(self, text: bytes, *, source: str = "text", offset: int = 0) -> Tokens:
        """Ids [n] of a text or of a piece of one; `source` and `offset` (bytes before the piece) only serve errors."""

    def encode_counting(self, text: bytes, *, source: str = "text", offset: int = 0) -> tuple[Tokens, int]:
        """`encode`, and how many of the ids stand for something the vocabulary lacks (<unk>)."""

    def decode(self, ids: npt.ArrayLike) -> bytes | str:
        """Text of ids [n]; an id outside the vocabulary is a UsageError that names it and the vocabulary's size."""

    def to_json(self) -> dict[str, Any]:
        """JSON object that `tokenizer_from_json` turns back into this tokenizer."""


@runtime_checkable
class Learner(Protocol):
    """How to make a tokenizer of the text that is prepared."""

    @property
    def name(self) -> str:
        """The tokenizer's name."""

    @property
    def newline(self) -> Newline:
        """The tokenizer's newline rule."""

    @property
    def cutter(self) -> Cutter:
        """Where the text that `learn` gets is cut."""

    def learn(self, training: Iterator[bytes], held_out: Iterator[bytes], num_lines: int) -> Tokenizer:
        """Make the tokenizer from the pieces of the training split, which has `num_lines`, and of the other splits.

        What is learned from the other splits, if anything, each learner says.
        """


class Described:
    """The parts of a tokenizer that follow from its own `to_json`, `vocab_size` and `encode_counting`."""

    name: str
    vocab_size: int
    newline: Newline = "symbol"
    end_of_text_id: int | None = None

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError

    def encode_counting(self, text: bytes, *, source: str = "text", offset: int = 0) -> tuple[Tokens, int]:
        raise NotImplementedError

    def encode(self, text: bytes, *, source: str = "text", offset: int = 0) -> Tokens:
        return self.encode_counting(text, source=source, offset=offset)[0]

    @functools.cached_property
    def fingerprint(self) -> str:
        return sha256_of_json(self.to_json())

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        array = np.asarray(ids).reshape(-1)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"token ids are integers, not {array.dtype.name}")
        bad = (array < 0) | (array >= self.vocab_size)
        if bad.any():
            rule = f"is not in the {self.name} tokenizer's vocabulary of {self.vocab_size}"
            raise usage_error("token id", array[np.argmax(bad)], rule, f"ids are 0 to {self.vocab_size - 1}")
        return array.astype(np.int64)


def check_newline(newline: object, what: str) -> None:
    """Refuse what is no newline rule; `what` names the tokenizer."""
    if newline not in NEWLINES:
        raise usage_error(what, newline, "is not a newline rule", f"choose {', '.join(NEWLINES)}")
