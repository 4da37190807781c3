"""What DeepSpeed sends for a rank: gradients, the update, and under ZeRO 3 weights, in order.

DeepSpeed does not run without its processes, so these messages are those that model/traffic_update.py and
model/traffic_weights.py predict. When a gradient is complete autograd itself says; DeepSpeed's buckets follow from it.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from megatron_allattn.model.traffic import Place
from megatron_allattn.model.traffic_update import buckets, enter_bucket, enter_gradients, enter_step, optimizer_groups
from megatron_allattn.model.traffic_weights import enter_gather, gathers
from megatron_allattn.parallel.ledger import Ledger
from megatron_allattn.parallel.logical import logical_of
from megatron_allattn.parallel.silent import Call, Script


class _IntoScript(Ledger):
    """A ledger that writes down every message by itself."""

    def __init__(self, place: Place, script: Script, what: str = "") -> None:
        super().__init__(place.layout, place.rank)
        self._script, self._what = script, what

    def add(self, group: str, operation: str, num_bytes: int, count: int = 1) -> None:
        if len(self._groups[group]) > 1:
            for _ in range(count):
                self._script.enter_bytes(group, operation, num_bytes // count, module=self._what)


class Update:
    """Of one rank. Messages go into `script`, under the micro-batch and direction that it is at."""

    def __init__(self, place: Place, settings: dict[str, Any], script: Script) -> None:
        self._place, self._settings, self._script = place, settings, script
        self.stage: int = settings["stage"]
        self._gathers = gathers(place, settings) if self.stage == 3 else None
        sizes = [one for group in optimizer_groups(place) for one in group.gradients.items()]
        self._gradients = {logical_of(parameter).name: gradient for parameter, gradient in sizes}

    def _ledger(self, what: str = "") -> Ledger:
        return _IntoScript(self._place, self._script, what)

    def _gather(self, weights: Iterable[Iterable[nn.Parameter]]) -> None:
        for one in weights:
            enter_gather(self._ledger("weights"), self._place, one)

    def before(self) -> None:
        """What comes before the first micro-batch."""
        if self._gathers is not None:
            self._gather(self._gathers.before)

    def weights(self, micro_batch: int) -> None:
        """What a micro-batch gathers, all of it, before its forward pass."""
        if self._gathers is not None:
            self._gather(self._gathers.micro_batches[micro_batch])

    def averages(self) -> None:
        """ZeRO 0 and 1: the average of all gradients, after the last micro-batch."""
        if self.stage < 2:
            enter_gradients(self._ledger(), self._place, self._settings)

    def completed(self, own: list[Call], completed: list[tuple[int, str]]) -> list[Call]:
        """ZeRO 2 and 3: what a backward pass calls, with the averages of its gradients where their buckets are full.

        own: what its modules call; completed: the weights by name, in the order in which their gradients are complete,
        each with how many of the calls come before.
        """
        if self.stage < 2:
            return own
        result, at, place = list[Call](), 0, 0
        for bucket in buckets([self._gradients[name] for _, name in completed], self._settings["reduce_bucket_size"]):
            place += len(bucket)
            until = completed[place][0] if place < len(completed) else len(own)  # the next does not fit
            result += own[at:until]
            at = until
            mark = len(self._script.calls)
            enter_bucket(self._ledger("gradients"), self._place, self._settings, bucket)
            result += self._script.calls[mark:]
            del self._script.calls[mark:]
        return result + own[at:]

    def step(self) -> None:
        """Norm, clip and update, and the weights that follow."""
        enter_step(self._ledger(), self._place, self._settings)
        if self._gathers is not None:
            self._gather(self._gathers.after)
