"""How ranks meet: a store that the first one (or torchrun's agent) holds, and who is missing where not all come.

torch waits for the number of ranks and can say no more than how many there are. Here each leaves its host at the
store, so that whoever has waited long enough can name the ranks that did not come, and where they should have been.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

POLL_SECONDS = 0.1
HOLDER_SECONDS = 1.0
"""What rank 0, with which the store ends, stays after it has given up, so that others hear of it."""

_HERE, _COUNT, _ALL, _GAVE_UP = "here", "count", "all", "gave up"  # keys of the store


@dataclass(frozen=True)
class Arrival:
    """Where a rank is: the host's name, which of its ranks it is, and how many are there."""

    host: str
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Missing:
    """Not all have come. told_by: the rank that says so for all; message: who is missing, for that one."""

    told_by: int
    message: str = ""


def open_store(rank: int, world_size: int, address: str, port: int, seconds: float) -> dist.Store:
    """Open the store at this address, or connect to it. Raises RuntimeError (torch's): in use, nobody there in time.

    The store of torchrun's agent outlives ranks that it starts anew (--max-restarts): what those before have left in it
    is none of theirs.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    held = dist.TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0 and not agent,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"meeting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", held)


def wait_for_all(store: dist.Store, here: Arrival, rank: int, world_size: int, seconds: float) -> Missing | None:
    """Wait until all ranks have come; None, or who is missing after so many seconds, told by the first to give up."""
    store.set(f"{_HERE}/{rank}", json.dumps(asdict(here)))
    if store.add(_COUNT, 1) == world_size:
        store.set(_ALL, "")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if store.check([_GAVE_UP]):
            return Missing(int(store.get(_GAVE_UP)))
        if store.check([_ALL]):
            return None
        time.sleep(POLL_SECONDS)
    speaker = int(store.compare_set(_GAVE_UP, "", str(rank)))
    if speaker != rank:
        return Missing(speaker)
    arrived = {
        other: Arrival(**json.loads(store.get(f"{_HERE}/{other}")))
        for other in range(world_size)
        if store.check([f"{_HERE}/{other}"])
    }
    if rank == 0:
        time.sleep(HOLDER_SECONDS)
    return Missing(rank, missing_words(arrived, world_size))


def missing_words(arrived: Mapping[int, Arrival], world_size: int) -> str:
    """`missing: rank 3, 8-15 of 16 (3 on n1; 8-15 on hosts from which no rank came)`.

    A host's ranks are taken to be consecutive, as launchers number them, unless one that is there says otherwise.
    """
    missing = [rank for rank in range(world_size) if rank not in arrived]
    by_host: dict[str, list[int]] = {}
    for rank in missing:
        by_host.setdefault(_host_of(rank, arrived), []).append(rank)
    nowhere = by_host.pop("", [])
    places = [f"{spans(ranks)} on {host}" for host, ranks in by_host.items()]
    places += [f"{spans(nowhere)} on hosts from which no rank came"] if nowhere else []
    return f"missing: rank {spans(missing)} of {world_size} ({'; '.join(places)})"


def _host_of(rank: int, arrived: Mapping[int, Arrival]) -> str:
    """The host on which a missing rank should be, empty where none that came can tell."""
    for other, here in arrived.items():
        first = other - here.local_rank
        block = range(first, first + here.local_world_size)
        if rank in block and all(arrived[one].host == here.host for one in block if one in arrived):
            return here.host
    return ""


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers with runs of them joined: `3, 8-15`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
