"""What measurements over a group come to: pure functions of numbers, without torch.

A rank, a group or a link is slow beside its like: below a stated part of their median. What is right or wrong needs no
comparison.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_allattn.cluster.nodes.checks import ALL, Check
from megatron_allattn.cluster.nodes.places import Places


@dataclass(frozen=True)
class GroupRate:
    """An all-reduce of one group. wrong: by rank of the group, wrong elements of each segment (parallel/probes.py);
    rate: bytes per second that a rank sends."""

    kind: str
    ranks: tuple[int, ...]
    rate: float
    wrong: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Link:
    """An exchange of a rank with one of another node."""

    rank: int
    peer: int
    rate: float
    wrong: int


def clock_checks(offsets: Mapping[int, tuple[float, float]], places: Places, most: float) -> list[Check]:
    """offsets: by rank (the first of each node but rank 0's), how far its clock is ahead of rank 0's, and by how much
    that may be wrong; most: seconds that are let pass."""
    asked = f"within {most:g} s of {places.of_rank[0]}"
    checks = []
    for rank, (seconds, uncertainty) in offsets.items():
        far = abs(seconds) - uncertainty > most
        unknown = not far and abs(seconds) + uncertainty > most
        checks.append(
            Check(
                name="clock",
                node=places.of_rank[rank],
                status="fault" if far else "unchecked" if unknown else "ok",
                found=f"{_seconds(seconds)} ± {_seconds(uncertainty).lstrip('+')}",
                asked=asked,
                way_out="start a time service there (chronyd, ntpd), or allow more with --max-clock-skew-seconds",
            )
        )
    return checks or [Check(name="clock", node=places.of_rank[0], status="unchecked", found="one node: no other clock")]


def _seconds(value: float) -> str:
    return f"{value:+.1f} s" if abs(value) >= 10 else f"{1e3 * value:+.2f} ms" if abs(value) < 1 else f"{value:+.3f} s"


def rate_checks(name: str, rates: Mapping[int, float], places: Places, part: float, unit: str) -> list[Check]:
    """Ranks beside each other. rates: by rank, in `unit`; part: of the median that each must reach."""
    if len(rates) < 2:
        return [
            Check(name=name, node=ALL, status="unchecked", found=f"{_all(rates, unit)}: nothing to compare it with")
        ]
    median = statistics.median(rates.values())
    slowest = min(rates, key=lambda rank: rates[rank])
    found = f"median {median:.4g} {unit}, slowest {rates[slowest] / median:.2f} × (rank {slowest} on "
    found += f"{places.of_rank[slowest]})"
    asked = f"at least {part:g} × the median"
    checks = [Check(name=name, node=ALL, status="ok", found=found, asked=asked)]
    for node in places.nodes:
        slow = [rank for rank in places.ranks(node) if rank in rates and rates[rank] < part * median]
        if slow:
            ratios = ", ".join(f"rank {rank} {rates[rank] / median:.2f} ×" for rank in slow)
            checks.append(
                Check(
                    name=name,
                    node=node,
                    status="fault",
                    found=f"{ratios} the median {median:.4g} {unit}",
                    asked=asked,
                    way_out="see what else runs there, its clocks and temperatures, cables and ports; or leave it out",
                )
            )
    return checks


def _all(rates: Mapping[int, float], unit: str) -> str:
    return ", ".join(f"{rate:.4g} {unit}" for rate in rates.values()) or "none was measured"


def group_checks(groups: Sequence[GroupRate], places: Places, part: float) -> list[Check]:
    """All-reduces of the groups of one kind: right, and none slow beside the others."""
    if not groups:
        return []
    name = f"{groups[0].kind} all-reduce"
    return [*_wrong_sums(name, groups, places), *_slow_groups(name, groups, places, part)]


def _wrong_sums(name: str, groups: Sequence[GroupRate], places: Places) -> list[Check]:
    """Whose part is wrong in every rank's sum, and else who has a wrong sum."""
    checks = []
    for group in groups:
        rows = dict(zip(group.ranks, group.wrong, strict=True))
        if not any(map(any, group.wrong)):
            continue
        parts = [rank for place, rank in enumerate(group.ranks) if all(row[place] for row in group.wrong)]
        for rank in parts or [rank for rank, row in rows.items() if any(row)]:
            count = max(row[group.ranks.index(rank)] for row in group.wrong) if parts else sum(rows[rank])
            what = f"what rank {rank} gives is wrong in all sums" if parts else f"rank {rank} has a wrong sum"
            checks.append(
                Check(
                    name=name,
                    node=places.of_rank[rank],
                    status="fault",
                    found=f"{what} ({count} elements) of the group {list(group.ranks)}",
                    asked="the exact sum on every rank",
                    way_out="leave the node out: its memory, its GPU or its network changes data",
                )
            )
    return checks


def _slow_groups(name: str, groups: Sequence[GroupRate], places: Places, part: float) -> list[Check]:
    size = len(groups[0].ranks)
    median = statistics.median(group.rate for group in groups)
    slowest = min(groups, key=lambda group: group.rate)
    found = f"{counted(len(groups), 'group')} of {size}: {median / 1e9:.4g} GB/s a rank"
    if len(groups) > 1:
        found = found.replace("GB/s a rank", "GB/s a rank in the median")
        found += f", slowest {slowest.rate / median:.2f} × (ranks {list(slowest.ranks)} on {places.on(slowest.ranks)})"
    asked = f"exact sums; at least {part:g} × the median" if len(groups) > 1 else "exact sums"
    checks = [Check(name=name, node=ALL, status="ok", found=found, asked=asked)]
    for group in groups:
        if group.rate < part * median:
            checks.append(
                Check(
                    name=name,
                    node=places.on(group.ranks),
                    status="fault",
                    found=f"ranks {list(group.ranks)}: {group.rate / median:.2f} × the median {median / 1e9:.4g} GB/s",
                    asked=f"at least {part:g} × the median",
                    way_out="see compute rate and link rate of the node, and its links (nvidia-smi topo -m)",
                )
            )
    return checks


def link_checks(links: Sequence[Link], places: Places, part: float) -> list[Check]:
    """Exchanges between nodes: every byte right, and no rank slow with all of its peers."""
    if not links:
        return [Check(name="link rate", node=ALL, status="unchecked", found="one node: no links between nodes")]
    checks = []
    for node in places.nodes:
        wrong = [link for link in links if link.wrong and places.of_rank[link.rank] == node]
        if wrong:
            told = ", ".join(f"rank {one.rank} from rank {one.peer}: {one.wrong} elements" for one in wrong)
            way = "leave out the node that is in all such lines: its network changes data"
            asked = "what was sent"
            found = f"what arrives is wrong ({told})"
            checks.append(Check(name="link data", node=node, status="fault", found=found, asked=asked, way_out=way))
    if len(places.nodes) < 3:  # either end of the one link may be the slow one
        rates = sorted(link.rate for link in links)
        found = f"{rates[0] / 1e9:.4g} to {rates[-1] / 1e9:.4g} GB/s a rank: of two nodes none can be named"
        return [*checks, Check(name="link rate", node=ALL, status="unchecked", found=found)]
    best: dict[int, float] = {}
    for link in links:
        best[link.rank] = max(best.get(link.rank, 0.0), link.rate / 1e9)
    return checks + rate_checks("link rate", best, places, part, "GB/s")


def counted(count: int, word: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{count} {word}{'s' * (count > 1)}"
