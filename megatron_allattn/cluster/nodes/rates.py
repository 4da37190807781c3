"""What ranks compute and send, measured together as a training would have them: the part that needs torch.

All ranks compute at the same time, and all groups of a kind reduce at the same time, since that is what a step does to
a node's power, memory and links. Every function is collective over all ranks; results are on every rank.
"""

import time
from collections.abc import Iterator

import torch

from megatron_allattn.cluster.nodes.judging import GroupRate, Link
from megatron_allattn.cluster.nodes.places import Places
from megatron_allattn.parallel import probes
from megatron_allattn.parallel.collectives import all_reduce, gather_objects
from megatron_allattn.parallel.groups import Group, Groups

SIDES = {"cpu": 384, "cuda": 8192}  # of the square matrices that are multiplied
COMPUTE_SECONDS = {"cpu": 0.3, "cuda": 2.0}  # long enough for a GPU to get as warm as throttles it at once
MEGABYTES = {"cpu": 4, "cuda": 256}  # of a message
ROUNDS = 5  # of an all-reduce; the quickest counts
PAIRINGS = 4
"""How many other nodes each exchanges messages with: one that is slow with all of them is slow itself."""


def compute_rates(groups: Groups, control: Group, device: torch.device) -> dict[int, float]:
    """GFLOP/s of each rank in products of float32 (bfloat16 on a GPU) matrices, the best of the second half."""
    side = SIDES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    factor = torch.ones(side, side, device=device, dtype=dtype)
    product = torch.empty_like(factor)
    probes.barrier(groups.world, device)
    times: list[float] = []
    end = time.perf_counter() + COMPUTE_SECONDS[device.type]
    while len(times) < 4 or time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(factor, factor, out=product)
        probes.finish(device)
        times.append(time.perf_counter() - begin)
    rate = 2 * side**3 / min(times[len(times) // 2 :]) / 1e9
    return dict(enumerate(gather_objects(rate, control)))


def kinds(groups: Groups) -> Iterator[tuple[str, Group]]:
    """The groups of this rank in which a training reduces, those of more than one rank."""
    for kind, group in (("TP", groups.tensor), ("PP", groups.pipeline), ("DP", groups.data)):
        if group.size > 1:
            yield kind, group


def group_rates(groups: Groups, control: Group, device: torch.device, megabytes: int | None) -> list[list[GroupRate]]:
    """Every group's all-reduce, a list for each kind."""
    elements = (megabytes or MEGABYTES[device.type]) * 1_000_000 // 4
    found = []
    for kind, group in kinds(groups):
        summed = all_reduce(probes.contribution(group, elements, device), group)
        wrong = probes.wrong_elements(summed, group)
        times = probes.timed_all_reduces(group, groups.world, elements, device, ROUNDS)
        told: list[tuple[tuple[int, ...], list[int], list[float]]] = gather_objects(
            (group.ranks, wrong, times), control
        )
        by_group: dict[tuple[int, ...], list[tuple[list[int], list[float]]]] = {}
        for ranks, wrong, times in told:
            by_group.setdefault(ranks, []).append((wrong, times))
        sent = probes.sent_by_all_reduce(4 * elements, group.size)
        found.append(
            [
                GroupRate(
                    kind=kind,
                    ranks=ranks,
                    # a round is over when its last rank is
                    rate=sent / min(map(max, zip(*(times for _, times in rows), strict=True))),
                    wrong=tuple(tuple(wrong) for wrong, _ in rows),
                )
                for ranks, rows in by_group.items()
            ]
        )
    return found


def links(groups: Groups, control: Group, places: Places, device: torch.device, megabytes: int | None) -> list[Link]:
    """Exchanges between nodes, all ranks of a node with those of another at the same time."""
    elements = (megabytes or MEGABYTES[device.type]) * 1_000_000 // 4
    found = []
    for pairs in pairings(len(places.nodes)):
        peer = peer_of(groups.rank, places, pairs)
        for counts in (False, True):  # the first exchange of two makes their connection
            message = probes.exchange(peer, groups.world, groups.world, elements, device)
            told = gather_objects(message, control)
            found += [
                Link(rank, one.peer, 4 * elements / one.seconds, one.wrong)
                for rank, one in enumerate(told)
                if counts and one is not None
            ]
    return found


def pairings(nodes: int) -> list[dict[int, int]]:
    """Rounds in which every node (but one, of an odd number) has a partner, another in each: at most `PAIRINGS`.

    The circle of a tournament: one stays, the others move on by one seat a round, and opposite seats meet.
    """
    if nodes < 2:
        return []
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(min(PAIRINGS, len(seats) - 1)):
        pairs: dict[int, int] = {}
        for one, other in zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True):
            if one is not None and other is not None:
                pairs |= {one: other, other: one}
        rounds.append(pairs)
        seats[1:] = [seats[-1], *seats[1:-1]]
    return rounds


def peer_of(rank: int, places: Places, pairs: dict[int, int]) -> int | None:
    """The rank of the partner node that stands where this one does on its own; None where there is none."""
    node = places.of_rank[rank]
    partner = pairs.get(places.nodes.index(node))
    if partner is None:
        return None
    place, others = places.ranks(node).index(rank), places.ranks(places.nodes[partner])
    return others[place] if place < len(others) else None
