"""How many messages of how many bytes a rank exchanges: what a recorder finds (recorder.py) and a formula predicts
(model/traffic.py) are ledgers, which are equal or not. Needs no process groups.

The size of a message is that of the whole thing, the larger of what a rank gives and gets:

    all_reduce, broadcast, reduce    the tensor
    all_gather                       all ranks' parts together
    reduce_scatter                   the tensor before it is cut
    send, recv                       the tensor; a rank of a pipeline has both

In a group of one rank nothing is sent, and nothing is entered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_allattn.parallel.layout import Layout


@dataclass(frozen=True)
class Messages:
    """How many, and their bytes together."""

    count: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Messages") -> "Messages":
        return Messages(self.count + other.count, self.num_bytes + other.num_bytes)


def groups_by_name(layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    """The ranks of every group that `rank` is in: those of groups.py, and `replica`, a copy of the model, which
    DeepSpeed's pipeline makes."""
    data, tensors, stages = layout.data_rank(rank), range(layout.tensor_size), range(layout.pipeline_size)
    return {
        "tensor": tuple(layout.tensor_group(rank)),
        "data": tuple(layout.data_group(rank)),
        "pipeline": tuple(layout.pipeline_group(rank)),
        "ends": tuple(layout.ends_group(rank)),
        "replica": tuple(sorted(layout.rank(tensor=t, data=data, pipeline=p) for t in tensors for p in stages)),
        "world": tuple(range(layout.world_size)),
    }


def ring(operation: str, size: int) -> float:
    """The share of a message's bytes that a rank of `size` sends. Raises KeyError: training has no such operation."""
    part = (size - 1) / size
    of_group = {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part, "broadcast": 1.0}
    return (of_group | {"send": 1.0, "recv": 0.0})[operation]


class Ledger:
    """The messages of one rank, by group and operation.

    Groups of the same ranks are one: it has the first of the names tensor, data, pipeline, ends,
    replica, world.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._rank, self._groups = rank, groups_by_name(layout, rank)
        self.entries: dict[tuple[str, str], Messages] = {}

    def add(self, group: str, operation: str, num_bytes: int, count: int = 1) -> None:
        """Enter messages in the group of this name; num_bytes: of all `count` of them together."""
        self.add_among(self._groups[group], operation, num_bytes, count)

    def add_among(self, ranks: Sequence[int], operation: str, num_bytes: int, count: int = 1) -> None:
        """The same in the group of these ranks, whoever has made it."""
        if len(ranks) > 1 and count:
            key = self._name(ranks), operation
            self.entries[key] = self.entries.get(key, Messages()) + Messages(count, num_bytes)

    def add_between(self, peer: int, operation: str, num_bytes: int) -> None:
        """A message to or from the rank `peer`, in the pipeline's group if it is in it."""
        pipeline = self._groups["pipeline"]
        self.add_among(pipeline if peer in pipeline else (self._rank, peer), operation, num_bytes)

    def include(self, other: "Ledger") -> None:
        """Enter what another ledger of the same rank has."""
        for key, messages in other.entries.items():
            self.entries[key] = self.entries.get(key, Messages()) + messages

    def sent(self) -> float:
        """Bytes that leave this rank where every collective sends as little as it can, as rings do: of P ranks,
        (P − 1) / P of an all_gather or reduce_scatter, twice that of an all_reduce; all of a broadcast; of a pair, what
        is sent.

        Raises KeyError for an operation that training does not have.
        """
        total = 0.0
        for (group, operation), messages in self.entries.items():
            total += messages.num_bytes * ring(operation, len(self._groups[group]))
        return total

    def _name(self, ranks: Sequence[int]) -> str:
        own = (name for name, members in self._groups.items() if members == tuple(ranks))
        return next(own, f"ranks {list(ranks)}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "\n".join(
            f"{group} {operation}: {messages.count} × {messages.num_bytes / messages.count:g} B"
            for (group, operation), messages in sorted(self.entries.items())
        )
