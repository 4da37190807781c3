"""Files that `torch.save` wrote, read without running a line of what is in them.

Such a file is a program for Python's unpickler. It is read with `torch.load(weights_only=True)`, which builds tensors
and plain values and refuses everything else. Older releases of torch can be made to run code all the same
(CVE-2025-32434 before 2.6, CVE-2026-24747 before 2.10), so nothing is opened with one of those. Neither torch nor the
format notices a flipped bit; the archive's own check sums do, so they are compared first (files of torch before 1.6 are
no archives and have none). An archive's tensors are mapped, not read: each is in memory while it is used.
"""

import os
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from megatron_allattn.checkpoint.files import made_whole, storage_errors
from megatron_allattn.checkpoint.tensors import same_bits
from megatron_allattn.config.checks import check_regular
from megatron_allattn.config.errors import UsageError, usage_error

MINIMUM_TORCH = "2.10"
_ARCHIVE = b"PK\x03\x04"  # how the archives that torch.save writes begin
_PICKLE = b"\x80"  # how what older ones wrote begins
_GIVE = "give a file that torch.save wrote"


def read_pickled(path: Path) -> Any:
    """What `torch.save` wrote to `path`, on the CPU: tensors in dictionaries and lists of plain values.

    Raises UsageError, one line: no such file, damaged, another format, or it holds something other than data.
    """
    if torch.__version__ < MINIMUM_TORCH:
        rule = f"torch before {MINIMUM_TORCH} may run code from a file while it reads it (CVE-2026-24747)"
        raise usage_error("torch", torch.__version__, rule, f"install torch {MINIMUM_TORCH} or newer")
    if not path.exists():
        raise usage_error("file", path, "is not there", _GIVE)
    check_regular("file", path, _GIVE)
    try:
        _check_sums(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UsageError:
        raise
    except OSError as error:
        raise usage_error("file", path, f"cannot be read ({error.strerror or error})", _GIVE) from error
    except Exception as error:  # whatever the unpickler meets in a file made by somebody else
        raise usage_error("file", path, _reason(path, error), _GIVE) from None


def _check_sums(path: Path) -> None:
    """Compare every byte of an archive with its check sums; a file that is no archive passes."""
    if not zipfile.is_zipfile(path):  # which is told by an archive's end
        with path.open("rb") as handle:
            if handle.read(len(_ARCHIVE)) == _ARCHIVE:
                raise usage_error("file", path, "is cut short: the end of the archive is missing", "copy it again")
        return
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise usage_error("file", path, "is a compressed archive, which torch.save does not write", _GIVE)
        if (damaged := archive.testzip()) is not None:
            raise usage_error("file", path, f"is damaged: the check sum of {damaged} does not fit", "copy it again")


def _reason(path: Path, error: Exception) -> str:
    if not path.stat().st_size:
        return "is empty"
    if wanted := re.search(r"GLOBAL (\S+)", str(error)):
        return f"would call {wanted[1]} when loaded; it was refused, nothing of it has run"
    with path.open("rb") as handle:
        if not handle.read(len(_ARCHIVE)).startswith((_ARCHIVE, _PICKLE)):
            return "is nothing that torch.save wrote"
    return f"is damaged or nothing that torch.save wrote ({type(error).__name__})"


def write_pickled(path: Path, content: Any) -> None:
    """Write `content` by `torch.save` under a temporary name, flush it, read it back and give it its name. Nothing is
    replaced.

    Raises UsageError: `path` exists or its folder does not, or what is read back is not what was written; StorageError:
    it cannot be written. Nothing is then left.
    """
    with made_whole(path) as temporary:
        dump(temporary, content, path)
        if (place := _difference(content, read_pickled(temporary))) is not None:
            raise usage_error("file", path, f"does not read back what was written: {place}", "write it to another disk")


def _difference(written: Any, read: Any, place: str = "content") -> str | None:
    """Where two nested contents differ first, in a bit of a tensor or in anything else; None where they do not."""
    if type(written) is not type(read):
        return place
    if isinstance(written, dict):
        inner = ((written[key], read[key], f"{place}/{key}") for key in written.keys() & read.keys())
        same = list(written) == list(read)
    elif isinstance(written, list | tuple):
        inner = (
            (one, other, f"{place}/{index}") for index, (one, other) in enumerate(zip(written, read, strict=False))
        )
        same = len(written) == len(read)
    else:
        same = same_bits(written, read) if isinstance(written, torch.Tensor) else written == read
        return None if same else place
    return next((found for one in inner if (found := _difference(*one)) is not None), None if same else place)


def dump(path: Path, content: Any, known_as: Path | None = None) -> None:
    """Write a new file by `torch.save` and flush it. Raises StorageError, which leaves a partial file.

    known_as: what it will be called, for the error.
    """
    with storage_errors(known_as or path, _num_bytes(content)), open(path, "xb") as handle:
        output = _Output(handle)
        try:
            torch.save(content, cast(BinaryIO, output))
        except RuntimeError as error:  # torch's own report of a write that failed says nothing of the disk
            raise output.error or OSError(f"torch.save failed: {error}") from error
        handle.flush()
        os.fsync(handle.fileno())


class _Output:
    """A file that `torch.save` writes to; error: what the system said of a write that failed."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return self._handle.write(content)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._handle.flush()


def _num_bytes(content: Any) -> int:
    """Bytes of the different tensors in nested dictionaries."""
    found: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[value.data_ptr()] = value.nbytes
        elif isinstance(value, dict):
            for one in value.values():
                visit(one)

    visit(content)
    return sum(found.values())
