"""Where text comes from: files of the user, or the standard library of the running Python, which every machine has.

Text is UTF-8. A file with a NUL byte (so it is no text) or invalid UTF-8 is refused with file, line and byte offset. A
byte-order mark at the start of a file is not text: it is dropped, and the manifest says so. Line ends are kept
(CRLF stays CRLF).
"""

import codecs
import os
import platform
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_allattn.config.errors import UsageError, usage_error

STANDARD_LIBRARY_LIMIT = 32 * 2**20  # bytes in all; CPython 3.11 has 13 MB by the rules below
STANDARD_LIBRARY_FILE_LIMIT = 2**20  # bytes of one file; generated tables are larger
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")  # differ from machine to machine


@dataclass(frozen=True)
class Document:
    """One document of a corpus: a name for messages and the manifest, the file that holds it, the flag that gave it."""

    name: str
    path: Path
    flag: str = "--input"

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    @property
    def instead(self) -> str:
        """The way out if it holds no text."""
        return "leave it out"

    def open(self, offset: int = 0) -> BinaryIO:
        """The file's bytes from `offset` on."""
        file = self.path.open("rb")
        file.seek(offset)
        return file


@dataclass(frozen=True)
class Corpus:
    """Documents in their order, what they are, and how many files were left out because they are not text."""

    description: str
    documents: tuple[Document, ...]
    num_skipped: int = 0


def files_corpus(inputs: Sequence[str | Path], flag: str = "--input") -> Corpus:
    """Files, a document each, in the order given; each must be a readable regular file that is not empty.

    `flag` names them in errors.
    """
    documents = tuple(Document(str(name), Path(name), flag) for name in inputs)
    for document in documents:
        _check_input(document.path, flag)
    return Corpus("text files", documents)


def _check_input(path: Path, flag: str) -> None:
    fix = "give text files"
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size:
            path.open("rb").close()
    except OSError as error:
        rule = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise usage_error(flag, path, rule, fix) from None
    if stat.S_ISDIR(status.st_mode):
        raise usage_error(flag, path, "is a folder", f"name the files in it, for example {path}/*.txt")
    if not stat.S_ISREG(status.st_mode):
        raise usage_error(
            flag, path, "is not a regular file (it is read more than once)", "save the text to a file first"
        )
    if not status.st_size:
        raise usage_error(flag, path, "is empty", fix)


def standard_library() -> Corpus:
    """Python source files of the running interpreter's standard library, sorted by path.

    All *.py below sysconfig's stdlib folder except tests, installed packages, files that differ from machine to machine
    (`SKIPPED_FILES`), empty files, files over 1 MiB, and files that are not UTF-8 text (these are counted); from the
    first on, as many as fit into 32 MiB.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents, total, skipped = [], 0, 0
    for path in sorted(_python_files(root), key=lambda path: path.relative_to(root).as_posix()):
        size = path.stat().st_size
        if not 0 < size <= STANDARD_LIBRARY_FILE_LIMIT:
            continue
        if total + size > STANDARD_LIBRARY_LIMIT:
            break
        document = Document(path.relative_to(root).as_posix(), path)
        try:
            check_text(document)
        except UsageError:
            skipped += 1
            continue
        documents.append(document)
        total += size
    if not documents:
        raise usage_error("standard library", root, "has no Python sources here", "give your own text to --data-path")
    return Corpus(f"standard library of Python {platform.python_version()}", tuple(documents), skipped)


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith(SKIPPED_FILES):
                yield Path(folder, name)


def read_bytes(document: Document, chunk_bytes: int, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The document's bytes from `start` to `end` (None: its end) in pieces of at most `chunk_bytes`."""
    with document.open(start) as file:
        left = sys.maxsize if end is None else end - start
        while chunk := file.read(min(chunk_bytes, left)):
            yield chunk
            left -= len(chunk)


def line_number(document: Document, offset: int) -> int:
    """The number, from 1, of the line that byte `offset` of the file is in."""
    return 1 + sum(chunk.count(b"\n") for chunk in read_bytes(document, 2**20, 0, offset))


def whole_characters(document: Document, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The document's bytes, cut anew between characters: checked to be text, no byte-order mark, no empty piece."""
    pending, offset, line = b"", 0, 1  # bytes of a cut character; offset and line at which `pending` starts
    for chunk in chunks:
        data = pending + chunk
        whole = _whole_characters(document, data, offset, line, final=False)
        text, pending = data[:whole], data[whole:]
        line += text.count(b"\n")
        if offset == 0:  # a mark is one character, so it is never cut
            text = text.removeprefix(codecs.BOM_UTF8)
        offset += whole
        if text:
            yield text
    _whole_characters(document, pending, offset, line, final=True)


def check_text(document: Document) -> None:
    """Read a document through. Raises UsageError: it is no text."""
    for _ in whole_characters(document, read_bytes(document, 2**20)):
        pass


def _whole_characters(document: Document, data: bytes, offset: int, line: int, *, final: bool) -> int:
    """How many bytes of `data`, which starts at `offset` and `line`, are whole characters; refuses what is not text."""
    wrong, reason = data.find(b"\0"), "is a NUL byte, so the file is not text"
    try:
        whole = codecs.utf_8_decode(data if wrong < 0 else data[:wrong], "strict", final or wrong >= 0)[1]
    except UnicodeDecodeError as error:
        wrong, reason = error.start, f"(byte 0x{data[error.start]:02x}) is not valid UTF-8: {error.reason}"
    if wrong < 0:
        return whole
    line += data.count(b"\n", 0, wrong)
    if offset == 0 and data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        reason += " (the file starts like UTF-16)"
    fix = "convert it to UTF-8, or keep every byte as it is with the byte tokenizer's --raw-bytes"
    raise usage_error(document.flag, document.name, f"line {line}, byte offset {offset + wrong} {reason}", fix)
