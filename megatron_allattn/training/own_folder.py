"""The folder of --save as a run begins in it: that it holds no other run, what is made there first, and that it is the
same folder for every rank."""

import os
import re
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_allattn.checkpoint import folder
from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.checkpoint.run_folder import (
    CONFIG,
    FOLDER,
    LATEST,
    METRICS,
    begun_from,
    has_saved,
    prepare_run_folder,
    unwritable,
)
from megatron_allattn.config import RunConfig, usage_error
from megatron_allattn.config.disk import SEEN_SECONDS, appears
from megatron_allattn.parallel.collectives import broadcast_object
from megatron_allattn.parallel.groups import Group
from megatron_allattn.training.pace import PACE

_SIGN = re.compile(r"\.sign\.tmp-[0-9a-f]{32}(-[0-9]+)?")


def check_own_folder(run: RunConfig) -> None:
    """Raises UsageError: it holds another run, or a folder where files are to be."""
    run_folder = run.checkpoint.save
    if run_folder is None:
        return
    left = (METRICS, LATEST, f"{FOLDER}/*step_*")  # a start that came to nothing leaves none of these
    if not run.checkpoint.goes_on and any(any(run_folder.glob(pattern)) for pattern in left):
        _check_begins_again(run, run_folder)
    for name in (LATEST, PACE):  # which the first save replaces
        if (run_folder / name).is_dir():
            raise usage_error("--save", run_folder, f"has a folder {name}, where a file is to be", "remove it")


def _check_begins_again(run: RunConfig, run_folder: Path) -> None:
    """The folder of a run may be begun in again where that run came from the same checkpoint and has saved nothing."""
    rule, load = "holds a run already", run_folder
    source = None if has_saved(run_folder) else begun_from(run_folder)
    if source is not None:
        if run.checkpoint.load is not None and os.path.realpath(source) == os.path.realpath(run.checkpoint.load):
            return
        rule, load = f"holds a run that was begun with --load {source} and has saved nothing", source
    fix = f"give --load {load} to go on with it, or choose another folder"
    raise usage_error("--save", run_folder, rule, fix)


def prepare_own_folder(run: RunConfig, step_folder: Path | None) -> list[str]:
    """Make the run folder; lines to tell. step_folder: from which the run goes on. Raises UsageError, StorageError."""
    run_folder = run.checkpoint.save
    if run_folder is None:
        return []
    prepare_run_folder(run_folder)
    write_json_atomic(run_folder / CONFIG, run.to_dict())
    if step_folder is None or not (run.checkpoint.goes_on and run.checkpoint.load_fallback):
        return []
    return folder.set_aside_after(run_folder, step_folder)


def check_shared(run_folder: Path, world: Group, agreed: Callable[[Callable[[], Any]], Any], seconds: float) -> None:
    """Collective: every rank finds, and can write, the run folder that the first one has locked; each saves a part.

    agreed: calls a function that may fail on some ranks only (collectives.py: `agree`), which raises UsageError;
    seconds: the time-out of collectives, in which the others wait for one that waits for the folder.
    """
    seconds = min(SEEN_SECONDS, seconds / 2)
    sign: Path = broadcast_object(run_folder / f".sign.tmp-{uuid.uuid4().hex}", world)
    try:
        agreed(lambda: _make(sign) if world.rank == 0 else None)
        agreed(lambda: look_for(sign, run_folder, world.rank, seconds))
    finally:
        if world.rank == 0:
            sign.unlink(missing_ok=True)


def _make(sign: Path) -> None:
    """And remove those of starts that were killed. Raises UsageError."""
    try:
        for old in sign.parent.iterdir():
            if _SIGN.fullmatch(old.name):
                old.unlink()
        sign.touch()
    except OSError as error:
        raise unwritable(sign.parent, error) from error


def look_for(sign: Path, run_folder: Path, rank: int, seconds: float) -> None:
    """Raises UsageError: a file that the first rank has made is not seen here so long after, or none can be made."""
    place, own = f"rank {rank} on {socket.gethostname()}", sign.with_name(f"{sign.name}-{rank}")
    fix = "name a folder that every host sees, and may write"
    try:
        if not appears(sign, seconds):
            rule = f"is not the folder of rank 0 on {place}: a file made there is not seen after {seconds:g} s"
            raise usage_error("--save", run_folder, rule, fix)
        own.touch()
        own.unlink()
    except OSError as error:
        raise usage_error("--save", run_folder, f"cannot be written by {place} ({error.strerror})", fix) from error
