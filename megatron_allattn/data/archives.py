"""Members of a zip archive, read as streams: nothing is unpacked to disk, and no other member is touched.

What zipfile lets pass, or tells in a traceback, is refused in one line that names archive, member, rule and way out:
an archive that is cut short or none at all, a member that is missing, encrypted or compressed in another way than by
deflate, a size that its compression cannot give, and bytes whose number or CRC-32 is not the one stated.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.data.corpora import Document

DEFLATE_LIMIT = 1032  # bytes that one byte of deflate can stand for
SKIP_BYTES = 2**20
GET_AGAIN = "get the archive again, or give another one with --archive"
ENCRYPTED = 0x1  # bit of a member's flags
DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, NotImplementedError)


class MemberStream(io.RawIOBase):
    """A member's bytes from its first on; reading it to the end proves their number and CRC-32."""

    def __init__(self, path: Path, member: str) -> None:
        self._path, self._member, self._count = path, member, 0
        self._archive = _open(path)
        try:
            info = _info(self._archive, path, member)
            self.num_bytes = info.file_size
            with _told(path, member):
                self._file = self._archive.open(info)
        except BaseException:
            self._archive.close()
            raise

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not len(buffer):
            return 0
        with _told(self._path, self._member):
            data = self._file.read(len(buffer))
        self._count += len(data)
        if not data and self._count != self.num_bytes:
            raise _refusal(self._path, self._member, f"has {self._count:,} bytes, {self.num_bytes:,} are stated")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            self._archive.close()
        super().close()


@dataclass(frozen=True)
class ArchiveMember(Document):
    """A member of a zip as a document; `path` is the zip."""

    member: str = ""

    @classmethod
    def of(cls, archive: Path, member: str) -> "ArchiveMember":
        """The member; the name for messages and the manifest has no folder, so that it is the same everywhere."""
        return cls(f"{archive.name}:{member}", archive, "archive member", member)

    @property
    def num_bytes(self) -> int:
        """Size of the member; UsageError if it is not there or could not be read."""
        with _open(self.path) as archive:
            return _info(archive, self.path, self.member).file_size

    @property
    def instead(self) -> str:
        """The corpus is not whole without it."""
        return GET_AGAIN

    def open(self, offset: int = 0) -> BinaryIO:
        """The member's bytes from `offset` on (those before are decompressed and thrown away)."""
        stream = MemberStream(self.path, self.member)
        while offset > 0 and (skipped := len(stream.read(min(offset, SKIP_BYTES)))):
            offset -= skipped
        return cast(BinaryIO, stream)


def _open(path: Path) -> zipfile.ZipFile:
    with _told(path, None):
        return zipfile.ZipFile(path)


def _info(archive: zipfile.ZipFile, path: Path, member: str) -> zipfile.ZipInfo:
    """The member's record, checked."""
    found = [info for info in archive.infolist() if info.filename == member]
    if len(found) != 1:
        names = ", ".join(archive.namelist()[:5]) or "nothing"
        raise _refusal(path, member, f"is in it twice (it holds {names})" if found else f"is missing, it holds {names}")
    info = found[0]
    if info.flag_bits & ENCRYPTED:
        raise _refusal(path, member, "is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _refusal(path, member, f"is compressed by method {info.compress_type}, expected deflate (8) or none (0)")
    ratio = DEFLATE_LIMIT if info.compress_type == zipfile.ZIP_DEFLATED else 1
    if info.file_size > ratio * info.compress_size:
        rule = f"states {info.file_size:,} bytes out of {info.compress_size:,}, more than its compression can give"
        raise _refusal(path, member, rule)
    return info


@contextmanager
def _told(path: Path, member: str | None) -> Iterator[None]:
    """Tell zipfile's errors in one line."""
    try:
        yield
    except DAMAGED as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise _refusal(path, member, f"is damaged or cut short ({reason})") from None


def _refusal(path: Path, member: str | None, rule: str) -> UsageError:
    what = "archive" if member is None else f"member {member} of archive"
    return usage_error(what, path, rule, GET_AGAIN)
