"""All tokenizers, and how they are read from their JSON. What a tokenizer is: data/interface.py."""

import base64
import binascii
import json
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_allattn.config.errors import usage_error
from megatron_allattn.config.json_files import MAX_TOKENIZER_BYTES, read_bytes
from megatron_allattn.data.characters import ByteLearner, ByteTokenizer, CharLearner, CharTokenizer, NullTokenizer
from megatron_allattn.data.interface import NEWLINES, Learner, Newline, Tokenizer
from megatron_allattn.data.subwords import SentencePieceTokenizer, SubwordLearner
from megatron_allattn.data.words import WordLearner, WordTokenizer

__all__ = [
    "NEWLINES",
    "ByteLearner",
    "ByteTokenizer",
    "CharLearner",
    "CharTokenizer",
    "Learner",
    "Newline",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "SubwordLearner",
    "Tokenizer",
    "WordLearner",
    "WordTokenizer",
    "difference",
    "tokenizer_from_file",
    "tokenizer_from_json",
]


def tokenizer_from_json(description: object, source: str) -> Tokenizer:
    """The tokenizer that `to_json` described; `source` (a file's name) serves errors."""
    if isinstance(description, dict):
        tokenizer = _tokenizer(description, source)
        if tokenizer is not None and set(tokenizer.to_json()) == set(description):
            return tokenizer
    rule = "does not describe a byte, char, word, sentencepiece or null tokenizer"
    raise usage_error("tokenizer in", source, rule, 'expected e.g. {"type": "char", "characters": ["a", "b"]}')


def _tokenizer(description: dict[str, Any], source: str) -> Tokenizer | None:
    """The tokenizer, or None if the values it needs are not there; other keys are not looked at."""
    newline: Any = description.get("newline", "symbol")
    match description:
        case {"type": "byte", "vocab_size": 256, **others} if "bytes" not in others:
            return ByteTokenizer(None, newline)
        case {"type": "byte", "vocab_size": size, "bytes": list(values)} if size == len(values):
            return ByteTokenizer(values, newline)
        case {"type": "char", "characters": list(characters)}:
            return CharTokenizer(characters, newline)
        case {"type": "null", "vocab_size": int(size)}:
            return NullTokenizer(size)
        case {"type": "word", "words": list(words)}:
            return WordTokenizer(words, newline)
        case {"type": "sentencepiece", "model": str(text)}:
            try:
                return SentencePieceTokenizer(base64.b64decode(text, validate=True), newline, source)
            except binascii.Error:
                return None
    return None


def tokenizer_from_file(path: Path, newline: Newline = "symbol") -> Tokenizer:
    """Read --tokenizer-model: a tokenizer's JSON, the P.json of prepared data, or a SentencePiece FILE.model.

    `newline` is the rule for a SentencePiece FILE.model; JSON says it itself.
    """
    fix = "give a tokenizer's JSON, the P.json of prepared data or a SentencePiece model"
    content = read_bytes("--tokenizer-model", path, fix, MAX_TOKENIZER_BYTES)
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        if content[:1] == b"\n":  # a protocol buffer whose first field is a list, as SentencePiece's models are
            return SentencePieceTokenizer(content, newline, str(path))
        raise usage_error("--tokenizer-model", path, f"is not JSON ({error}) and no model", fix) from None
    if isinstance(description, dict) and "tokenizer" in description:
        description = description["tokenizer"]
    return tokenizer_from_json(description, str(path))


def difference(one: Tokenizer, other: Tokenizer) -> str:
    """What differs between two tokenizers, in words: "newline eos, not drop; id 3 'a', not 'b'". Empty if they agree.

    Vocabularies of the same kind are compared by the text of each id, to the first that differs.
    """
    rows = [
        (name, getattr(one, attribute), getattr(other, attribute))
        for name, attribute in (("kind", "name"), ("vocabulary size", "vocab_size"), ("newline rule", "newline"))
    ]
    found = [f"{name} {mine}, not {its}" for name, mine, its in rows if mine != its]
    if one.name == other.name:
        pairs = ((i, one.decode([i]), other.decode([i])) for i in range(min(one.vocab_size, other.vocab_size)))
        found += [f"id {i} is {mine!r}, not {its!r}" for i, mine, its in islice((p for p in pairs if p[1] != p[2]), 1)]
    if not found and one.fingerprint != other.fingerprint:
        found = ["every id has the same text, but they are described differently"]
    return "; ".join(found)
