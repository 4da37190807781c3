"""What an engine keeps, as logical tensors that know no layout: weights, optimizer state, gradients, caches.

A rank keeps its shards of its stage's tensors, and of their full-precision values and states what ZeRO leaves it. Here
they become whole, one at a time, and are set from whole ones; a checkpoint that is written while training goes on gets
fragments instead (fragments.py). How a shard is kept is the engine's own business: it says so by the abstract methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from megatron_allattn.config import RunConfig
from megatron_allattn.config.rules import batch_shape
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.engine.fragments import Fragment, Stored
from megatron_allattn.model.network import Network, logical_tensors
from megatron_allattn.parallel.collectives import (
    all_gather,
    broadcast_tensor,
    gather_objects,
    gather_to_first,
)
from megatron_allattn.parallel.groups import ALONE, Groups
from megatron_allattn.parallel.logical import Init, LogicalTensor, Placement

ReadTensor = Callable[[str], Tensor]  # the full logical tensor of this name, on the CPU


def _joined(parts: list[Tensor] | None) -> Tensor | None:
    return None if parts is None else torch.cat(parts)


class EngineState(ABC):
    """The part of the network, the optimizer's state and the caches of this rank. Every method is collective over all
    ranks."""

    def __init__(
        self, network: Network, run: RunConfig, groups: Groups, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.network, self.run, self.groups = network, run, groups
        self.device, self.dtype = device, dtype
        shape = batch_shape(run, groups.layout.world_size)
        self.micro_batch_size, self.num_slots = shape.micro_batch_size, shape.accumulation_steps
        self.slots = [self._new_slot(self.micro_batch_size) for _ in range(self.num_slots)]

    def _new_slot(self, batch_size: int) -> CacheSlot:
        sharers = self.groups.tensor if self.run.parallel.shard_caches else ALONE
        network, where = self.network, (self.dtype, self.device)
        return CacheSlot(network.part.layers, batch_size, network.config.hidden_size, *where, sharers)

    @property
    def streams(self) -> range:
        """The global streams of this data rank."""
        size = self.micro_batch_size * self.num_slots
        return range(self.groups.data.rank * size, (self.groups.data.rank + 1) * size)

    def weights(self) -> Iterator[tuple[LogicalTensor, Tensor]]:
        """Every weight as a full float32 (float64 in a float64 run) logical tensor on the CPU, one at a time."""
        for logical in self._logical:
            yield logical, self._whole(logical, self._master)

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every piece of optimizer state as a full logical tensor, named WEIGHT/STATE, one at a time."""
        for logical in self._logical:
            for name in self.state_names:
                yield f"{logical.name}/{name}", self._whole(logical, partial(self._state, name=name))

    def load(self, weight: ReadTensor, state: ReadTensor | None = None) -> None:
        """Set weights, and the optimizer's state when given, from full logical tensors, read one at a time."""
        for logical, parameter in self.network.logical_parameters():
            self._set_master(parameter, self._shard(logical, weight(logical.name)))
            for name in self.state_names if state is not None else ():
                assert state is not None
                self._set_state(parameter, name, self._shard(logical, state(f"{logical.name}/{name}")))

    def caches(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every layer's cache of all global streams, [streams, C, D], on the first data rank (None elsewhere)."""
        parts = gather_objects(self.network.part.layers, self.groups.pipeline)
        for stage, layers in enumerate(parts):
            for layer in layers:
                whole = None
                if stage == self.groups.pipeline.rank:
                    local = torch.cat([slot.read(layer) for slot in self.slots])
                    whole = _joined(gather_to_first(local, self.groups.data))
                if self.groups.data.rank == 0:
                    whole = broadcast_tensor(whole, stage, self.groups.pipeline).cpu()
                yield f"layers.{layer}.cache", whole

    def load_caches(self, cache: ReadTensor, length: int) -> None:
        """Set the caches of this rank's streams from those of all; length: tokens passed since they started."""
        own = slice(self.streams.start, self.streams.stop)
        layers = [
            cache(f"layers.{layer}.cache")[own].to(self.device, self.dtype, copy=True).split(self.micro_batch_size)
            for layer in self.network.part.layers
        ]
        for index, slot in enumerate(self.slots):
            slot.restore([layer[index] for layer in layers], length)

    def fragments(self) -> Iterator[Fragment]:
        """What this rank gives of a checkpoint. Values are views where they can be: they change with the next step.

        Collective the first time it is called.
        """
        stage, tensor = self.groups.pipeline.rank, self.groups.tensor
        for order, (logical, first_stage) in enumerate(self._logical.items()):
            if first_stage != stage or (logical.shard_dim is None and order % tensor.size != tensor.rank):
                continue
            parameter, shard = self._own[logical], 0 if logical.shard_dim is None else tensor.rank
            start, values = self._own_range(parameter, None, order)
            yield Fragment(Stored("weights", order, logical.name, logical, values.dtype), shard, start, values)
            for place, state in enumerate(self.state_names):
                start, values = self._own_range(parameter, state, order)
                where = order * len(self.state_names) + place
                stored = Stored("optimizer", where, f"{logical.name}/{state}", logical, values.dtype)
                yield Fragment(stored, shard, start, values)
        yield from self._cache_fragments()

    def _cache_fragments(self) -> Iterator[Fragment]:
        tensor, cut = self.groups.tensor, self.run.parallel.shard_caches
        for layer in self.network.part.layers:
            if not cut and layer % tensor.size != tensor.rank:
                continue
            parts = [slot.part(layer) for slot in self.slots]
            own = torch.cat(parts) if len(parts) > 1 else parts[0]
            shape = (len(own) * self.groups.data.size, own.shape[1], self.network.config.hidden_size)
            logical = LogicalTensor(f"layers.{layer}.cache", shape, 2 if cut else None, Init("constant", 0.0))
            stored = Stored("caches", layer, logical.name, logical, own.dtype)
            yield Fragment(stored, tensor.rank if cut else 0, self.groups.data.rank * own.numel(), own.flatten())

    def gradients(self) -> Iterator[tuple[LogicalTensor, Tensor]]:
        """Every gradient as a full logical tensor; only between `forward_backward` and `update`."""
        for logical in self._logical:
            yield logical, self._whole(logical, self._gradient)

    @cached_property
    def _logical(self) -> dict[LogicalTensor, int]:
        """The whole network's tensors in its order, each with the first stage that holds it."""
        held = gather_objects([one.name for one, _ in self.network.logical_parameters()], self.groups.pipeline)
        return {
            logical: next(stage for stage, names in enumerate(held) if logical.name in names)
            for logical in logical_tensors(self.network.config, self.network.vocab_size)
        }

    def _whole(self, logical: LogicalTensor, read: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """What `read` says of a tensor's shards, joined, on every rank; `read` may be collective over the replicas."""
        stage, joined = self._logical[logical], None
        if stage == self.groups.pipeline.rank:
            joined = self._join(logical, read(self._own[logical]))
        return broadcast_tensor(joined, stage, self.groups.pipeline).cpu()

    @cached_property
    def _own(self) -> dict[LogicalTensor, nn.Parameter]:
        """The parameters of this part."""
        return dict(self.network.logical_parameters())

    def place_heads(self, placements: Sequence[Placement]) -> None:
        """Move heads between the ranks of the tensor group, with all that belongs to them; between two steps.

        placements: of every layer of the whole network, equal on all ranks. One tensor at a time is whole on each.
        """
        before = self.network.placements
        for logical, parameter in self.network.logical_parameters():
            if logical.heads is None or placements[logical.heads.layer] == before[logical.heads.layer]:
                continue
            own = placements[logical.heads.layer]
            self._set_master(parameter, self._placed(logical, self._master(parameter), own))
            for name in self.state_names:
                self._set_state(parameter, name, self._placed(logical, self._state(parameter, name), own))
        self.network.place(placements)

    def _placed(self, logical: LogicalTensor, local: Tensor, placement: Placement) -> Tensor:
        """From this rank's shard as heads are placed now, the one that it has with another placement."""
        return logical.shard(self._join(logical, local), self.groups.tensor.rank, self.groups.tensor.size, placement)

    def held(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """What this rank computes with: of every weight of its part, its name, which part of it, and that part; where
        all ranks take the heads to be; and masters, of which half precision shows less."""
        yield ("placement of heads", ""), self.network.head_order
        for logical, parameter in self.network.logical_parameters():
            shard = f" (shard {self.groups.tensor.rank})" if logical.shard_dim is not None else ""
            yield (logical.name, shard), parameter

    def _join(self, logical: LogicalTensor, local: Tensor) -> Tensor:
        shards = all_gather(local, self.groups.tensor) if logical.shard_dim is not None else [local]
        return self.network.join(logical, shards)

    def _shard(self, logical: LogicalTensor, full: Tensor) -> Tensor:
        return self.network.shard(logical, full).to(self.device)

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors."""

    @abstractmethod
    def _master(self, parameter: nn.Parameter) -> Tensor:
        """This tensor-parallel shard's full-precision value, whole over the data group."""

    @abstractmethod
    def _set_master(self, parameter: nn.Parameter, local: Tensor) -> None:
        """Set the shard's value, compute copy included."""

    @abstractmethod
    def _state(self, parameter: nn.Parameter, name: str) -> Tensor:
        """This shard's optimizer state, whole over the data group."""

    @abstractmethod
    def _set_state(self, parameter: nn.Parameter, name: str, local: Tensor) -> None:
        """Set the shard's optimizer state."""

    def _own_range(self, parameter: nn.Parameter, state: str | None, order: int) -> tuple[int, Tensor]:
        """What this replica gives of a shard of the master (None) or of a state: where it starts, flat elements.

        order: by which replicas take turns where each of them has all of it.
        """
        whole = self._master(parameter) if state is None else self._state(parameter, state)
        return 0, whole.flatten() if order % self.groups.data.size == self.groups.data.rank else whole.new_empty(0)

    @abstractmethod
    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        """This shard's accumulated gradient, averaged over the data group."""
