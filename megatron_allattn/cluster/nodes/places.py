"""Which rank is on which node. Without torch."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_allattn.cluster.nodes.names import node_name, shown

BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Place:
    """Where a rank runs. boot: tells machines apart that have the same name (`localhost`)."""

    name: str
    boot: str
    local_rank: int


def own_place(local_rank: int) -> Place:
    """This rank's."""
    boot = BOOT.read_text().strip() if os.path.exists(BOOT) else ""
    return Place(node_name(), boot, local_rank)


@dataclass(frozen=True)
class Places:
    """Of all ranks, in their order. nodes: their names, in the order of their first ranks, each another."""

    of_rank: tuple[str, ...]

    @classmethod
    def of(cls, places: Sequence[Place]) -> "Places":
        """Ranks that say the same name and the same boot are on one node."""
        names: dict[tuple[str, str], str] = {}
        for place in places:
            key = (place.name, place.boot)
            if key not in names:
                same = sum(name == place.name for name, _ in names)
                names[key] = f"{place.name}#{same + 1}" if same else place.name
        return cls(tuple(names[place.name, place.boot] for place in places))

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(self.of_rank))

    def ranks(self, node: str) -> list[int]:
        return [rank for rank, name in enumerate(self.of_rank) if name == node]

    @property
    def first_ranks(self) -> list[int]:
        """The lowest rank of each node."""
        return [self.of_rank.index(node) for node in self.nodes]

    def on(self, ranks: Iterable[int]) -> str:
        """The nodes of some ranks, for a sentence."""
        return shown(dict.fromkeys(self.of_rank[rank] for rank in ranks))
