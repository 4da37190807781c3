"""Files' bytes and their way to the disk, for data/ and checkpoint/, which may not import each other."""

import errno
import hashlib
import os
import time
from pathlib import Path

SEEN_SECONDS = 60.0
"""What a file gets to be seen on another host: NFS looks anew after 3 to 60 s, mostly at once."""

POLL_SECONDS = 0.1


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Flush a file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries (creations, renames, deletions) to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no fsync for folders: renames are synchronous
            raise
    finally:
        os.close(descriptor)


def appears(path: Path, seconds: float) -> bool:
    """Wait for what another host makes; whether it is there within `seconds`. Raises OSError: one may not look."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
