"""Following a JSON-lines file that a run appends to: what is new in it, never all of it again.

The last line may be half written: it is read when it is whole. A run that goes on replaces the file by a shorter one,
and anybody may. Then it begins anew: where there is another file under the name, one that is shorter than what was read
of it, or one with other bytes where the last ones read had stood.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_allattn.config.checks import check_regular
from megatron_allattn.config.errors import unreadable

PIECE = 2**20  # bytes of one read
LONGEST = 2**22  # of a line: longer ones are no records
_LAST = 64  # bytes of what was read last that are looked at again

Record = dict[str, Any]


@dataclass
class News:
    """What a look at the file has brought. anew: the file is another one, these are its first records and earlier ones
    do not count; more: there is more to read now."""

    records: list[Record] = field(default_factory=list)
    anew: bool = False
    more: bool = False


class Tail:
    """Reads a file that may not be there yet, or no more. no_records: how many of its lines are none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(None)

    def _begin(self, file: tuple[int, int] | None) -> None:
        self._file, self._offset, self._last, self._rest = file, 0, b"", b""
        self._skipping = False
        self.no_records = 0

    def look(self) -> News:
        """Read on, at most one piece. Raises UsageError: it is no file, or cannot be read."""
        news = News()
        fix = "check that path, or name another run"
        try:
            check_regular("file", self._path, fix)
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            news.anew = self._offset > 0
            self._begin(None)
            return news
        except OSError as error:
            raise unreadable("file", self._path, error, fix) from None
        try:
            self._read(descriptor, news)
        except OSError as error:
            raise unreadable("file", self._path, error, fix) from None
        finally:
            os.close(descriptor)
        return news

    def _read(self, descriptor: int, news: News) -> None:
        state = os.fstat(descriptor)
        file = (state.st_dev, state.st_ino)
        before = os.pread(descriptor, len(self._last), self._offset - len(self._last))
        if file != self._file or state.st_size < self._offset or before != self._last:
            news.anew = self._offset > 0
            self._begin(file)
        piece = os.pread(descriptor, PIECE, self._offset)
        self._offset += len(piece)
        self._last = (self._last + piece)[-_LAST:]
        news.more = len(piece) == PIECE
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if lines and self._skipping:
            self._skipping = False
            del lines[0]
        if len(self._rest) > LONGEST:
            self.no_records += not self._skipping
            self._rest, self._skipping = b"", True
        for line in lines:
            if (record := _record(line)) is None:
                self.no_records += 1
            else:
                news.records.append(record)


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("step")) is int
    return record if known else None
