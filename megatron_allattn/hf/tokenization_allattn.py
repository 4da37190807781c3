"""Tokenizers of all-attention language models for Hugging Face transformers: bytes, characters, words, SentencePiece.

A file of megatron_allattn that lies beside exported weights and needs nothing of it. The same text has the same ids as
there, and a text that has none is refused as there: no token is added, and what a text spells like a special token is
text. `allattn_tokenizer.json` says what the tokens are; a SentencePiece model lies beside it as `sentencepiece.model`
and needs the package sentencepiece.

The newline rule says what a line end becomes: `symbol` and `eos` a token, which is transformers' eos_token, `drop`
none. eos_token ends a line, not a text. There is no padding token, unless a SentencePiece model has one: to pad, name
one, as in `tokenizer.pad_token = tokenizer.eos_token`.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizer

from .configuration_allattn import check_transformers

check_transformers()

FILES = {"description_file": "allattn_tokenizer.json", "model_file": "sentencepiece.model"}
UNKNOWN, LINE_ENDS = "<unk>", {"eos": "<eos>", "symbol": "\n"}  # of word vocabularies
SPACE_MARK = "▁"
WINDOW_BYTES = 2**16


class Vocabulary(Protocol):
    """names: of every id, each once · special: transformers' names of ids, such as eos_token."""

    names: list[str]
    special: dict[str, int]

    def encode(self, text: str) -> list[int]:
        """Raises ValueError: something in it has no id."""

    def decode(self, ids: list[int]) -> str: ...


def _special(**ids: int | None) -> dict[str, int]:
    return {name: number for name, number in ids.items() if number is not None and number >= 0}


class Symbols:
    """Bytes or characters. A line end is the one that it is."""

    def __init__(self, symbols: list[Any], newline: str, of: Callable[[str], Any], names: list[str]) -> None:
        """symbols: in the order of ids; of: a text → its symbols."""
        self.symbols, self.names, self._of = symbols, names, of
        self._ids = {symbol: number for number, symbol in enumerate(symbols)}
        (line_end,) = of("\n")
        self._dropped = line_end if newline == "drop" else None
        self.special = _special(eos_token=None if newline == "drop" else self._ids.get(line_end))

    def encode(self, text: str) -> list[int]:
        symbols = [symbol for symbol in self._of(text) if symbol != self._dropped]
        try:
            return [self._ids[symbol] for symbol in symbols]
        except KeyError as error:
            raise ValueError(f"{error.args[0]!r} of the text is not in the vocabulary of {len(self.names)}") from None

    def decode(self, ids: list[int]) -> str:
        found = [self.symbols[number] for number in ids]
        return bytes(found).decode(errors="replace") if self._of is str.encode else "".join(found)


def _split_at(ids: list[int], end: int | None) -> Iterator[list[int]]:
    """The lines between line ends; all in one if a line end is no token."""
    start = 0
    for place, number in enumerate(ids):
        if number == end:
            yield ids[start:place]
            start = place + 1
    yield ids[start:]


class Words:
    """What str.split() gives of a line, and line ends. Words that are not in the list become <unk>, if it has that."""

    def __init__(self, words: list[str], newline: str) -> None:
        self.names, self._newline = words, newline
        self._ids = {word: number for number, word in enumerate(words)}
        self._unknown = self._ids.get(UNKNOWN)
        end = LINE_ENDS.get(newline)
        self._end = None if end is None else self._ids.pop(end)  # written in a text it is a word like any other
        self._ids["\0"] = -1 if self._end is None else self._end
        self.special = _special(eos_token=self._end, unk_token=self._unknown)

    def encode(self, text: str) -> list[int]:
        if "\0" in text:
            raise ValueError("the text has a NUL character, which no text of words has")
        words = (text if self._newline == "drop" else text.replace("\n", " \0 ")).split()
        ids = [self._ids.get(word, self._unknown) for word in words]
        if None in ids:
            raise ValueError(f"the word {words[ids.index(None)]!r} is not in the vocabulary, which has no {UNKNOWN}")
        return [number for number in ids if number is not None]

    def decode(self, ids: list[int]) -> str:
        return "\n".join(" ".join(self.names[number] for number in line) for line in _split_at(ids, self._end))


class Pieces:
    """Pieces of a SentencePiece model, and line ends, which are no part of a piece.

    A ▁ of the text, which is how the model writes a space, becomes its three bytes, if nothing is normalized. Then, and
    if no piece has a space after another character, a line is encoded in windows, cut before a space.
    """

    def __init__(self, model: bytes, newline: str) -> None:
        try:
            library: Any = importlib.import_module("sentencepiece")
        except ImportError:
            raise ImportError("this tokenizer needs the package sentencepiece: pip install sentencepiece") from None
        self._model = library.SentencePieceProcessor()
        self._model.LoadFromSerializedProto(model)
        self.names = [self._model.IdToPiece(number) for number in range(self._model.GetPieceSize())]
        unknown = self._model.unk_id()
        self._end = self._line_end(newline, unknown)
        mark = [self._model.PieceToId(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        plain = self._model.Normalize(" a  b ") == " a  b ".replace(" ", SPACE_MARK)
        self._mark = mark if plain and unknown not in mark else None
        self._windowed = plain and not any(SPACE_MARK in name.lstrip(SPACE_MARK) for name in self.names)
        self.special = _special(eos_token=self._end, unk_token=unknown, pad_token=self._model.pad_id())

    def _line_end(self, newline: str, unknown: int) -> int | None:
        if newline == "drop":
            return None
        found = (self._model.PieceToId(name) for name in ("\n", "<0x0A>"))
        return self._model.eos_id() if newline == "eos" else next(number for number in found if number != unknown)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, line in enumerate(text.encode().split(b"\n")):
            if number and self._end is not None:
                ids.append(self._end)
            for window in self._windows(line):
                for place, part in enumerate(window.split(SPACE_MARK.encode()) if self._mark else [window]):
                    ids += (self._mark or []) if place else []
                    ids += self._model.Encode(part)
        return ids

    def _windows(self, line: bytes) -> Iterator[bytes]:
        while self._windowed and len(line) > WINDOW_BYTES:
            space = line.rfind(b" ", 0, WINDOW_BYTES + 1)
            end = len(line[: max(space, 0)].rstrip(b" "))
            end = end or len(line[:WINDOW_BYTES].decode(errors="ignore").encode())
            yield line[:end]
            line = line[end:]
        yield line

    def decode(self, ids: list[int]) -> str:
        return "\n".join(self._model.Decode(line) for line in _split_at(ids, self._end))


def vocabulary_of(description: dict[str, Any], model: bytes | None) -> Vocabulary:
    """Of the content of `allattn_tokenizer.json`, and of `sentencepiece.model`, if there is one."""
    kind, newline = description.get("type"), description.get("newline", "symbol")
    if kind == "byte":
        values = description.get("bytes", list(range(256)))
        return Symbols(values, newline, str.encode, [f"<0x{value:02X}>" for value in values])
    if kind == "char":
        return Symbols(description["characters"], newline, str, description["characters"])
    if kind == "word":
        return Words(description["words"], newline)
    if kind == "sentencepiece" and model is not None:
        return Pieces(model, newline)
    beside = f" without {FILES['model_file']} beside it" if kind == "sentencepiece" else ""
    raise ValueError(
        f"{FILES['description_file']} describes a tokenizer of type {kind!r}{beside}, which is unknown here"
    )


class AllAttentionTokenizer(PreTrainedTokenizer):
    """A tokenizer of a model that pretrain.py has trained, or any other with such a vocabulary."""

    vocab_files_names = FILES
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 (as the base class has it)
    padding_side = "left"

    def __init__(self, description_file: str | None = None, model_file: str | None = None, **others: Any) -> None:
        if description_file is None:
            raise ValueError(f"there is no {FILES['description_file']} in the folder")
        given = {"description_file": description_file, "model_file": model_file}
        self._contents = {name: Path(path).read_bytes() for name, path in given.items() if path is not None}
        description = json.loads(self._contents["description_file"])
        self._vocabulary = vocabulary_of(description, self._contents.get("model_file"))
        self._ids = {name: number for number, name in enumerate(self._vocabulary.names)}
        for name, number in self._vocabulary.special.items():
            others.setdefault(name, self._vocabulary.names[number])
        others.setdefault("split_special_tokens", True)  # what is written like a special token is text
        super().__init__(**others)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return self._ids | self._added_tokens_encoder

    def _tokenize(self, text: str, **others: Any) -> list[str]:
        return [self._vocabulary.names[number] for number in self._vocabulary.encode(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token, self._vocabulary.special.get("unk_token"))

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < self.vocab_size:
            raise ValueError(f"token id {index} is not in the vocabulary: ids are 0 to {self.vocab_size - 1}")
        return self._vocabulary.names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text; tokens that were added to the vocabulary stand in it by their names."""
        parts = ((own, list(some)) for own, some in groupby(tokens, key=self._ids.__contains__))
        return "".join(
            self._vocabulary.decode([self._ids[token] for token in some]) if own else "".join(some)
            for own, some in parts
        )

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **others: Any,
    ) -> str:
        """A line end and an unknown word are text: skip_special_tokens leaves out what else is special, as padding."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if skip_special_tokens:
            text = {self._vocabulary.special.get(name) for name in ("eos_token", "unk_token")}
            left_out = set(self.all_special_ids) - text
            ids = [number for number in ids if number not in left_out]
        return super()._decode(ids, False, clean_up_tokenization_spaces, **others)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Its files, byte for byte."""
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        paths = {name: Path(save_directory) / f"{prefix}{FILES[name]}" for name in self._contents}
        for name, path in paths.items():
            path.write_bytes(self._contents[name])
        return tuple(map(str, paths.values()))
