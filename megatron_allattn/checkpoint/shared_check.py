"""The hashes of a checkpoint's files, shared out among the ranks.

The first rank looks for the checkpoint to load. Hashing it takes minutes where it has terabytes, and the others would
wait for the first in vain (`--distributed-timeout-minutes`). So every rank hashes one file at a time and says what it
has found before the next ones: nobody waits longer than a file takes, and all of them are done sooner.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_allattn.checkpoint.files import check_sha256
from megatron_allattn.checkpoint.manifest import Hashed, check_hashes
from megatron_allattn.config.errors import Unreadable, UsageError
from megatron_allattn.parallel.collectives import broadcast_object, gather_objects
from megatron_allattn.parallel.groups import Group

T = TypeVar("T")


def with_shared_check(find: Callable[[Callable[[Sequence[Hashed]], None]], T], group: Group) -> T | None:
    """What `find` gives on the first rank, to which a check of files is given that all ranks share; None on the others.
    Collective.

    Raises what `find` raises, on the first rank.
    """
    if group.rank > 0:
        while (turn := broadcast_object(None, group)) is not None:
            gather_objects(_own_error(turn, group.rank), group)
        return None

    def check(files: Sequence[Hashed]) -> None:
        for start in range(0, len(files), group.size):
            turn = files[start : start + group.size]
            broadcast_object(turn, group)
            for rank, error in enumerate(gather_objects(_own_error(turn, 0), group)):
                if error is not None:
                    _judge(turn[rank], group.ranks[rank], error)

    try:
        return find(check)
    finally:
        broadcast_object(None, group)


def _own_error(turn: Sequence[Hashed], rank: int) -> str | None:
    """What is wrong with this rank's file of a turn."""
    if rank >= len(turn):
        return None
    try:
        check_sha256(*turn[rank])
    except (UsageError, OSError) as error:
        return str(error)
    return None


def _judge(file: Hashed, rank: int, error: str) -> None:
    """The first rank looks itself at a file that another could not read or found damaged: only what it finds damaged,
    too, is damage. Raises its own error, or Unreadable: the other's host sees another file."""
    check_hashes([file])
    raise Unreadable(
        f"{file[0]}: it is intact here, but rank {rank} finds: {error}; see to the file system of its host"
    )
