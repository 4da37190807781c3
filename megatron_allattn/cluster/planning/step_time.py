"""How long a step takes, from work, bytes and the rates of a device.

    a micro-batch on a stage     t_s = executed operations / (flops · reached) + what the tensor group sends
                                       + what goes to the neighbouring stages
    a step                       Σ_s t_s + (A − 1) · max_s t_s            A micro-batches through the stages (1F1B)
                                 + reductions over the replicas + update

of the rank with the longest heads of every tensor group. Nothing is taken to overlap: what a network really hides
behind work makes a step shorter. Every group's messages go over its slowest link; a ring that leaves a node takes the
adapters of all its ranks there together. Each message costs `Device.message` seconds beside its bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_allattn.cluster.planning.devices import Device
from megatron_allattn.cluster.planning.links import Sent, by_group, link_of
from megatron_allattn.cluster.planning.memory import backend_on, precision_of
from megatron_allattn.config import usage_error
from megatron_allattn.model.activation_shapes import Backend
from megatron_allattn.model.traffic import Place
from megatron_allattn.model.work import layer_flops, vocabulary_flops
from megatron_allattn.parallel.ledger import Ledger, groups_by_name

MICRO_BATCH = ("tensor", "pipeline")  # groups whose messages are those of micro-batches
PASSES = 3  # over weights, gradients and state in an update: read and written, and the gradient's norm


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage: of each micro-batch, and once a step. operations: executed in a micro-batch."""

    compute: float
    tensor: float
    neighbours: float
    replicas: float
    update: float
    operations: int

    @property
    def micro_batch(self) -> float:
        return self.compute + self.tensor + self.neighbours


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they go to, and `bubble`, the share of it in which the slowest stage waits."""

    compute: float
    tensor: float
    neighbours: float
    waiting: float
    replicas: float
    update: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.neighbours + self.waiting + self.replicas + self.update

    @property
    def bubble(self) -> float:
        return self.waiting / self.total


def stage_time(
    place: Place, look_back: Sequence[Sequence[int]], device: Device, ledger: Ledger, gpus_per_node: int, state: int
) -> StageTime:
    """Of a stage's rank. look_back: of all heads, by layer; ledger: what it sends in a step; state: bytes of weights,
    gradients and optimizer state that it updates. Raises UsageError for a precision that the device has not."""
    run, slots = place.run, place.slots
    precision = precision_of(run)
    if precision not in device.flops:
        known = f"it computes in {', '.join(device.flops)}"
        raise usage_error("--gpu", device.name, f"{known}, the run in {precision}", "choose another precision")
    operations = operations_of(place, look_back, backend_on(run, device))
    sent = by_group(ledger, place.layout, place.rank)
    seconds = {group: _seconds(place, group, one, device, gpus_per_node) for group, one in sent.items()}
    once = sum(took for group, took in seconds.items() if group not in MICRO_BATCH)
    return StageTime(
        compute=operations / (device.flops[precision].value * device.reached.value),
        tensor=seconds.get("tensor", 0.0) / slots,
        neighbours=seconds.get("pipeline", 0.0) / slots,
        replicas=once,
        update=PASSES * state / device.bandwidth.value,
        operations=operations,
    )


def operations_of(place: Place, look_back: Sequence[Sequence[int]], backend: Backend) -> int:
    """What the slowest rank of a stage's tensor group executes in one micro-batch."""
    run, model, shards = place.run, place.run.model, place.shards
    batch, block, again = place.batch.micro_batch_size, run.training.seq_length, run.training.recompute_granularity
    total = 0
    for layer in place.part.layers:
        # as if every rank had heads like those of the rank whose heads look farthest
        longest = slowest_heads(look_back[layer], shards) * shards
        total += layer_flops(model, batch, block, longest, backend, again).executed
    ends = vocabulary_flops(model, place.vocab_size, place.tokens)
    if place.part.first and "embedding" in ends:
        total += ends["embedding"].executed
    if place.part.last:
        total += ends["output"].executed
    return total // shards


def slowest_heads(layer: Sequence[int], shards: int) -> tuple[int, ...]:
    """Of the rank whose heads, consecutive ones, look farthest together."""
    count = len(layer) // shards
    return max((tuple(layer[rank * count : (rank + 1) * count]) for rank in range(shards)), key=sum)


def _seconds(place: Place, group: str, sent: Sent, device: Device, gpus_per_node: int) -> float:
    ranks = groups_by_name(place.layout, place.rank)[group]
    rate = device.node_link.value
    if link_of(ranks, gpus_per_node) == "network":
        node = place.rank // gpus_per_node
        beside = sum(rank // gpus_per_node == node for rank in ranks)
        rate = min(rate, device.network_link.value * (1 if group == "pipeline" else beside))
    return sent.num_bytes / (rate * device.link_reached.value) + sent.count * device.message.value


def step_time(stages: Sequence[StageTime], slots: int) -> StepTime:
    """Of all stages together, `slots` micro-batches in a step."""
    slowest = max(stages, key=lambda stage: stage.micro_batch)
    whole = sum(stage.micro_batch for stage in stages) + (slots - 1) * slowest.micro_batch
    last = max(stages, key=lambda stage: stage.replicas + stage.update)
    return StepTime(
        compute=slots * slowest.compute,
        tensor=slots * slowest.tensor,
        neighbours=slots * slowest.neighbours,
        waiting=whole - slots * slowest.micro_batch,
        replicas=last.replicas,
        update=last.update,
    )


def as_dict(time: StepTime) -> Mapping[str, float]:
    """For JSON, seconds by part."""
    return {name: getattr(time, name) for name in StepTime.__dataclass_fields__} | {"total": time.total}
