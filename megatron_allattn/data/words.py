"""Tokens that are words: what Python's str.split() gives of a line, so any white space separates them, and only it.

The vocabulary is that of the training split by descending frequency (words of equal frequency in the order in which
they first occur), as an adaptive softmax wants it (Grave et al. 2017, arXiv 1609.04309; the paper's WikiText-103
models). Words outside it become <unk>. Which white space stood between two words is not kept.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_allattn.config.errors import usage_error
from megatron_allattn.data.indexed import Tokens, dtype_for_vocabulary
from megatron_allattn.data.interface import Described, Newline, check_newline
from megatron_allattn.data.pieces import Cutter, whole_characters_end

UNKNOWN = "<unk>"
LINE_ENDS = {"eos": "<eos>", "symbol": "\n"}  # newline rule → the line end's entry in the vocabulary
_LINE_END = "\0"  # stands for a line end among words; no text has it


def _end_of_words(text: bytes) -> int:
    """How many bytes at the start of `text` hold only whole words and white space behind them."""
    whole = whole_characters_end(text)
    known = text[:whole].decode()
    if not known or known[-1].isspace():
        return whole
    return whole - len(known.rsplit(maxsplit=1)[-1].encode())


BETWEEN_WORDS = Cutter(_end_of_words, "word")


def words_of(text: bytes, newline: Newline, source: str) -> list[str]:
    """The words of a text in order, with a NUL character for each line end that is a token."""
    if b"\0" in text:
        raise usage_error("text of", source, "has a NUL byte, so it is not text", "use the byte tokenizer")
    decoded = text.decode()
    return (decoded if newline == "drop" else decoded.replace("\n", f" {_LINE_END} ")).split()


def _are_words(entries: list[str]) -> bool:
    """Whether each is what str.split() may give; of many at once, since one by one takes ten times as long."""
    if not set(map(type, entries)) <= {str}:
        return False
    text = " ".join(entries)
    return text.split() == entries and "\0" not in text


class WordTokenizer(Described):
    """A token is a word, a line end, or <unk> for every other word. Ids are places in a list."""

    name = "word"
    unit: Literal["token"] = "token"
    cutter = BETWEEN_WORDS

    def __init__(self, words: Sequence[str], newline: Newline = "eos") -> None:
        """`words`: the vocabulary in order of ids; it has <eos> under `eos`, "\\n" under `symbol`, <unk> if wanted."""
        check_newline(newline, "word tokenizer")
        self.words, self.newline, self.vocab_size = tuple(words), newline, len(words)
        line_end = LINE_ENDS.get(newline)
        if not _are_words([word for word in self.words if word != line_end]):
            wrong = (p for p, word in enumerate(self.words) if word != line_end and not _are_words([word]))
            place = next(wrong)
            raise usage_error("word vocabulary", f"entry {place}", f"is {self.words[place]!r}", "each is a word")
        ids = _Ids(zip(self.words, range(self.vocab_size), strict=True))
        if len(ids) < self.vocab_size:
            twice = next(word for place, word in enumerate(self.words) if ids[word] != place)
            raise usage_error(
                "word vocabulary", f"of {self.vocab_size}", f"{twice!r} stands in it twice", "name it once"
            )
        self._ids, self.unknown_id = ids, ids.get(UNKNOWN)
        self.newline_id: int | None = None
        if line_end is not None:
            if line_end not in ids:
                rule = f"lacks {line_end!r}, which the newline rule {newline} needs"
                raise usage_error("word vocabulary", f"of {self.vocab_size}", rule, "add it or use another rule")
            self.newline_id = ids.pop(line_end)  # written in a text, <eos> is a word like any other
            ids[_LINE_END] = self.newline_id
        self._dtype = dtype_for_vocabulary(self.vocab_size)

    def encode_counting(self, text: bytes, *, source: str = "text", offset: int = 0) -> tuple[Tokens, int]:
        words = words_of(text, self.newline, source)
        ids = np.fromiter(map(self._ids.__getitem__, words), np.int32, len(words))
        unknown = ids < 0
        count = int(np.count_nonzero(unknown))
        if count:
            if self.unknown_id is None:
                rule = f"the word {words[int(np.argmax(unknown))]!r} is not in the vocabulary of {self.vocab_size}"
                raise usage_error("text of", source, f"{rule}, which has no {UNKNOWN}", "use a vocabulary that has")
            ids[unknown] = self.unknown_id
        return ids.astype(self._dtype), count

    def decode(self, ids: npt.ArrayLike) -> str:
        """The words with single spaces between them, and the line ends."""
        array = self._checked(ids)
        ends = np.flatnonzero(array == (-1 if self.newline_id is None else self.newline_id))
        lines = np.split(array, ends)
        parts = [
            " ".join(self.words[i] for i in (line if number == 0 else line[1:])) for number, line in enumerate(lines)
        ]
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {"type": self.name, "newline": self.newline, "words": list(self.words)}


class _Ids(dict[str, int]):
    """Words to ids; −1 for all others."""

    def __missing__(self, word: str) -> int:
        return -1


@dataclass(frozen=True, kw_only=True)
class WordLearner:
    """The words of the training split by descending frequency.

    min_frequency: words that occur less often are left out. <unk> takes what is left out; it is that of the training
    text if it occurs there, else it is added, with the frequency of the words left out, if there are such words or the
    other splits have words that training lacks. Then its frequency is 0, and it comes last.
    """

    newline: Newline = "eos"
    min_frequency: int = 1
    name = "word"
    cutter: Cutter = BETWEEN_WORDS

    def __post_init__(self) -> None:
        if self.min_frequency < 1:
            raise usage_error("--min-frequency", self.min_frequency, "must be at least 1", "give 1 to keep every word")

    def learn(self, training: Iterator[bytes], held_out: Iterator[bytes], num_lines: int) -> WordTokenizer:
        counts: Counter[str] = Counter()
        for piece in training:
            counts.update(words_of(piece, self.newline, "training"))
        line_end = LINE_ENDS.get(self.newline)
        if line_end is not None and line_end in counts:
            rule = f"would give line ends the same symbol as the word {line_end} of the training text"
            raise usage_error("--newline", self.newline, rule, "use --newline drop or symbol")
        rare: list[str] = []
        if self.min_frequency > 1:
            rare = [w for w, n in counts.items() if n < self.min_frequency and w not in (UNKNOWN, _LINE_END)]
        num_rare = sum(counts.pop(word) for word in rare)
        if counts.keys() <= {_LINE_END}:
            if not rare:
                raise usage_error("training split", "of --input", "it has no words", "give text that has")
            rule = f"no word occurs at least {self.min_frequency} times"
            raise usage_error("training split", "of --input", rule, "give more text, or lower --min-frequency")
        if num_rare or (UNKNOWN not in counts and self._has_others(held_out, counts.keys())):
            counts[UNKNOWN] += num_rare
        if line_end is not None:
            counts[_LINE_END] += 0  # also where no line ends
        ordered = sorted(counts, key=counts.__getitem__, reverse=True)
        if line_end is not None:
            ordered[ordered.index(_LINE_END)] = line_end
        return WordTokenizer(ordered, self.newline)

    def _has_others(self, text: Iterator[bytes], known: Any) -> bool:
        return any(not known >= set(words_of(piece, self.newline, "training")) - {_LINE_END} for piece in text)
