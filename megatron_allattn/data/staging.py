"""Writing prepared data so that it is there whole or not at all, also under kill -9 and with several writers.

All files are written in the hidden folder .P.preparing beside the prefix P, whose lock (flock, which ends with its
process) is the right to write P. At the end they are moved to their names, the manifest last. A folder left by a killed
process is unlocked, and the next one clears it.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_allattn.config.disk import sync_folder
from megatron_allattn.config.errors import usage_error
from megatron_allattn.data.manifest import data_paths, manifest_path

LOCK_NAME = "lock"


@contextlib.contextmanager
def staging_folder(prefix: Path, *, wait: bool) -> Iterator[Path]:
    """Hold the only right to write `prefix` and give an empty folder to write in; it is gone afterwards.

    `wait`: wait for another process that prepares the same prefix; otherwise that is a UsageError. Missing parent
    folders are made, and removed again after a failure.
    """
    made = _make_folders(prefix.parent)
    folder = prefix.parent / f".{prefix.name}.preparing"
    try:
        lock = _acquire(folder, prefix, wait)
        try:
            _clear(folder)
            yield folder
        finally:
            with contextlib.suppress(OSError):  # it hides neither an error nor that all is done; the next one clears
                _clear(folder)
                (folder / LOCK_NAME).unlink(missing_ok=True)
                folder.rmdir()  # not if the next process has just put its lock into it
            os.close(lock)
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):  # not empty: others use it by now
                parent.rmdir()
        raise


def publish(folder: Path, prefix: Path) -> None:
    """Move the finished files from `folder` to their names; the manifest goes first, comes last.

    Older files of that name are put aside in `folder` until all is done, and put back when it cannot be done.
    """
    manifest = manifest_path(prefix)
    targets = [*data_paths(prefix).values(), manifest]
    for target in targets:
        if target.is_dir():
            raise usage_error("output prefix", prefix, f"{target} is a folder", "choose another prefix or remove it")
    aside: dict[Path, Path] = {}
    placed: list[Path] = []
    try:
        for target in reversed(targets):
            if os.path.lexists(target):
                aside[target] = folder / f"old-{target.name}"
                os.replace(target, aside[target])
        for target in targets:
            if target == manifest:
                sync_folder(prefix.parent)
            placed.append(target)
            os.replace(folder / target.name, target)
        sync_folder(prefix.parent)
    except BaseException:
        for target in targets:
            with contextlib.suppress(OSError):  # the error that led here is the one to report
                if target in placed:
                    target.unlink()
            with contextlib.suppress(OSError):
                if target in aside:
                    os.replace(aside[target], target)
        raise


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and its missing parents; returns those made, deepest first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise usage_error("output folder", folder, f"cannot be made ({error.strerror})", "choose another") from None
    return missing


def _acquire(folder: Path, prefix: Path, wait: bool) -> int:
    """Lock `folder`, making it; returns the lock's file descriptor."""
    path = folder / LOCK_NAME
    while True:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            rule = f"cannot write in its folder ({error.strerror})"
            raise usage_error("output prefix", prefix, rule, "choose another prefix") from None
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # its owner has finished and removed the folder in between
            continue
        except OSError as error:
            raise usage_error("lock", path, f"cannot be opened ({error.strerror})", "choose another prefix") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if path.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        except FileNotFoundError:
            pass  # the lock of a process that has finished; start anew
        except BlockingIOError:
            os.close(lock)
            rule = "another process is preparing the same data"
            raise usage_error("output prefix", prefix, rule, "wait for it or choose another prefix") from None
        except OSError as error:
            os.close(lock)
            rule = f"its file system has no file locks ({error.strerror})"
            raise usage_error("output prefix", prefix, rule, "choose a folder on another file system") from None
        os.close(lock)


def _clear(folder: Path) -> None:
    """Remove what a preparation leaves in `folder`, files only, except the lock."""
    for path in folder.glob("*"):
        if path.name != LOCK_NAME:
            path.unlink(missing_ok=True)
