"""What groups of ranks can do, measured: clocks against the first rank's, all-reduces and messages, right and how fast.

Every function is collective over its group. Rates are bytes per second that a rank sends, so that they compare with
those of a link: a ring all-reduce of S bytes over n ranks sends 2·(n − 1)/n·S from each.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_allattn.parallel.collectives import all_reduce
from megatron_allattn.parallel.groups import Group

EXACT = 1021
"""Values are whole numbers up to this one: sums of them over a segment's only contributor are exact in any order."""

COMMON = 31
"""The same of the segment to which all contribute, times their positions: exact in float32 up to 1,000 ranks."""


def barrier(group: Group, device: torch.device) -> None:
    """Wait until every rank of the group is here, and what each has given to its device is done."""
    all_reduce(torch.zeros(1, device=device), group)
    finish(device)


def finish(device: torch.device) -> None:
    """Wait for what the device has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Offset:
    """How far a clock is ahead of the first rank's, in seconds, and by how much that may be wrong."""

    seconds: float
    uncertainty: float


def clock_offset(
    ranks: Sequence[int], group: Group, rounds: int = 16, clock: Callable[[], float] = time.time
) -> Offset | None:
    """On each of `ranks` (global, none of them the first of the group): its clock beside the first rank's.

    The rank asks, the first answers with its time; the answer was given somewhere between question and arrival, so the
    middle of the two is wrong by at most half of what lies between them. The quickest of the rounds counts.
    """
    first, mine = group.ranks[0], group.ranks[group.rank]
    found: Offset | None = None
    for rank in ranks:
        assert rank != first
        for _ in range(rounds):
            message = torch.zeros(1, dtype=torch.float64)
            if mine == rank:
                asked = clock()
                dist.send(message, first, group=group.handle)
                dist.recv(message, first, group=group.handle)
                heard = clock()
                offset = Offset((asked + heard) / 2 - message.item(), (heard - asked) / 2)
                found = offset if found is None or offset.uncertainty < found.uncertainty else found
            elif mine == first:
                dist.recv(message, rank, group=group.handle)
                message.fill_(clock())
                dist.send(message, rank, group=group.handle)
    return found


def contribution(group: Group, elements: int, device: torch.device) -> Tensor:
    """What this rank brings to an all-reduce whose result is known: a segment of each rank's own, where all others have
    zeros, and one to which all contribute. A wrong result in a segment tells whose part was wrong."""
    segment = elements // (group.size + 1)
    assert segment > 0, f"{elements} elements for {group.size} ranks"
    tensor = torch.zeros(group.size + 1, segment, device=device)
    values = torch.arange(segment, device=device)
    tensor[group.rank] = (values % EXACT + 1).float()
    tensor[-1] = (values % COMMON + 1).float() * (group.rank + 1)
    return tensor


def wrong_elements(tensor: Tensor, group: Group) -> list[int]:
    """How many elements of each segment of the summed `contribution` are not what they must be."""
    values = torch.arange(tensor.shape[1], device=tensor.device)
    own = (values % EXACT + 1).float()
    common = (values % COMMON + 1).float() * (group.size * (group.size + 1) // 2)
    wrong = (tensor[:-1] != own).sum(dim=1).tolist()
    return [*wrong, int((tensor[-1] != common).sum())]


def timed_all_reduces(group: Group, world: Group, elements: int, device: torch.device, rounds: int) -> list[float]:
    """Seconds that each of some all-reduces of float32 takes this rank, all groups of its kind at the same time."""
    tensor = torch.zeros(elements, device=device)
    times = []
    for _ in range(rounds + 1):  # the first one makes connections and does not count
        barrier(world, device)
        begin = time.perf_counter()
        all_reduce(tensor, group)
        finish(device)
        times.append(time.perf_counter() - begin)
    return times[1:]


def sent_by_all_reduce(num_bytes: int, size: int) -> float:
    """Bytes that a rank sends in a ring all-reduce."""
    return 2 * (size - 1) / size * num_bytes


@dataclass(frozen=True)
class Message:
    """An exchange with another rank: seconds that it took, and elements that arrived wrong."""

    peer: int
    seconds: float
    wrong: int


def exchange(peer: int | None, group: Group, world: Group, elements: int, device: torch.device) -> Message | None:
    """Send float32 to another rank and receive as many, both at the same time; every rank takes part, those without a
    peer by waiting. Pairs must be of each other."""
    mine = group.ranks[group.rank]
    values = torch.arange(elements, device=device) % EXACT
    out, into = (values + mine % COMMON).float(), torch.zeros(elements, device=device)
    barrier(world, device)
    if peer is None:
        return None
    begin = time.perf_counter()
    operations = [
        dist.P2POp(dist.isend, out, peer, group=group.handle),
        dist.P2POp(dist.irecv, into, peer, group=group.handle),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    finish(device)
    took = time.perf_counter() - begin
    return Message(peer, took, int((into != (values + peer % COMMON).float()).sum()))
