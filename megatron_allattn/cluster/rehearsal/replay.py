"""All ranks' calls against each other: does a step end?

Every rank goes through its own calls in order. A collective is over when every rank of its group has come to it, a
message between stages when its sender and its receiver have: nothing is kept for later, as where a message is too large
for any buffer. So the replay ends where a real step does at the latest, and where it does not end the step may hang.
What meets must be the same: the operation, what it is given, and where in the step it is called. (A collective of the
right size at another place would pair with it in a real step, with wrong numbers, and the step hang later.)
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_allattn.cluster.rehearsal.mismatch import Mismatch, describe
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import groups_by_name
from megatron_allattn.parallel.silent import Call

SHOWN = 4  # ranks in a message


@dataclass
class Counts:
    """What has met: collectives and messages between stages, each counted once, and how many groups they are in."""

    collectives: int = 0
    between_stages: int = 0
    calls: int = 0
    groups: set[tuple[int, ...]] = field(default_factory=set)


def replay(layout: Layout, calls: Mapping[int, Sequence[Call]]) -> Counts:
    """Let every rank of `layout` go through its calls. Raises Mismatch where two that meet differ, or no rank can go
    on."""
    return _Replay(layout, calls).run()


class _Replay:
    def __init__(self, layout: Layout, calls: Mapping[int, Sequence[Call]]) -> None:
        self._layout, self._calls = layout, calls
        self._groups = [groups_by_name(layout, rank) for rank in range(layout.world_size)]
        self._at = [0] * layout.world_size
        self._waiting: dict[tuple[int, ...], dict[int, Call]] = {}  # who has come to a collective or a message
        self._counts = Counts()

    def run(self) -> Counts:
        ready = deque(range(self._layout.world_size))
        while ready:
            ready.extend(self._come(ready.popleft()))
        if stuck := [rank for rank, at in enumerate(self._at) if at < len(self._calls[rank])]:
            raise Mismatch(self._deadlock(stuck))
        return self._counts

    def _now(self, rank: int) -> Call | None:
        calls, at = self._calls[rank], self._at[rank]
        return calls[at] if at < len(calls) else None

    def _members(self, rank: int, call: Call) -> tuple[int, ...]:
        """The ranks that must come: of a message between stages its sender and its receiver, in this order."""
        if not call.towards:
            return self._groups[rank][call.group]
        peer = rank + call.towards * self._layout.tensor_size * self._layout.data_size
        return (rank, peer) if call.operation == "send" else (peer, rank)

    def _come(self, rank: int) -> Sequence[int]:
        """A rank comes to its next call; those that can go on by that."""
        call = self._now(rank)
        if call is None:
            return ()
        members = self._members(rank, call)
        key = (*members, -1) if call.towards else members  # two ranks may have a group beside their messages
        come = self._waiting.setdefault(key, {})
        come[rank] = call
        if len(come) < len(members):
            return ()
        del self._waiting[key]
        self._meet(members, come)
        for member in members:
            self._at[member] += 1
        return members

    def _meet(self, members: tuple[int, ...], come: dict[int, Call]) -> None:
        """All are there: what they call must fit together."""
        first = members[0]
        for rank in members[1:]:
            one, other = come[first], come[rank]
            if one.towards and (one.operation, other.operation) != ("send", "recv"):
                raise Mismatch(f"{self._says(first, one)}, and {self._says(rank, other)}: one must send, one receive")
            if _given(one) != _given(other):
                raise Mismatch(f"{self._odd(members, come)}: a step would hang, or take one for the other")
        counts = self._counts
        counts.calls += len(members)
        counts.between_stages += bool(come[first].towards)
        counts.collectives += not come[first].towards
        counts.groups.add(tuple(sorted(members)))

    def _odd(self, members: tuple[int, ...], come: dict[int, Call]) -> str:
        """Who calls something else than most, and what most call."""
        usual, count = Counter(_given(come[rank]) for rank in members).most_common(1)[0]
        if count == 1:  # as many ways as ranks
            usual = _given(come[members[0]])
        others = [rank for rank in members if _given(come[rank]) == usual]
        odd = next(rank for rank in members if _given(come[rank]) != usual)
        return f"{self._says(odd, come[odd])}, where {self._says(others[0], come[others[0]], others[1:])}"

    def _says(self, rank: int, call: Call, more: Sequence[int] = ()) -> str:
        """What a rank calls and where; more: others that call the same."""
        too = f" and {len(more)} more of its group" if more else ""
        if call.towards:
            peer = next(one for one in self._members(rank, call) if one != rank)
            at = f"{'to' if call.operation == 'send' else 'from'} rank {peer}"
        else:
            at = f"in the group {call.group} {_shown(self._groups[rank][call.group])}"
        place = f" ({call.place})" if call.place else ""
        return f"{describe(self._layout, rank)}{too} calls {call.what} {at}{place}"

    def _deadlock(self, stuck: list[int]) -> str:
        """Nobody can go on: a rank that waits, and what those do for whom it waits."""
        rank = stuck[0]
        call = self._now(rank)
        assert call is not None
        missing = [one for one in self._members(rank, call) if one != rank and not self._waits_for(one, rank, call)]
        other = missing[0]
        theirs = self._now(other)
        does = self._says(other, theirs) if theirs else f"{describe(self._layout, other)} has ended the step"
        return f"{self._says(rank, call)} and waits for ever for {_shown(missing, 'rank')}, while {does}"

    def _waits_for(self, other: int, rank: int, call: Call) -> bool:
        """Whether another rank has come to the same."""
        theirs = self._now(other)
        if theirs is None or bool(theirs.towards) != bool(call.towards):
            return False
        return self._members(other, theirs) == self._members(rank, call)


def _given(call: Call) -> tuple[object, ...]:
    """What those that meet must have in common."""
    operation = "message" if call.towards else call.operation
    return operation, call.group, call.num_bytes, call.shape, call.dtype, call.micro_batch, call.direction, call.module


def _shown(ranks: Sequence[int], word: str = "") -> str:
    """4-7, or 0, 4, 8, 12, …: some ranks, at most a few of them by number."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        text = f"{ranks[0]}-{ranks[-1]}"
    else:
        text = ", ".join(map(str, ranks[:SHOWN])) + (", …" if len(ranks) > SHOWN else "")
    return f"{word}{'s' * (len(ranks) > 1)} {text}" if word else text
