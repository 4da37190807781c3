"""When ZeRO 3 gathers weights over the data group: what DeepSpeed 0.19.8's coordinator does, step by step.

A module's weights are gathered before it runs, forward and backward, unless they are there; so are those of the modules
after it, in the order of earlier micro-batches, up to a number of elements. When it is over they are given up, unless
they are needed again within a number of elements, or are small: small ones are given up for the update only, and then
gathered one by one. The order of modules follows from the network: autograd goes through its nodes from the last that
was made to the first, so that in backward weights are fetched as modules have ended, and given up as they have begun.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from megatron_allattn.model.block import Block
from megatron_allattn.model.network import Network
from megatron_allattn.model.persistent import PersistentMemory
from megatron_allattn.model.position import PositionEmbedding
from megatron_allattn.model.span import AdaptiveSpan
from megatron_allattn.model.traffic import Place
from megatron_allattn.model.traffic_order import called
from megatron_allattn.parallel.adaptive import AdaptiveEmbedding
from megatron_allattn.parallel.layout import padded_share
from megatron_allattn.parallel.ledger import Ledger
from megatron_allattn.parallel.vocabulary import VocabularyParallelEmbedding

_PREFETCH = "stage3_prefetch_bucket_size"
_WITHOUT_GRADIENT = (Network, VocabularyParallelEmbedding, AdaptiveEmbedding)  # of what they are given
_WITHOUT_INPUT = (PositionEmbedding, AdaptiveSpan, PersistentMemory)
Event = tuple[Literal["begin", "end"], nn.Module]
Act = tuple[Literal["fetch", "release"], nn.Module]


@dataclass(frozen=True)
class Gathers:
    """The weights that each message gathers: before the step, in each micro-batch, after the update."""

    before: list[list[nn.Parameter]]
    micro_batches: list[list[list[nn.Parameter]]]
    after: list[list[nn.Parameter]]


def gathers(place: Place, settings: dict[str, Any]) -> Gathers:
    """What a step gathers; settings: of `zero_settings`."""
    network = place.network
    coordinator, small = _coordinator(place, settings)
    spans = network.span_parameters()  # read before the step, one by one, and given up again
    before = [[one] for one in spans if one not in coordinator.there]
    coordinator.there -= set(spans)
    micro_batches = coordinator.micro_batches(place.slots)
    return Gathers(before, micro_batches, [[one] for one in network.parameters() if one in small])


def enter_gather(ledger: Ledger, place: Place, weights: Iterable[nn.Parameter]) -> None:
    """Enter a message that gathers these."""
    parts = place.layout.data_size
    ledger.add("data", "all_gather", sum(padded_share(one.numel(), parts) * parts for one in weights) * place.element)


def enter_weights(ledger: Ledger, place: Place, settings: dict[str, Any]) -> None:
    """Enter all that a step gathers."""
    of = gathers(place, settings)
    for weights in [*of.before, *(one for micro_batch in of.micro_batches for one in micro_batch), *of.after]:
        enter_gather(ledger, place, weights)


def gathered_sizes(place: Place, settings: dict[str, Any]) -> tuple[int, int]:
    """Elements of small weights that stay whole, as they are after a micro-batch, and the most elements of others that
    are whole at a time, with the message in which the last of them have come.

    What has come alone fills its message, which is padded; of what has come together each has been cut out.
    """
    network, parts = place.network, place.layout.data_size

    def padded(weights: Iterable[nn.Parameter]) -> int:
        return sum(padded_share(one.numel(), parts) * parts for one in weights)

    coordinator, small = _coordinator(place, settings)
    spans = {one for one in network.span_parameters() if one in coordinator.there}
    coordinator.there -= spans
    stay, most = padded(small - spans), 0
    for weights in coordinator.micro_batch():
        stay += sum(one.numel() if len(weights) > 1 else padded([one]) for one in spans.intersection(weights))
        most = max(most, padded(coordinator.there - small) + (padded(weights) if len(weights) > 1 else 0))
    return stay, most


def _coordinator(place: Place, settings: dict[str, Any]) -> tuple["_Coordinator", set[nn.Parameter]]:
    """As it is after an update, and the small weights, which are there."""
    network = place.network
    small = {one for one in network.parameters() if one.numel() <= settings["stage3_param_persistence_threshold"]}
    acts = list(_acts(network, recompute=place.run.training.recompute_granularity == "full"))
    return _Coordinator(acts, set(small), settings), small


def _events(module: nn.Module) -> Iterator[Event]:
    """A forward pass."""
    yield "begin", module
    for one in called(module):
        yield from _events(one)
    yield "end", module


def _forward(events: Iterable[Event]) -> Iterator[Act]:
    for event, module in events:
        yield ("fetch", module) if event == "begin" else ("release", module)


def _acts(network: Network, *, recompute: bool) -> Iterator[Act]:
    """What the coordinator does in a micro-batch. recompute: layers are computed again, once backward comes to the
    last norm of each."""
    events = list(_events(network))
    yield from _forward(events)
    for place in range(len(events) - 1, -1, -1):
        event, module = events[place]
        if event == "end":
            for _ in range(2 if isinstance(module, PersistentMemory) else 1):  # for each output
                yield "fetch", module
            after, around = events[min(place + 1, len(events) - 1)]
            if recompute and after == "end" and isinstance(around, Block) and around is not module:
                yield from _forward(list(_events(around))[1:-1])
        elif not isinstance(module, _WITHOUT_GRADIENT + _WITHOUT_INPUT):
            yield "release", module


class _Coordinator:
    """DeepSpeed's `PartitionedParameterCoordinator`, as far as it decides what is gathered when; `acts` are those of
    every micro-batch. `there`: the weights that are whole."""

    def __init__(self, acts: Sequence[Act], small: set[nn.Parameter], settings: dict[str, Any]) -> None:
        self._acts, self._small, self._settings = acts, small, settings
        self._fetched = [module for act, module in acts if act == "fetch"]
        self._own = {module: list(module.parameters(recurse=False)) for _, module in acts}
        self._sizes = {module: sum(one.numel() for one in own) for module, own in self._own.items()}
        self.there = set(small)
        self._kept: dict[tuple[nn.Module, int], set[nn.Parameter]] = {}  # what is not given up, as first decided

    def micro_batches(self, count: int) -> list[list[list[nn.Parameter]]]:
        """What each of `count` gathers. One that begins as the one before it gathers the same."""
        gathered: list[list[list[nn.Parameter]]] = []
        before = None
        for _ in range(count):
            state = frozenset(self.there), len(self._kept)
            gathered.append(gathered[-1] if state == before else list(self.micro_batch()))
            before = state
        return gathered

    def micro_batch(self) -> Iterator[list[nn.Parameter]]:
        """What is gathered, message by message."""
        self._queue = deque((one, step) for step, module in enumerate(self._fetched) for one in self._own[module])
        self._last = defaultdict[nn.Parameter, int](lambda: -1)  # for which step a weight has been looked at
        self._users = defaultdict[nn.Parameter, set[nn.Module]](set)
        self._numel = self._step = 0
        for act, module in self._acts:
            if act == "fetch":
                yield from self._fetch(module)
            else:
                self._release(module)
        self._give_up(one for one in list(self.there) if one in self._users)

    def _fetch(self, module: nn.Module) -> Iterator[list[nn.Parameter]]:
        needed = self._own[module]
        yield from self._gather(needed)
        for one in needed:
            self._users[one].add(module)
        for _ in range(sum(self._last[one] < self._step for one in needed)):
            self._look_at()
        room = min(self._settings["stage3_max_live_parameters"] - self._numel, self._settings[_PREFETCH])
        ahead: dict[nn.Parameter, None] = {}
        while self._queue and sum(one.numel() for one in ahead) < room:
            one = self._look_at()
            if one not in self.there:
                ahead[one] = None
        yield from self._gather(list(ahead))
        self._step += 1

    def _look_at(self) -> nn.Parameter:
        """The next weight of the queue."""
        one, step = self._queue.popleft()
        self._last[one] = max(self._last[one], step)
        return one

    def _gather(self, weights: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        missing = [one for one in weights if one not in self.there]
        self.there.update(missing)
        self._numel += sum(one.numel() for one in missing)
        if missing:
            yield missing

    def _release(self, module: nn.Module) -> None:
        own, key = self._own[module], (module, self._step)
        if key not in self._kept:
            self._kept[key] = self._needed_again(own)
        for one in own:
            self._users[one].discard(module)
        self._give_up(one for one in own if one not in self._kept[key] and not self._users[one])

    def _give_up(self, weights: Iterable[nn.Parameter]) -> None:
        for one in weights:
            if one in self.there and one not in self._small:
                self.there.remove(one)
                self._numel -= one.numel()

    def _needed_again(self, own: Sequence[nn.Parameter]) -> set[nn.Parameter]:
        """Those that were looked at for a later step, or that modules soon need."""
        again = {one for one in own if self._last[one] > self._step}
        passed = 0
        for module in self._fetched[self._step :]:
            if passed >= self._settings["stage3_max_reuse_distance"]:
                break
            again.update(self._own[module])
            passed += self._sizes[module]
        return again
