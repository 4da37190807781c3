"""Megatron-LM's token files: P.bin holds the tokens of all sequences back to back, P.idx says where each begins.

The index, little-endian: "MMIDIDX" and two NUL bytes · uint64 version 1 · uint8 code of the token type · uint64 number
of sequences S · uint64 number of document marks D · S int32 sequence lengths in tokens · S int64 byte offsets into the
.bin · D int64 document marks: the sequences of document i are marks[i] … marks[i+1] − 1, so the first is 0, the last S.

Reading is one memory map over all tokens (sequences lie in order without gaps, which is checked), so a file larger than
memory costs nothing to open. Files written here have the bytes that Megatron-LM's own builder writes.
"""

import array
import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megatron_allattn.config.errors import UsageError, usage_error

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
LONGEST_SEQUENCE = 2**31 - 1  # lengths are int32

Tokens = npt.NDArray[Any]


def dtype_for_vocabulary(vocab_size: int) -> np.dtype[Any]:
    """The smallest type for ids below `vocab_size` that Megatron-LM reads; like there, uint16 only below 65500."""
    if vocab_size <= 256:
        return np.dtype("u1")
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: Path) -> Path:
    """PREFIX.bin, the tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path) -> Path:
    """PREFIX.idx, the index."""
    return Path(f"{prefix}.idx")


class IndexedReader:
    """Tokens of PREFIX.{bin,idx}, checked at opening; UsageError names the file, what it has and what was expected.

    dtype: type of a token · num_tokens · tokens: all tokens [num_tokens], a read-only memory map ·
    sequence_lengths [sequences] in tokens · document_indices [documents + 1] in sequences.
    """

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        index = idx_path(self.prefix)
        size = _file_size(index)
        code, num_sequences, num_marks = _read_header(index, size)
        self.dtype: np.dtype[Any] = np.dtype(CODES[code])
        expected = HEADER.size + 12 * num_sequences + 8 * num_marks
        if size != expected:
            modes = " (a multimodal index has as many bytes more)" if size == expected + num_sequences else ""
            rule = f"has {size} bytes, expected {expected} for {num_sequences} sequences and {num_marks} document marks"
            raise usage_error("token index", index, rule + modes, "copy or prepare it again")
        raw = np.memmap(index, mode="r")
        lengths_end = HEADER.size + 4 * num_sequences
        pointers_end = lengths_end + 8 * num_sequences
        self.sequence_lengths: Tokens = raw[HEADER.size : lengths_end].view("<i4")
        self.document_indices: Tokens = raw[pointers_end:].view("<i8")
        self.num_tokens = int(self.sequence_lengths.sum(dtype=np.int64))
        self._check_layout(index, raw[lengths_end:pointers_end].view("<i8"))
        self.tokens: Tokens = self._map_tokens()

    def _check_layout(self, index: Path, pointers: Tokens) -> None:
        """Lengths are not negative, sequences lie back to back, document marks rise from 0 to S."""
        lengths, marks = self.sequence_lengths, self.document_indices
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        again = "prepare it again"
        if (lengths < 0).any():
            where = int(np.argmax(lengths < 0))
            rule = f"sequence {where} has length {lengths[where]}, expected 0 or more"
            raise usage_error("token index", index, rule, again)
        wrong = pointers != starts * self.dtype.itemsize
        if wrong.any():
            where = int(np.argmax(wrong))
            rule = f"sequence {where} starts at byte {pointers[where]}, expected {starts[where] * self.dtype.itemsize}"
            raise usage_error("token index", index, f"{rule} (sequences must lie back to back)", again)
        if not len(marks) or marks[0] != 0 or marks[-1] != len(lengths) or (np.diff(marks) < 0).any():
            rule = f"its document marks do not rise from 0 to the number of sequences, {len(lengths)}"
            raise usage_error("token index", index, rule, again)

    def _map_tokens(self) -> Tokens:
        path = bin_path(self.prefix)
        size, expected = _file_size(path), self.num_tokens * self.dtype.itemsize
        if size != expected:
            rule = f"has {size} bytes, expected {expected} ({self.num_tokens} tokens of {self.dtype.name} by its index)"
            raise usage_error("token file", path, rule, "copy or prepare both files again")
        return np.memmap(path, dtype=self.dtype, mode="r") if size else np.empty(0, self.dtype)

    def documents(self) -> Iterator[list[Tokens]]:
        """Documents in order, each the list of its sequences (views into `tokens`)."""
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)
        starts = ends - self.sequence_lengths
        for first, last in zip(self.document_indices[:-1], self.document_indices[1:], strict=True):
            yield [self.tokens[starts[i] : ends[i]] for i in range(first, last)]


class IndexedWriter:
    """Writes PREFIX.{bin,idx}; the final names appear in close(), after the bytes are on disk, or never.

    As a context manager it closes on success and aborts on an exception. Memory: 4 bytes a sequence.
    """

    def __init__(self, prefix: Path | str, dtype: npt.DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self._code = next((code for code, name in CODES.items() if np.dtype(name) == self.dtype), None)
        if self._code is None:
            raise ValueError(f"token type {self.dtype.name}: Megatron-LM's index has no code for it")
        self._lengths = array.array("i")
        self._marks = array.array("q", [0])
        self._open_length = 0
        self._bin_partial = self._partial(bin_path(self.prefix))
        self._idx_partial = self._partial(idx_path(self.prefix))
        self._file: BinaryIO = self._bin_partial.open("wb")

    @staticmethod
    def _partial(path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}.partial")

    def append(self, tokens: Tokens) -> None:
        """Add tokens [n] to the open sequence; one longer than int32 allows goes on in a further sequence."""
        tokens = np.asarray(tokens)
        if tokens.dtype != self.dtype and tokens.size:
            limits = np.iinfo(self.dtype)
            if tokens.min() < limits.min or tokens.max() > limits.max:
                raise ValueError(f"tokens {tokens.min()} … {tokens.max()} do not fit into {self.dtype.name}")
        while tokens.size:
            part = tokens[: LONGEST_SEQUENCE - self._open_length]
            self._file.write(np.ascontiguousarray(part, self.dtype).data)
            self._open_length += len(part)
            tokens = tokens[len(part) :]
            if self._open_length == LONGEST_SEQUENCE:
                self.end_sequence()

    def end_sequence(self) -> None:
        """Close the open sequence; one without tokens is recorded too, as Megatron-LM does."""
        self._lengths.append(self._open_length)
        self._open_length = 0

    def add_sequence(self, tokens: Tokens) -> None:
        """Add one whole sequence [n]."""
        self.append(tokens)
        self.end_sequence()

    def end_document(self) -> None:
        """The sequences since the last call make up one document; tokens of an open sequence are closed into it."""
        if self._open_length:
            self.end_sequence()
        self._marks.append(len(self._lengths))

    def close(self) -> None:
        """Write the index, bring both files to disk and give them their names, the index last."""
        if self._open_length or self._marks[-1] != len(self._lengths):
            raise ValueError(f"{self.prefix}: the last document was not ended")
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        with self._idx_partial.open("wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._marks)))
            index.write(lengths.astype("<i4").tobytes())
            index.write(starts.astype("<i8").tobytes())
            index.write(np.asarray(self._marks, dtype="<i8").tobytes())
            index.flush()
            os.fsync(index.fileno())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._bin_partial, bin_path(self.prefix))
        os.replace(self._idx_partial, idx_path(self.prefix))

    def abort(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(OSError):  # a full disk fails once more when the buffer is flushed
            self._file.close()
        self._bin_partial.unlink(missing_ok=True)
        self._idx_partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise


def _file_size(path: Path) -> int:
    """Size in bytes of a regular file, or a UsageError that says what is there instead."""
    if path.is_dir():
        raise usage_error("token file", path, "is a folder, expected a file", "give the prefix of a .bin and .idx pair")
    if path.exists() and not path.is_file():
        raise usage_error("token file", path, "is not a regular file (it is mapped)", "copy the tokens to a file first")
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        rule = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise usage_error("token file", path, rule, "a token file needs both its .bin and its .idx") from None


def _read_header(index: Path, size: int) -> tuple[int, int, int]:
    """Code of the token type, number of sequences, number of document marks."""
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    found = head[: len(MAGIC)]
    if found and found != MAGIC[: len(found)]:
        raise _bad_header(index, f"starts with {found!r}, expected {MAGIC!r}")
    if len(head) < HEADER.size:
        raise _bad_header(index, f"has {size} bytes, expected at least {HEADER.size}")
    _, version, code, num_sequences, num_marks = HEADER.unpack(head)
    if version != VERSION:
        raise _bad_header(index, f"has version {version}, expected {VERSION}")
    if code not in CODES:
        raise _bad_header(index, f"has token type code {code}, expected one of {', '.join(map(str, CODES))}")
    if np.dtype(CODES[code]).kind == "f":
        raise _bad_header(index, f"holds {np.dtype(CODES[code]).name} numbers, expected integer tokens")
    return code, num_sequences, num_marks


def _bad_header(index: Path, rule: str) -> UsageError:
    return usage_error("token index", index, rule, "give an .idx that Megatron-LM or tools/prepare_data.py wrote")
