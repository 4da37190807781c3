"""Whether all ranks see one folder: each writes, flushes and renames, and looks at what the others have written."""

import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_allattn.cluster.nodes.checks import Check
from megatron_allattn.cluster.nodes.places import Places
from megatron_allattn.cluster.nodes.storage import NAME, PREFIX, put, remove
from megatron_allattn.config.disk import POLL_SECONDS, SEEN_SECONDS, appears
from megatron_allattn.parallel.collectives import broadcast_object, gather_objects
from megatron_allattn.parallel.groups import Group

FIRST, SECOND = b"first", b"second"  # what a file holds before and after it is renamed over


def shared_checks(folder: Path, places: Places, world: Group, seconds: float = SEEN_SECONDS) -> list[Check]:
    """Collective; the checks are on every rank. seconds: how long files may take to be seen."""
    own = folder / f"{PREFIX}{uuid.uuid4().hex}"
    trouble = _try(lambda: own.mkdir()) if world.rank == 0 else ""
    meeting, trouble = broadcast_object((own, trouble), world)
    if trouble:
        return [_check(folder, places.of_rank[0], trouble)]
    try:
        troubles = _look(meeting, world, seconds)
    finally:
        if world.rank == 0:
            for rank in range(world.size):
                remove(_file(meeting, rank))
            with suppress(OSError):
                meeting.rmdir()
    by_node = {places.of_rank[rank]: trouble for rank, (trouble, _) in reversed([*enumerate(troubles)]) if trouble}
    waited = max(after for _, after in troubles)
    good = f"every file seen by all ranks, {world.size}" + (f", after {waited:.1f} s" if waited >= POLL_SECONDS else "")
    return [_check(folder, node, by_node.get(node, ""), good) for node in places.nodes]


def _look(meeting: Path, world: Group, seconds: float) -> Sequence[tuple[str, float]]:
    """What went wrong on each rank (nothing: empty), and how long it waited to see what others had written."""
    mine = _file(meeting, world.rank)
    trouble, waited = _meet(meeting, seconds)
    trouble = trouble or _try(lambda: put(mine, _content(FIRST, world.rank)))
    troubles = gather_objects(trouble, world)
    if not any(troubles):
        trouble = _try(lambda: put(mine, _content(SECOND, world.rank)))
        troubles = gather_objects(trouble, world)
    if not any(troubles):
        trouble, more = _read_all(meeting, world, seconds)
        waited = max(waited, more)
    found: list[tuple[str, float]] = gather_objects((trouble, waited), world)  # also: nobody removes what others read
    return found


def _meet(meeting: Path, seconds: float) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        seen = appears(meeting, seconds)
    except OSError as error:
        return _told(error), 0.0
    trouble = "" if seen else f"a folder that rank 0 made there was not seen within {seconds:g} s"
    return trouble, time.monotonic() - begin


def _read_all(meeting: Path, world: Group, seconds: float) -> tuple[str, float]:
    """Wait until every rank's file has its second content; what is not as it should be after so long."""
    begin = time.monotonic()
    waiting = dict.fromkeys(range(world.size), "")
    while True:
        for rank in list(waiting):
            waiting[rank] = _wrong(_file(meeting, rank), rank)
            if not waiting[rank]:
                del waiting[rank]
        took = time.monotonic() - begin
        if not waiting or took > seconds:
            break
        time.sleep(POLL_SECONDS)
    if not waiting:
        return "", took
    rank, what = next(iter(waiting.items()))
    return (
        f"of {len(waiting)} of {world.size} ranks the file was not seen within {seconds:g} s (rank {rank}: {what})",
        took,
    )


def _wrong(path: Path, rank: int) -> str:
    """What another sees of a rank's file, empty where it is the second one, whole."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return "no file"
    except OSError as error:
        return f"{error.strerror}"
    if content == _content(SECOND, rank):
        return ""
    return "the content before the rename" if content == _content(FIRST, rank) else f"{len(content)} other bytes"


def _content(which: bytes, rank: int) -> bytes:
    return b"%b of rank %d\n" % (which, rank) * 1000


def _file(meeting: Path, rank: int) -> Path:
    return meeting / f"rank_{rank}"


def _try(action: object) -> str:
    """What the file system says against an action, if it does."""
    assert callable(action)
    try:
        action()
    except OSError as error:
        return _told(error)
    return ""


def _told(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})"


def _check(folder: Path, node: str, trouble: str, good: str = "") -> Check:
    return Check(
        name=NAME,
        node=node,
        status="fault" if trouble else "ok",
        found=trouble or good,
        asked=f"{os.fspath(folder)}: written, flushed and renamed files seen by all ranks",
        way_out="mount one file system there on all nodes, for writing, or name another folder with --shared",
    )
