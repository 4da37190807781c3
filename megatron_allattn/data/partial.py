"""An unfinished download: FILE.part, and FILE.part.json, which says what it is a part of.

The lock of the part (flock, which ends with its process, however that ends) is the right to write it. Bytes without
notes, or with notes that cannot be read, count as none.
"""

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from megatron_allattn.config.disk import sha256_of
from megatron_allattn.config.errors import one_line, usage_error

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DownloadError(Exception):
    """A download that failed for reasons outside the command line; the message is one printable line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))  # whatever a server put into it


@dataclass(frozen=True)
class Origin:
    """Which file bytes are of: the address, the version its server names (None: none), its size (None: not known)."""

    url: str
    version: str | None
    num_bytes: int | None


class Part:
    """An unfinished file that this process alone writes; `locked_part` makes it."""

    def __init__(self, target: Path, file: FileIO) -> None:
        self.target, self.path, self._file = target, part_path(target), file
        self._notes = Path(f"{self.path}.json")

    @property
    def size(self) -> int:
        """Bytes that are there."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def origin(self) -> Origin | None:
        """What the bytes are of; None if there are none, or none of use."""
        try:
            return Origin(**json.loads(self._notes.read_bytes())) if self.size else None
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of the bytes that are there."""
        return sha256_of(self.path)

    def begin(self, origin: Origin) -> None:
        """Forget the bytes that are there; those that come are of `origin`."""
        try:
            self._file.truncate(0)
            self._notes.write_text(json.dumps(asdict(origin)))
        except OSError as error:
            raise self._unwritable(error, origin.num_bytes) from None

    def check_space(self, total: int) -> None:
        """DownloadError if the disk has no room for the rest of `total` bytes."""
        if shutil.disk_usage(self.path.parent).free < total - self.size:
            raise self._no_space(total)

    def append(self, data: bytes, total: int | None) -> None:
        """Add bytes at the end; `total`, the size of the whole if known, serves errors."""
        rest = memoryview(data)
        try:
            self._file.seek(0, os.SEEK_END)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._unwritable(error, total) from None

    def finish(self) -> None:
        """The bytes are the file: give it its name."""
        try:
            os.fsync(self._file.fileno())
            os.replace(self.path, self.target)
        except OSError as error:
            raise self._unwritable(error, None) from None
        self._forget_notes()

    def reject(self) -> Path:
        """The bytes are another file: put it aside; returns where it went."""
        aside = Path(f"{self.target}.rejected")
        try:
            os.replace(self.path, aside)
        except OSError as error:
            raise self._unwritable(error, None) from None
        self._forget_notes()
        return aside

    def tidy(self) -> None:
        """Leave no files behind if no bytes are there."""
        if not self.size:
            self._forget_notes()
            with suppress(OSError):  # what failed before is the error to report
                self.path.unlink()

    def _forget_notes(self) -> None:
        with suppress(OSError):  # notes without bytes count as none
            self._notes.unlink()

    def _unwritable(self, error: OSError, total: int | None) -> DownloadError:
        if error.errno in NO_SPACE:
            return self._no_space(total)
        return DownloadError(f"{self.path}: cannot be written ({error.strerror}); choose another --download-dir")

    def _no_space(self, total: int | None) -> DownloadError:
        free = shutil.disk_usage(self.path.parent).free
        needed = "more" if total is None else f"{total - self.size:,} bytes more"
        rule = f"no space: it needs {needed}, {free:,} are free on its disk"
        return DownloadError(f"{self.path}: {rule}; make room and start again, or choose another --download-dir")


@contextmanager
def locked_part(target: Path, notify: Callable[[str], None]) -> Iterator[Part | None]:
    """The right to write target's part, waited for; None if the target is there by then."""
    path = part_path(target)
    while not target.exists():
        with _open(path) as file:
            _lock(file, path, notify)
            if not _is_at(path, file):
                continue  # it was the part of a process that has finished
            part = Part(target, file)
            try:
                yield None if target.exists() else part
            finally:
                part.tidy()
            return
    yield None


def part_path(target: Path) -> Path:
    """FILE.part of FILE."""
    return Path(f"{target}.part")


def _open(path: Path) -> FileIO:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        rule = f"{path.name} in it cannot be written ({error.strerror})"
        raise usage_error("--download-dir", path.parent, rule, "choose a folder you can write to") from None
    file = FileIO(descriptor, "r+")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise usage_error("--download-dir", path.parent, f"{path.name} in it is not a regular file", "remove it")
    return file


def _is_at(path: Path, file: FileIO) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


def _lock(file: FileIO, path: Path, notify: Callable[[str], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        notify(f"waiting for the process that is at {path}")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        rule = f"its file system has no file locks ({error.strerror})"
        raise usage_error("--download-dir", path.parent, rule, "choose a folder on another file system") from None
