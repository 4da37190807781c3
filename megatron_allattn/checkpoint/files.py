"""Files that are either whole or not there, and errors of the storage in one line.

A file is written under a temporary name, flushed to the disk (fsync), renamed over the old one (atomic on POSIX file
systems), and the rename itself is flushed by an fsync of the folder. A kill or a power cut at any point leaves the old
file or the new one. A JSON-lines file only grows, one write per line, so that at most its last line can be torn.
"""

import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_allattn.config.checks import check_regular
from megatron_allattn.config.disk import sha256_of, sync_folder
from megatron_allattn.config.errors import UsageError, unreadable, usage_error
from megatron_allattn.config.json_files import MAX_BYTES, parse_json

_ANOTHER = "name another one or remove it"
WITHOUT_LINE = "take the line out, or move the file away"
_NO_SUCH_RENAME = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems and kernels that do not know it
_NOREPLACE = 1  # RENAME_NOREPLACE, of Linux's renameat2


class StorageError(RuntimeError):
    """The disk is full, read-only or failing; the message is one line with the path and the way out."""


@contextmanager
def storage_errors(path: Path, needed: int) -> Iterator[None]:
    """Translate an OSError while `needed` bytes (0: unknown) are written to `path` into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(_describe(path, needed, error)) from error


def _describe(path: Path, needed: int, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cause, fix = "no space left", "free some space or save to another folder"
    elif error.errno == errno.EFBIG:
        cause, fix = "the file size limit is reached", "raise it (ulimit -f) or save to another folder"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        cause, fix = "the folder is not writable", "change its permissions or save to another folder"
    else:
        cause, fix = f"cannot be written ({error.strerror or error})", "check the disk or save to another folder"
    sizes = f"{needed:,} bytes needed, " if needed else ""
    return f"{path}: {cause}: {sizes}{_free_bytes(path)}; {fix}"


def _free_bytes(path: Path) -> str:
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    try:
        return f"{shutil.disk_usage(path).free:,} bytes free"
    except OSError:  # a disk that fails may not even tell this
        return "free bytes unknown"


def check_new(path: Path) -> None:
    """UsageError for an --output that exists already, or whose folder does not."""
    if os.path.lexists(path):
        raise usage_error("--output", path, "exists already", _ANOTHER)
    if not os.path.isdir(path.absolute().parent):  # unlike Path.is_dir, never an error
        raise usage_error("--output", path, f"there is no folder {path.absolute().parent}", "make it first")


@contextmanager
def made_whole(output: Path) -> Iterator[Path]:
    """A name beside `output` under which to make the file or folder; it gets its own name once it is complete.

    What is made must be on the disk by then, but for its own entry. If that fails, or is killed, `output` is not there;
    what killed ones have left is removed. Raises UsageError: it exists, at the beginning or the end, its folder does
    not, or another process of this host is making it; StorageError.
    """
    check_new(output)
    output = output.absolute()
    temporary = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    with storage_errors(output, 0):
        ours = re.compile(re.escape(f".{output.name}.tmp-") + r"([0-9]+)")
        left = [(path, int(match[1])) for path in output.parent.iterdir() if (match := ours.fullmatch(path.name))]
        for path, process in left:
            if _is_another(process):
                rule = f"process {process} is making it as {path}"
                raise usage_error("--output", output, rule, "wait for its end, or remove that if it is no conversion")
            _remove(path)
    try:
        yield temporary
        with storage_errors(output, 0):
            if temporary.is_dir():
                sync_folder(temporary)
            try:
                _rename_new(temporary, output)
            except FileExistsError:
                raise usage_error("--output", output, "has appeared meanwhile", _ANOTHER) from None
            sync_folder(output.parent)
    except BaseException:
        _remove(temporary)
        raise


def _is_another(process: int) -> bool:
    """Whether another process with this number is alive on this host."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is somebody else's
        return True
    return process != os.getpid()


def _rename_new(source: Path, target: Path) -> None:
    """Rename a file or folder. Raises FileExistsError where there is something of that name: nothing is replaced."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        here = -100  # AT_FDCWD: paths are as the process sees them
        if libc.renameat2(here, os.fsencode(source), here, os.fsencode(target), _NOREPLACE) == 0:
            return
        if (number := ctypes.get_errno()) not in _NO_SUCH_RENAME:
            raise OSError(number, os.strerror(number), os.fspath(target))
    if not source.is_dir():
        os.link(source, target)
        os.unlink(source)
        return
    if os.path.lexists(target):  # and what appears after this is replaced only where it is an empty folder
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
    os.rename(source, target)


def _remove(path: Path) -> None:
    """A file or a folder of ours, if it is there; a link to one is not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif path.is_file() and not path.is_symlink():
        with suppress(OSError):  # what failed before is the error to report
            path.unlink()


def describes_file(entry: dict[str, Any]) -> bool:
    """Whether an entry of a manifest has what `check_size` and `check_sha256` hold a file against."""
    return type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)


def check_size(path: Path, expected: int) -> None:
    """UsageError unless it is a file, and no link to one, of so many bytes."""
    if path.is_symlink() or not path.is_file():
        found = "a symbolic link" if path.is_symlink() else "none"
        raise UsageError(f"{path}: expected a file of {expected:,} bytes, found {found}")
    if (size := path.stat().st_size) != expected:
        raise UsageError(f"{path}: damaged: expected {expected:,} bytes, found {size:,}")


def check_sha256(path: Path, expected: str) -> None:
    """UsageError unless a file's bytes have this SHA-256."""
    try:
        found = sha256_of(path)
    except OSError as error:
        raise unreadable("file", path, error, "check the disk and the permissions") from error
    if found != expected:
        raise UsageError(f"{path}: damaged: expected SHA-256 {expected}, found {found}")


def num_bytes_under(folder: Path) -> int:
    """Of all files in a folder and the folders in it; links are not followed."""
    return sum((Path(place) / name).lstat().st_size for place, _, names in os.walk(folder) for name in names)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` by a file with this text (UTF-8). Raises StorageError; the old file is then still there."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """The same, of bytes."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with storage_errors(path, len(content)):
        try:
            with open(temporary, "wb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):  # the first error is the one to report
                temporary.unlink()
            raise
        sync_folder(path.parent)


def write_json_atomic(path: Path, obj: Any) -> None:
    """Replace `path` by `obj` as indented JSON. Floats are written so that they read back to the same bits."""
    write_text_atomic(path, json.dumps(obj, indent=2, ensure_ascii=False) + "\n")


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record to a JSON-lines file, as one write. Raises StorageError."""
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    with storage_errors(path, len(line)), open(path, "ab", buffering=0) as handle:
        if handle.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; a torn last line (its writer was killed) is left out. No file: no records.

    Raises UsageError naming a line that is no record, or the file, where it is none or cannot be read.
    """
    return list(iterate_json_lines(path))


def iterate_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The same, one at a time, in the memory of one line."""
    try:
        check_regular("file", path, "move it away")
        if not path.exists():
            return
        with path.open("rb") as handle:
            lines = iter(lambda: handle.readline(MAX_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > MAX_BYTES:
                    rule = f"line {number} has more than {MAX_BYTES:,} bytes, the most that is read of one"
                    raise usage_error("file", path, rule, WITHOUT_LINE)
                if line.endswith(b"\n"):
                    yield _parse_line(path, number, line)
    except OSError as error:
        raise unreadable("file", path, error, "move it away") from None


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    record = parse_json("file", path, line, f"line {number}: {WITHOUT_LINE}")
    if not isinstance(record, dict):
        raise usage_error("file", path, f"line {number} holds no object", WITHOUT_LINE)
    return record


def write_json_lines_atomic(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace a JSON-lines file, for example to drop the records after the step that a run resumes from."""
    write_text_atomic(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
