"""The commit protocol: a step folder is complete, or it is never used.

    RUN/checkpoints/.step_00000100.tmp-PID/   begin: everything is written here
    RUN/checkpoints/step_00000100/            commit: the files, flushed; manifest.json with their sizes and SHA-256;
                                              renamed into place; then COMPLETE, which holds the manifest's SHA-256
    RUN/latest                                the text step_00000100, for people and scripts; here it is trusted in one
                                              thing: that this step was complete

A kill at any point leaves either no COMPLETE, so that the step before it stays the newest, or a complete step. A step
that is saved again moves the old folder aside (.step_00000100.old-PID) until the new one is complete; `find_latest`
finds it there, and the next save puts it back. Only names that this file makes are ever renamed or deleted.

One process of a run calls `begin`, `commit` and `abort`; others may write files into the temporary folder in between.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from megatron_allattn.checkpoint.files import storage_errors, write_text_atomic
from megatron_allattn.checkpoint.manifest import MANIFEST, Check, check_hashes, check_sizes, verify, write_manifest
from megatron_allattn.checkpoint.run_folder import (
    ASIDE_NAME,
    FOLDER,
    LATEST,
    MARKER,
    STEP_NAME,
    named_by_latest,
    run_around,
    step_name,
    step_of,
)
from megatron_allattn.config.disk import sync_folder
from megatron_allattn.config.errors import Unreadable, UsageError

_OLDER = "name an older step folder to take that"
_OWN_TEMPORARY = re.compile(rf"\.({STEP_NAME.pattern})\.(tmp|old)-[1-9][0-9]*")


def begin(run_folder: Path, step: int) -> Path:
    """The empty temporary folder for a step; removes what killed saves have left. Raises StorageError."""
    assert step >= 0, f"step {step} is negative"
    parent = run_folder / FOLDER
    temporary = parent / f".{step_name(step)}.tmp-{os.getpid()}"
    with storage_errors(temporary, 0):
        parent.mkdir(parents=True, exist_ok=True)
        _clean(parent)
        temporary.mkdir()
    return temporary


def abort(temporary: Path) -> None:
    """Remove the temporary folder of a save that failed."""
    assert _OWN_TEMPORARY.fullmatch(temporary.name), f"{temporary} is not a temporary step folder"
    shutil.rmtree(temporary, ignore_errors=True)


def commit(temporary: Path, step: int, *, replace: bool = False, hashes: Mapping[str, str] | None = None) -> Path:
    """Make the temporary folder the complete folder of `step` and return that folder.

    hashes: SHA-256 of files, by name, that their writers have flushed to the disk; the others are flushed and read.
    A complete folder of the same step is replaced only if `replace` is true (FileExistsError otherwise), and is usable
    until the new one is complete. Raises StorageError when a write fails; the temporary folder is then removed.
    """
    final = temporary.parent / step_name(step)
    assert temporary.name.startswith(f".{final.name}.tmp-"), f"{temporary} is not of step {step}"
    aside = temporary.with_name(f".{final.name}.old-{os.getpid()}")
    try:
        if not replace and is_complete(final):
            raise FileExistsError(f"{final} is complete already")
        with storage_errors(final, 0):
            digest = write_manifest(temporary, step, hashes or {})
            if os.path.lexists(final):
                # What is not ours (a user's file, link or folder) is kept under a name that is never deleted.
                os.rename(final, aside if _is_ours(final) else _free_name(final, "set-aside"))
                sync_folder(final.parent)
            os.rename(temporary, final)
            sync_folder(final.parent)
            write_text_atomic(final / MARKER, digest + "\n")
    except BaseException:
        with suppress(OSError):  # what cannot be undone now, the next begin undoes
            _undo(temporary, final, aside)
        raise
    write_text_atomic(final.parent.parent / LATEST, final.name + "\n")
    with storage_errors(final.parent, 0):
        _clean(final.parent)
    return final


def is_complete(folder: Path) -> bool:
    """Whether a folder's save has ended: marker, manifest and all sizes agree (`verify` reads the bytes too)."""
    return _why_unusable(folder, None) is None


class Damaged(UsageError):
    """A step that was complete is no longer what it was: `folder`. named: what the message begins with, if not that."""

    def __init__(self, folder: Path, reason: str, named: Path | None = None) -> None:
        super().__init__(f"{named or folder}: {reason}")
        self.folder = folder


class Gone(UsageError):
    """A step folder is no longer there."""


@contextmanager
def told_if_gone(folder: Path) -> Iterator[None]:
    """What fails because its run deletes a step folder that was there raises Gone, which says so."""
    try:
        yield
    except (UsageError, FileNotFoundError) as error:
        if folder.is_dir():
            raise
        rule = "is gone, its run has deleted it meanwhile (--keep-latest-k)"
        raise Gone(f"{folder}: {rule}; try again, or name a step that is kept") from error


def find_latest(run_folder: Path, *, check: Check | None = None, way_out: str | None = None) -> tuple[Path, list[str]]:
    """The newest complete step folder of a run, and one line for each entry that was passed over, with the reason.

    A step whose save has not ended is passed over, and so is one that is damaged unless there is a `way_out` to name:
    then it raises Damaged where there is an older one. With a `check` a folder must also pass `verify`. Reads only;
    where the run deletes meanwhile what is looked at, it has a newer one, and is looked at again.
    Raises UsageError when the run has none.
    """
    parent, named = run_folder / FOLDER, named_by_latest(run_folder)
    told = "" if named is None else f", though {run_folder / LATEST} names {named!a}"
    if not parent.is_dir():
        run = run_around(run_folder)
        fix = "name a run folder" if run is None else f"name the run folder {run}"
        fix = f"bring it back (is its disk mounted?), or {fix}" if told else fix
        raise UsageError(f"{run_folder}: no checkpoint to load: there is no folder {parent}{told}; {fix}")
    candidates, others = _candidates(run_folder)
    skipped: list[str] = []
    damaged = None
    for path in candidates:
        if (reason := _why_no_candidate(path) or _why_unusable(path, check)) is not None:
            if not path.exists() and path != _step_named(run_folder):
                return find_latest(run_folder, check=check, way_out=way_out)
            if damaged is None and way_out is not None and _was_complete(run_folder, path):
                damaged = Damaged(path, f"{reason}; {way_out}")
            skipped.append(f"{path}: {reason}")
            continue
        if damaged is not None:
            raise damaged
        if named is not None and named != step_name(step_of(path)):
            skipped.append(f"{run_folder / LATEST}: it names {named!a}, but {path.name} is the newest complete step")
        return path, [*skipped, *others]
    skipped += others  # steps first: of many lines the error has the first
    reasons = f" (passed over: {'; '.join(skipped[:3])}{'; …' if len(skipped) > 3 else ''})" if skipped else ""
    message = f"no complete checkpoint in {parent}{reasons}{told}; name another run folder"
    raise UsageError(f"{run_folder}: {message}") if damaged is None else Damaged(damaged.folder, message, run_folder)


def _candidates(run_folder: Path) -> tuple[list[Path], list[str]]:
    """The step folders of a run, newest first, one that is moved aside after that in its place, and a line for each
    entry that is none. The step that `latest` names, which was complete, is one of them whatever has become of it."""
    steps, others = [], []
    named = _step_named(run_folder)
    for path in sorted((run_folder / FOLDER).iterdir()):
        if (reason := _why_no_candidate(path)) is None:
            steps.append(path)
        elif path != named:
            others.append(f"{path}: {reason}")
    if named is not None and step_of(named) not in map(step_of, steps):
        steps.append(named)
    return sorted(steps, key=lambda path: (step_of(path), not path.name.startswith(".")), reverse=True), others


def _step_named(run_folder: Path) -> Path | None:
    """Where the step that `latest` names has been; None where that names none."""
    name = named_by_latest(run_folder) or ""
    return run_folder / FOLDER / name if STEP_NAME.fullmatch(name) else None


def find(path: Path, check: Check = check_hashes, way_out: str | None = _OLDER) -> tuple[Path, list[str]]:
    """The newest step of a run folder, or one step folder, of which every byte is right, and as of `find_latest` what
    was passed over. Raises UsageError."""
    if (path / FOLDER).is_dir() or not (path / MANIFEST).exists():
        return find_latest(path, check=check, way_out=way_out)
    with told_if_gone(path):
        verify(path, check)
    return path, []


def _was_complete(run_folder: Path, path: Path) -> bool:
    """Whether a step folder that cannot be used once could: it has its marker, or is the last one whose save ended and
    is not being replaced."""
    if (path / MARKER).exists():
        return True
    return path == _step_named(run_folder) and not any(
        ASIDE_NAME.fullmatch(one.name) for one in path.parent.glob(f".{path.name}.old-*")
    )


def set_aside_after(run_folder: Path, step_folder: Path) -> list[str]:
    """Rename the complete steps after this one, which were passed over as damaged, so that they count as steps no more;
    a line for each. Nothing deletes them. `latest` names no step after this one from then on. Raises StorageError."""
    parent, lines = run_folder / FOLDER, []
    for path in sorted(parent.iterdir()):
        is_step = _why_no_candidate(path) is None and _was_complete(run_folder, path)
        if is_step and step_of(path) > step_of(step_folder):
            aside = _free_name(path.with_name(path.name.strip(".")), "damaged")
            with storage_errors(aside, 0):
                os.rename(path, aside)
                sync_folder(parent)
            lines.append(f"{path} is now {aside.name}, since that step will be made again; nothing deletes it")
    named = _step_named(run_folder)
    if named is not None and step_of(named) > step_of(step_folder):
        write_text_atomic(run_folder / LATEST, step_name(step_of(step_folder)) + "\n")
    return lines


def _free_name(path: Path, why: str) -> Path:
    """PATH.WHY-1, or with the first number that is not taken: what has once been put aside is never replaced."""
    names = (path.with_name(f"{path.name}.{why}-{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def retain(run_folder: Path, step: int, keep: int, every: int) -> list[str]:
    """Of the complete steps up to `step`, keep the last `keep` (0: all) and, unless `every` is 0, its multiples.

    A folder gets the name of a temporary one first, so that a kill leaves nothing that looks like a step. Returns a
    line for each that cannot be deleted, now or since an earlier save: it is in nobody's way, and is tried again.
    """
    parent = run_folder / FOLDER
    lines = _retire(parent, step, keep, every) if keep else []  # every step is looked at there
    return lines + _clean(parent)


def _retire(parent: Path, step: int, keep: int, every: int) -> list[str]:
    """Give the steps that `retain` does not keep names of temporary folders; a line for each that cannot have one."""
    lines = []
    own = [path for path in parent.iterdir() if STEP_NAME.fullmatch(path.name) and _why_no_candidate(path) is None]
    steps = sorted(step_of(path) for path in own if step_of(path) <= step and _is_known_complete(path))
    for old in steps[:-keep]:
        if not every or old % every:
            path = parent / step_name(old)
            try:
                os.rename(path, parent / f".{path.name}.tmp-{os.getpid()}")
            except OSError as error:
                lines.append(_why_left(path, error))
    with storage_errors(parent, 0):
        sync_folder(parent)
    return lines


def _is_known_complete(path: Path) -> bool:
    """A step that may not be looked at is none that may be deleted."""
    try:
        return is_complete(path)
    except (Unreadable, OSError):
        return False


def _why_left(path: Path, error: OSError) -> str:
    return f"{path} cannot be deleted ({error.filename}: {error.strerror}); remove it by hand"


def _undo(temporary: Path, final: Path, aside: Path) -> None:
    """After a failed commit: the step's old folder is in place again, and nothing of the new one is left."""
    if not temporary.exists() and final.exists() and not is_complete(final):
        os.rename(final, temporary)
    if aside.exists() and not final.exists():
        os.rename(aside, final)
    abort(temporary)


def _clean(parent: Path) -> list[str]:
    """Remove leftovers of killed saves; put a moved-aside folder back when its replacement never became complete. A
    line for each that cannot be removed (another's file in it, a mount, a file that NFS keeps for its reader)."""
    left = []
    for path in sorted(parent.iterdir(), reverse=True):  # .tmp before .old
        match = _OWN_TEMPORARY.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        final = parent / match[1]
        if match[3] == "old" and is_complete(path) and not is_complete(final):
            unfinished = parent / f".{final.name}.tmp-{os.getpid()}"
            if _is_ours(final):
                os.rename(final, unfinished)
            if not os.path.lexists(final):
                os.rename(path, final)
            path = unfinished
        try:
            if path.exists():
                shutil.rmtree(path)
        except OSError as error:
            left.append(_why_left(path, error))
    sync_folder(parent)
    return left


def _is_ours(path: Path) -> bool:
    """Whether a commit made this folder (the manifest is in it before it gets its name)."""
    return path.is_dir() and not path.is_symlink() and (path / MANIFEST).is_file()


def _why_no_candidate(path: Path) -> str | None:
    step = step_of(path)
    if _OWN_TEMPORARY.fullmatch(path.name) and step < 0:
        return "left by a save that did not end"
    if step < 0:
        return "not the name of a step folder"
    if path.is_symlink() or not path.is_dir():
        return "not a folder" if os.path.lexists(path) else "it is gone"
    return None


def _why_unusable(folder: Path, check: Check | None) -> str | None:
    try:
        if check is None:
            check_sizes(folder)
        else:
            verify(folder, check)
    except Unreadable:
        raise
    except (UsageError, FileNotFoundError) as error:
        return str(error).removeprefix("file ").removeprefix(f"{folder}: ").removeprefix(f"{folder}/")
    return None
