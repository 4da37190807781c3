"""One run per run folder: RUN/lock, held from before the first look at the folder until the run is over.

The lock is the kernel's (flock), so that it ends with the process, however that ends. The file says who holds it, and
one that a killed process has left blocks nothing. Network file systems pass the lock on to other hosts, or refuse it.
"""

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.checkpoint.run_folder import OUTCOME, unwritable
from megatron_allattn.config.errors import usage_error

NAME = "lock"
_TRIES, _PAUSE_SECONDS = 4, 0.05
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system, as flock reports them


class RunLock:
    """The lock of a run folder, which is made if need be. Constructing it takes the lock.

    notes: a line where the file system has no locks, so that the folder is not guarded.

    Raises UsageError when another process holds the lock or the folder cannot be written.
    """

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / NAME
        self._made: list[Path] = []
        self.notes: list[str] = []
        try:
            self._made = [path for path in (run_folder, *run_folder.parents) if not path.exists()]
            run_folder.mkdir(parents=True, exist_ok=True)
            while not self._lock_file():
                pass
        except OSError as error:
            self._remove_folders()
            raise unwritable(run_folder, error) from error

    def release(self) -> None:
        """Give the lock up and remove its file, and the folders made for it if they are still empty."""
        with suppress(OSError):  # a folder that is gone, or not writable any more
            if _is_file(self._descriptor, self._path):  # someone may have removed ours, and another run made its own
                self._path.unlink()  # while it is held: a new file is another one's to lock
        os.close(self._descriptor)
        self._remove_folders()

    def check(self) -> None:
        """Raises StorageError where the file that is locked is not there any more: the folder was removed or its disk
        is gone, and what is saved now would be a run without its beginning; or another run may have the folder."""
        try:
            if _is_file(self._descriptor, self._path):
                return
            why = "is not the file that this run has locked"
        except OSError as error:
            why = f"cannot be looked at ({error.strerror})"
        raise StorageError(f"{self._path}: {why}; the folder was removed or its disk is gone: nothing is saved there")

    def _lock_file(self) -> bool:
        """Lock the file of that name; False if it has just been removed by the one who held it. A link is not followed:
        what it leads to would be overwritten."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _lock(self._descriptor)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                owner = os.pread(self._descriptor, 1000, 0).decode(errors="replace").strip() or "another process"
                os.close(self._descriptor)
                fix = "wait for its end or choose another folder"
                raise usage_error("--save", self._path.parent, f"is in use by {owner}", fix) from None
            if error.errno not in _NO_LOCKS:
                os.close(self._descriptor)
                raise
            self.notes = [f"{self._path.parent} is not locked ({error.strerror}): start no second run on it"]
        if not _is_file(self._descriptor, self._path):
            os.close(self._descriptor)
            return False
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return True

    def _remove_folders(self) -> None:
        with suppress(OSError):  # not empty: something has been put there since
            for path in self._made:
                path.rmdir()


def _lock(descriptor: int) -> None:
    """Raises BlockingIOError where another one holds the lock, and not only for the moment in which `is_held` looks."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_PAUSE_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def forget_outcome(run_folder: Path) -> None:
    """Remove what an earlier start has left as its outcome, so that it is not taken for that of a start that comes to
    nothing before it has the lock; unless a run holds that. Makes nothing, and what cannot be removed stays."""
    with suppress(OSError):
        if not is_held(run_folder):
            (run_folder / OUTCOME).unlink(missing_ok=True)


def is_held(run_folder: Path) -> bool:
    """Whether a process holds the lock, as far as the file system tells."""
    try:
        descriptor = os.open(run_folder / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    finally:
        os.close(descriptor)
    return False


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
