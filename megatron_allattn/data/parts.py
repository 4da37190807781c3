"""Which bytes of which files make up the training, validation and test split.

Either the splits are files of their own, or one text, its files back to back, is cut by the weights of --split into
three contiguous ranges. Where a cut falls depends on the tokenizer: at a byte for bytes, at a character for characters
(so that byte and character recipes have exact sizes, and a line may be cut); for words and subwords at the start of the
line that is nearest to the weight, of two equally near ones the first. A file's start is the start of a line.
"""

import codecs
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_allattn.config.errors import usage_error
from megatron_allattn.data.corpora import Document, read_bytes
from megatron_allattn.data.pieces import starts_character
from megatron_allattn.data.splits import SPLITS, split_boundaries, split_weights

SEARCH_BYTES = 2**16


@dataclass(frozen=True)
class Part:
    """A file's bytes `start` … `end` − 1, which are of one split: 0 is train, 1 valid, 2 test."""

    split: int
    start: int
    end: int


@dataclass(frozen=True)
class Source:
    """A document and its parts, which follow on each other from the start of its text, behind a byte-order mark."""

    document: Document
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class _Text:
    """A document's text: the file's bytes from `start`, which is behind a byte-order mark, to `end`."""

    document: Document
    start: int
    end: int


def sources_of_files(documents: Sequence[Sequence[Document]], *, raw_bytes: bool) -> list[Source]:
    """The sources if each split has documents of its own: those of train, of valid, of test."""
    texts = ((split, _text(document, raw_bytes)) for split, group in enumerate(documents) for document in group)
    return [Source(text.document, (Part(split, text.start, text.end),)) for split, text in texts]


def sources_of_text(documents: Sequence[Document], split: str, unit: str, *, raw_bytes: bool) -> list[Source]:
    """The sources if `split` cuts the documents; `unit`: byte, char or line, at whose starts it cuts."""
    texts = [_text(document, raw_bytes) for document in documents]
    sizes = [_num_characters(text) if unit == "char" else text.end - text.start for text in texts]
    ends = list(itertools.accumulate(sizes, initial=0))
    cuts = split_boundaries(split, ends[-1])
    if unit == "line":
        cuts = [_nearest_line_start(texts, ends, cut) for cut in cuts]
        _check_lines(split, cuts)
    place = _place_of_character if unit == "char" else _place_of_byte
    return [_source(*text, cuts, place) for text in zip(texts, ends, sizes, strict=False)]


def _source(text: _Text, position: int, size: int, cuts: list[int], place: Callable[[_Text, int], int]) -> Source:
    """The parts of a text that starts at `position`; `place` gives the file's offset of a place in it."""
    parts = []
    for split, (low, high) in enumerate(itertools.pairwise(cuts)):
        first, last = max(low - position, 0), min(high - position, size)
        if first < last:
            start = text.start if first == 0 else place(text, first)
            end = text.end if last == size else place(text, last)
            parts.append(Part(split, start, end))
    return Source(text.document, tuple(parts))


def _text(document: Document, raw_bytes: bool) -> _Text:
    size = len(codecs.BOM_UTF8)
    mark = not raw_bytes and b"".join(read_bytes(document, size, 0, size)) == codecs.BOM_UTF8
    text = _Text(document, size if mark else 0, document.num_bytes)
    if text.start >= text.end:
        raise usage_error(document.flag, document.name, "holds no text", document.instead)
    return text


def _place_of_byte(text: _Text, number: int) -> int:
    return text.start + number


def _num_characters(text: _Text) -> int:
    chunks = read_bytes(text.document, SEARCH_BYTES, text.start, text.end)
    return sum(int(np.count_nonzero(starts_character(chunk))) for chunk in chunks)


def _place_of_character(text: _Text, number: int) -> int:
    """Where character `number` of the text, counted from 0, starts in the file."""
    offset = text.start
    for chunk in read_bytes(text.document, SEARCH_BYTES, text.start, text.end):
        starts = np.flatnonzero(starts_character(chunk))
        if number < len(starts):
            return offset + int(starts[number])
        number -= len(starts)
        offset += len(chunk)
    return text.end


def _nearest_line_start(texts: list[_Text], ends: list[int], position: int) -> int:
    """The start of a line, or the end of all text, that is nearest to byte `position` of the texts back to back."""
    number = max(index for index in range(len(texts)) if ends[index] <= position)
    text = texts[number]
    offset = text.start + position - ends[number]
    before, after = _line_start_before(text, offset), _line_start_after(text, offset)
    nearest = before if offset - before <= after - offset else after
    return ends[number] + nearest - text.start


def _line_start_before(text: _Text, offset: int) -> int:
    """The last start of a line at or before `offset`."""
    high = offset
    while high > text.start:
        low = max(text.start, high - SEARCH_BYTES)
        window = b"".join(read_bytes(text.document, SEARCH_BYTES, low, high))
        if (found := window.rfind(b"\n")) >= 0:
            return low + found + 1
        high = low
    return text.start


def _line_start_after(text: _Text, offset: int) -> int:
    """The first start of a line at or behind `offset`, or the end of the text."""
    low = max(text.start, offset - 1)
    if offset == text.start:
        return offset
    for window in read_bytes(text.document, SEARCH_BYTES, low, text.end):
        if (found := window.find(b"\n")) >= 0:
            return low + found + 1
        low += len(window)
    return text.end


def _check_lines(split: str, cuts: list[int]) -> None:
    """Refuse a split that has a weight and got no line."""
    for name, weight, (low, high) in zip(SPLITS, split_weights(split), itertools.pairwise(cuts), strict=True):
        if weight and low == high:
            rule = f"leaves no line to {name}: the text is cut at the starts of lines only"
            raise usage_error(
                "--split", split, rule, f"give {name} a larger weight or 0, more lines, or --{name}-input"
            )
