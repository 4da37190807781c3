"""Tokens that are SentencePiece's pieces of words (Kudo and Richardson 2018): a model is learned here, or given.

Lossless. Models learned here give every text back, byte for byte: characters without a piece become their bytes (byte
fallback), nothing is normalized, no space is added or removed. SentencePiece writes a space as U+2581 (▁) and so cannot
tell the two apart; a ▁ of the text itself is therefore encoded as its three bytes. Models made elsewhere often
normalize; `lossless` says whether one does.

Line ends are no part of a piece. Under the newline rule `symbol` one becomes the model's piece for it, as a rule the
byte piece <0x0A>; under `eos` the model's end-of-sentence piece.

Learning. The trainer gets the words of the training split, each with its count, so memory is that of the different
words and not of the text; a word is what stands between cuts before spaces. The unigram trainer unrolls the counts
again at 20 bytes a character, so beyond 50 million characters it gets counts that are smaller by a factor. Nothing
depends on chance or on the number of cores: the same text gives the same model.

Long lines. A line is encoded in windows of at most 64 KiB, each cut before the last run of spaces in it, if there is
one, else after the last whole character. No piece has a space after another character, so a cut before spaces changes
no ids (a unigram model's scores are float32 sums over what is encoded together, so of two segmentations that score the
same a window may give the other). Models of which this is not true get whole lines, of at most 1 MiB.
"""

import base64
import errno
import functools
import importlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron_allattn.config.errors import usage_error
from megatron_allattn.data.indexed import Tokens, dtype_for_vocabulary
from megatron_allattn.data.interface import Described, Newline, check_newline
from megatron_allattn.data.pieces import Cutter, whole_characters_end

WINDOW_BYTES = 2**16
SPACE_MARK = "▁"
MOST_WORDS = 2_000_000  # different words kept while counting: some 400 MB
MOST_CHARACTERS = 50_000_000  # of words times counts in unigram training: some 1 GB
# Spaces belong to the word behind them. To the trainer tab, ▁ and ▅ mean something else, so they end a word. It leaves
# out what has over 4192 bytes, so longer words are cut.
_WORD = re.compile(r" {0,99}[^ \n\t\0▁▅]{1,1000}| {1,99}")
ModelType = Literal["unigram", "bpe"]
_TRAINER_SETTINGS = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "character_coverage": 0.9995,  # SentencePiece's own default; the rarest characters become bytes
    "hard_vocab_limit": False,  # so that the size that is possible is known
    "num_threads": 16,  # the sums depend on it, so it is no matter of the machine
    "minloglevel": 2,
}
EVERY_TRAP = "ﬁ\t  x ▁<s>\u0085\U0010ffff\u00a0 "  # what models that are not lossless change


def sentencepiece_library() -> Any:
    """The sentencepiece package, or a UsageError that says how to install it: only these tokenizers need it."""
    try:
        return importlib.import_module("sentencepiece")
    except ImportError as error:
        rule = f"needs the Python package sentencepiece, which cannot be imported ({error})"
        raise usage_error("--tokenizer-type", "sentencepiece", rule, "install requirements.txt") from None


def window_end(line: bytes, start: int) -> int:
    """Where the window that starts at `start` of a line ends: a function of the line alone."""
    stop = start + WINDOW_BYTES
    if len(line) <= stop:
        return len(line)
    space = line.rfind(b" ", start, stop + 1)
    before_spaces = start + len(line[start : max(space, start)].rstrip(b" "))
    return before_spaces if before_spaces > start else start + whole_characters_end(line[start:stop])


def _end_of_windows(text: bytes) -> int:
    end = text.rfind(b"\n") + 1
    while len(text) - end > WINDOW_BYTES:
        end = window_end(text, end)
    return end


def _end_of_lines(text: bytes) -> int:
    return text.rfind(b"\n") + 1


BETWEEN_WINDOWS = Cutter(_end_of_windows)
BETWEEN_LINES = Cutter(_end_of_lines, "line")


class SentencePieceTokenizer(Described):
    """A token is a piece of a SentencePiece model, whose bytes are part of the description."""

    name = "sentencepiece"
    unit: Literal["token"] = "token"

    def __init__(self, model: bytes, newline: Newline = "symbol", source: str = "model") -> None:
        """`model`: the content of FILE.model; `source` (its name) serves errors."""
        check_newline(newline, "sentencepiece tokenizer")
        self.model, self.newline = model, newline
        self._pieces = sentencepiece_library().SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise usage_error(
                "--tokenizer-model", source, f"is not a SentencePiece model ({error})", "give one"
            ) from None
        self.vocab_size = int(self._pieces.GetPieceSize())
        self.unknown_id = int(self._pieces.unk_id())
        self.newline_id = self._find_newline(source)
        end = int(self._pieces.eos_id())
        self.end_of_text_id = end if end >= 0 and end != self.newline_id else None
        self._dtype = dtype_for_vocabulary(self.vocab_size)
        mark = [self._pieces.PieceToId(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        plain = self._pieces.Normalize(" a  b ") == " a  b ".replace(" ", SPACE_MARK)
        self._mark_ids = mark if plain and self.unknown_id not in mark else None
        self.cutter = BETWEEN_WINDOWS if plain and not self._crosses_words() else BETWEEN_LINES

    def _find_newline(self, source: str) -> int | None:
        if self.newline == "drop":
            return None
        if self.newline == "eos":
            number = int(self._pieces.eos_id())
            if number < 0:
                rule = "has no end-of-sentence piece, which the newline rule eos needs"
                raise usage_error("--tokenizer-model", source, rule, "prepare the text with --newline symbol or drop")
            return number
        for piece in ("\n", "<0x0A>"):
            number = int(self._pieces.PieceToId(piece))
            if number != self.unknown_id:
                return number
        rule = "has no piece for a line end, which the newline rule symbol needs"
        raise usage_error("--tokenizer-model", source, rule, "prepare the text with --newline eos or drop")

    def _crosses_words(self) -> bool:
        """Whether a piece has a space after another character, so that no place before a space is safe to cut at."""
        pieces = map(self._pieces.IdToPiece, range(self.vocab_size))
        return any(SPACE_MARK in piece.lstrip(SPACE_MARK) for piece in pieces)

    @functools.cached_property
    def lossless(self) -> bool:
        """Whether decoding gives a text back that has what models usually change."""
        text = EVERY_TRAP if self.newline == "drop" else f"{EVERY_TRAP}\n\n {EVERY_TRAP}\n"
        return self.decode(self.encode(text.encode())) == text

    def encode_counting(self, text: bytes, *, source: str = "text", offset: int = 0) -> tuple[Tokens, int]:
        text.decode()  # SentencePiece would replace what is not UTF-8
        parts: list[bytes] = []
        after: list[list[int]] = []  # ids that follow each part
        line_end = [] if self.newline_id is None else [self.newline_id]
        for line in text.split(b"\n"):
            for window in self._windows(line):
                between_marks = window.split(SPACE_MARK.encode()) if self._mark_ids else [window]
                parts += between_marks
                after += [self._mark_ids or []] * (len(between_marks) - 1) + [[]]
            after[-1] = line_end
        after[-1] = []
        encoded = self._pieces.Encode(parts)
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(zip(encoded, after, strict=True)))
        ids = np.fromiter(flat, np.int32)
        return ids.astype(self._dtype), int(np.count_nonzero(ids == self.unknown_id))

    def _windows(self, line: bytes) -> Iterator[bytes]:
        if self.cutter is BETWEEN_LINES or len(line) <= WINDOW_BYTES:
            yield line
            return
        start = 0
        while start < len(line):
            end = window_end(line, start)
            yield line[start:end]
            start = end

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of ids; bytes that make no character become U+FFFD."""
        array = self._checked(ids)
        ends = np.flatnonzero(array == (-1 if self.newline_id is None else self.newline_id))
        lines = np.split(array, ends)
        return "\n".join(self._pieces.Decode(line[number > 0 :].tolist()) for number, line in enumerate(lines))

    def to_json(self) -> dict[str, Any]:
        return {"type": self.name, "newline": self.newline, "model": base64.b64encode(self.model).decode()}


def thinned(counts: Mapping[str, int]) -> Mapping[str, int]:
    """The counts, made smaller by one factor if words times counts have more than MOST_CHARACTERS characters.

    They are rounded up or down by a hash of the word, so that on average no kind of word gains: of the words that
    occur once as many stay as the factor says.
    """
    total = sum(len(word) * count for word, count in counts.items())
    if total <= MOST_CHARACTERS:
        return counts
    factor = MOST_CHARACTERS / total
    smaller = {word: int(count * factor + zlib.crc32(word.encode()) / 2**32) for word, count in counts.items()}
    return {word: count for word, count in smaller.items() if count}


@dataclass(frozen=True, kw_only=True)
class SubwordLearner:
    """A SentencePiece model of the training split.

    vocab_size: number of pieces, the 256 bytes and the special ones included · sentences: learn from about so many
    lines, spread evenly over the training split (None: from all) · *_id: ids of the special pieces, −1 for none;
    eos_id None: 1 under the newline rule `eos`, else −1.
    """

    vocab_size: int
    model_type: ModelType = "unigram"
    sentences: int | None = None
    newline: Newline = "symbol"
    unk_id: int = 0
    bos_id: int = -1
    eos_id: int | None = None
    pad_id: int = -1
    name = "sentencepiece"
    cutter: Cutter = BETWEEN_WINDOWS

    def __post_init__(self) -> None:
        check_newline(self.newline, "--newline")
        if self.model_type not in get_args(ModelType):
            rule = f"is not one of {', '.join(get_args(ModelType))}"
            raise usage_error("--sentencepiece-model-type", self.model_type, rule, "choose one of them")
        if self.vocab_size < 1:
            raise usage_error("--vocab-size", self.vocab_size, "must be at least 1", "give the number of pieces")
        if self.sentences is not None and self.sentences < 1:
            raise usage_error("--sentencepiece-sentences", self.sentences, "must be at least 1", "leave it out for all")
        self._check_special_ids()

    def _check_special_ids(self) -> None:
        owners: dict[int, str] = {}
        for name, number in self.special_ids.items():
            flag = f"--{name.replace('_', '-')}"
            if not -1 <= number < self.vocab_size:
                rule = f"is not an id of a vocabulary of {self.vocab_size}"
                raise usage_error(flag, number, rule, f"give 0 to {self.vocab_size - 1}, or -1 for none")
            if number >= 0 and number in owners:
                rule = f"is the id of {owners[number]} too"
                raise usage_error(flag, number, rule, f"move one of {owners[number]} and {flag} (-1: none)")
            owners[number] = flag
        if self.special_ids["unk_id"] < 0:
            raise usage_error("--unk-id", -1, "SentencePiece cannot do without it", "give an id, such as 0")
        if self.newline == "eos" and self.special_ids["eos_id"] < 0:
            raise usage_error("--eos-id", -1, "the newline rule eos needs it", "give an id, or another --newline")

    @property
    def special_ids(self) -> dict[str, int]:
        """The trainer's names → ids."""
        eos_id = self.eos_id if self.eos_id is not None else 1 if self.newline == "eos" else -1
        return {"unk_id": self.unk_id, "bos_id": self.bos_id, "eos_id": eos_id, "pad_id": self.pad_id}

    def learn(self, training: Iterator[bytes], held_out: Iterator[bytes], num_lines: int) -> SentencePieceTokenizer:
        counts: Mapping[str, int] = self._count_words(training, num_lines)
        if self.model_type == "unigram":
            counts = thinned(counts)
        if not counts:
            raise usage_error("training split", "of --input", "holds nothing to learn pieces of", "give more text")
        options = {
            "vocab_size": self.vocab_size,
            "model_type": self.model_type,
            **_TRAINER_SETTINGS,
            **self.special_ids,
        }
        tokenizer = SentencePieceTokenizer(self._train(counts, options), self.newline)
        if tokenizer.vocab_size < self.vocab_size:
            rule = f"the training text allows at most {tokenizer.vocab_size} {self.model_type} pieces"
            fix = f"give --vocab-size {tokenizer.vocab_size} or less, or more text"
            raise usage_error("--vocab-size", self.vocab_size, rule, fix)
        return tokenizer

    def _count_words(self, text: Iterator[bytes], num_lines: int) -> Counter[str]:
        """Words of (a sample of) the text; beyond MOST_WORDS those that are rarest so far are forgotten."""
        counts: Counter[str] = Counter()
        first_line, least = 0, 1
        for piece in text:
            lines = piece.decode()
            if self.sentences is not None and self.sentences < num_lines:
                parts = lines.split("\n")
                lines = "\n".join(p for i, p in enumerate(parts, first_line) if self._is_sampled(i, num_lines))
                first_line += len(parts) - 1
            counts.update(_WORD.findall(lines))
            while len(counts) > MOST_WORDS:
                least += 1
                counts = Counter({word: count for word, count in counts.items() if count >= least})
        return counts

    def _is_sampled(self, line: int, num_lines: int) -> bool:
        assert self.sentences is not None
        return line * self.sentences // num_lines != (line + 1) * self.sentences // num_lines

    def _train(self, counts: Mapping[str, int], options: dict[str, Any]) -> bytes:
        sentencepiece_library()
        script = Path(__file__).with_name("subword_trainer.py")
        try:
            with tempfile.TemporaryFile() as words:
                words.writelines(f"{word}\t{count}\n".encode() for word, count in counts.items())
                words.seek(0)
                command = [sys.executable, "-P", str(script), json.dumps(options)]
                done = subprocess.run(command, stdin=words, capture_output=True, check=False)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            place = f"temporary files in {tempfile.gettempdir()} (TMPDIR)"  # which the error does not say
            raise OSError(error.errno, error.strerror, place) from None
        if done.returncode == 0:
            return done.stdout
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        if needed := re.search(r"smaller than required_chars\. \d+ vs (\d+)", said):
            rule = f"the training text needs at least {needed[1]} pieces (its characters, 256 bytes, special pieces)"
            raise usage_error("--vocab-size", self.vocab_size, rule, f"give --vocab-size {needed[1]} or more")
        what = f"ended by signal {-done.returncode}" if done.returncode < 0 else said or f"exit code {done.returncode}"
        raise usage_error(
            "SentencePiece", self.model_type, f"its trainer failed ({what})", "change --vocab-size or text"
        )
