"""How many bytes a rank sends in a step over which links: within its node, and to other nodes.

Messages are those of `step_traffic`; ranks are dealt to nodes in order, G to each, as every launcher does. A
collective counts as rings do (`Ledger.sent`). A ring over a group whose ranks are on several nodes runs through each
node once: its slowest link is between nodes, and all that it sends counts there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger, groups_by_name, ring

CLASSES = ("node", "network")


@dataclass(frozen=True)
class Sent:
    """Of one rank in a step. num_bytes: that leave it; count: messages."""

    num_bytes: float = 0.0
    count: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.num_bytes + other.num_bytes, self.count + other.count)


def link_of(ranks: Sequence[int], gpus_per_node: int) -> str:
    """Which of `CLASSES` the slowest link of a group is."""
    return "node" if len({rank // gpus_per_node for rank in ranks}) == 1 else "network"


def by_link(ledger: Ledger, layout: Layout, rank: int, gpus_per_node: int) -> dict[str, Sent]:
    """What a rank sends, by the slowest link of each group."""
    found = {one: Sent() for one in CLASSES}
    for group, sent in by_group(ledger, layout, rank).items():
        ranks = groups_by_name(layout, rank)[group]
        found[link_of(ranks, gpus_per_node)] += sent
    return found


def by_group(ledger: Ledger, layout: Layout, rank: int) -> dict[str, Sent]:
    """What a rank sends, by group."""
    groups, found = groups_by_name(layout, rank), dict[str, Sent]()
    for (group, operation), messages in ledger.entries.items():
        sent = Sent(messages.num_bytes * ring(operation, len(groups[group])), messages.count)
        found[group] = found.get(group, Sent()) + sent
    return found
