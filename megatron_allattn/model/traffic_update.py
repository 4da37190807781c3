"""What a rank sends and receives from the reduction of gradients to the end of a step, as DeepSpeed 0.19.8 and the
optimizers of engine/ do it (docs/traffic.md has it as a table). ZeRO 3's weights are in traffic_weights.py.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_allattn.config import RunConfig, usage_error
from megatron_allattn.config.ds_config import load_deepspeed_json
from megatron_allattn.model.parameter_groups import parameter_groups
from megatron_allattn.model.traffic import DOUBLE, FLOAT, Place
from megatron_allattn.model.traffic_order import gradient_order
from megatron_allattn.model.traffic_weights import enter_weights
from megatron_allattn.parallel.layout import padded_share
from megatron_allattn.parallel.ledger import Ledger

WHOLE_BUCKET = 500_000_000  # elements that DeepSpeed reduces at once without ZeRO
FLAG = 1  # byte

_DEFAULTS: dict[str, Any] = {
    "stage": 0,
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "offload_optimizer": None,
    "contiguous_gradients": True,
    "reduce_scatter": True,
}
_FIXED = ("contiguous_gradients", "reduce_scatter")  # at their defaults
_NO_EFFECT = {"allgather_bucket_size", "overlap_comm", "offload_param", "memory_efficient_linear"}


def zero_settings(place: Place) -> dict[str, Any]:
    """The `zero_optimization` section of a run's DeepSpeed JSON with DeepSpeed's defaults.

    Raises UsageError for a key whose traffic is not known.
    """
    run = place.run
    content = load_deepspeed_json(run, place.layout.world_size)
    given = content.get("zero_optimization", {})
    source = str(run.parallel.deepspeed_json)
    for key, value in given.items():
        if key not in _NO_EFFECT and (key not in _DEFAULTS or (key in _FIXED and value != _DEFAULTS[key])):
            raise usage_error(source, key, "its traffic cannot be predicted", "leave it out to predict the traffic")
    if "communication_data_type" in content:
        raise usage_error(source, "communication_data_type", "its traffic cannot be predicted", "leave it out")
    settings = _DEFAULTS | given
    if place.half:
        settings["stage"] = max(1, settings["stage"])  # as engine/deepspeed_engine.py runs it
    return settings


@dataclass(frozen=True)
class Gradient:
    """Elements of a parameter's gradient on this rank: all, and what each rank of the data group updates of them under
    ZeRO 1 and 2."""

    numel: int
    shares: tuple[int, ...]


@dataclass(frozen=True)
class ParameterGroup:
    """One of the optimizer's groups: its gradients by parameter, and whether the tensor group cuts them (asked for
    groups of one parameter only)."""

    gradients: dict[nn.Parameter, Gradient]
    sharded: bool

    @property
    def numel(self) -> int:
        return sum(gradient.numel for gradient in self.gradients.values())


def optimizer_groups(place: Place) -> list[ParameterGroup]:
    """The groups that engine/optimizers.py makes."""
    groups = []
    for group in parameter_groups(place.network, one_tensor_each=clips_tensors(place.run)):
        start, gradients = 0, {}
        share = _aligned(place, sum(one.numel() for one in group["params"])) // place.layout.data_size
        for parameter in group["params"]:
            stop = start + parameter.numel()
            bounds = [start, *range((start // share + 1) * share, stop, share), stop]
            gradients[parameter] = Gradient(stop - start, tuple(b - a for a, b in itertools.pairwise(bounds)))
            start = stop
        groups.append(ParameterGroup(gradients, group["sharded"]))
    return groups


def _aligned(place: Place, numel: int) -> int:
    """Elements of a group's flat buffer under ZeRO 1 and 2."""
    unit = 2 * place.layout.data_size
    return math.ceil(numel / unit) * unit


def clips_tensors(run: RunConfig) -> bool:
    """Whether every tensor is clipped by itself."""
    optimizer = run.optimizer
    return optimizer.optimizer == "adagrad" and optimizer.clip_grad > 0


def enter_update(ledger: Ledger, place: Place, settings: dict[str, Any]) -> None:
    """Enter a step's messages from the reduction of gradients on, and whenever ZeRO 3 gathers weights."""
    if place.layout.pipeline_size > 1:
        _enter_tied(ledger, place, "all_reduce")
    enter_gradients(ledger, place, settings)
    if settings["stage"] == 3:
        enter_weights(ledger, place, settings)
    enter_step(ledger, place, settings)


def enter_step(ledger: Ledger, place: Place, settings: dict[str, Any]) -> None:
    """Enter what follows once gradients are sums over the replicas, in the order in which it is sent."""
    _enter_norm_and_weights(ledger, place, settings)
    if place.layout.pipeline_size > 1:
        _enter_tied(ledger, place, "broadcast")


def _enter_norm_and_weights(ledger: Ledger, place: Place, settings: dict[str, Any]) -> None:
    stage, groups = settings["stage"], optimizer_groups(place)
    if stage == 0:
        ledger.add("tensor", "all_reduce", DOUBLE)  # the norm
        ledger.add("pipeline", "all_reduce", DOUBLE)
        sharded = sum(group.sharded for group in groups)
        if clips_tensors(place.run) and sharded:
            ledger.add("tensor", "all_reduce", sharded * DOUBLE)
        return
    if place.run.training.fp16:  # whether a gradient overflows
        ledger.add("data", "all_reduce", FLAG)
        ledger.add("replica" if place.layout.pipeline_size > 1 else "tensor", "all_reduce", FLAG)
    if stage == 3:
        number = DOUBLE if settings["offload_optimizer"] is None else FLOAT
        for group in groups:
            for _ in range(_sub_groups(group, place.layout.data_size, settings["sub_group_size"])):
                ledger.add("data", "all_reduce", number)
                ledger.add("tensor", "all_reduce", number)
        ledger.add("tensor", "all_reduce", DOUBLE)  # whether the loss is finite
    else:
        ledger.add("world", "all_reduce", DOUBLE)
    for group in groups:
        if clips_tensors(place.run):  # one call of the optimizer for each group
            ledger.add("data", "all_reduce", DOUBLE)
            if group.sharded:
                ledger.add("tensor", "all_reduce", DOUBLE)
    for group in groups if stage < 3 else ():
        ledger.add("data", "all_gather", _aligned(place, group.numel) * place.element)


def _enter_tied(ledger: Ledger, place: Place, operation: str) -> None:
    """Of tensors that several stages of a pipeline hold: their gradients, and after the update their values."""
    network, tied = place.network, not place.run.model.untie_embeddings_and_output_weights
    for parameter in network.position.parameters():
        ledger.add("pipeline", operation, parameter.numel() * place.element)
    if tied and network.embedding is not None:
        for parameter in network.embedding.parameters():
            ledger.add("ends", operation, parameter.numel() * place.element)


def enter_gradients(ledger: Ledger, place: Place, settings: dict[str, Any]) -> None:
    """Averages over the replicas, in buckets: once a step, under ZeRO 2 and 3 after every micro-batch."""
    stage, limit = settings["stage"], settings["reduce_bucket_size"]
    gradients = {parameter: one for group in optimizer_groups(place) for parameter, one in group.gradients.items()}
    times = place.slots if stage > 1 else 1
    if stage == 0:
        for numel in _emptied((one.numel() for one in place.network.parameters()), WHOLE_BUCKET):
            ledger.add("data", "all_reduce", numel * place.element)
        return
    order = list(gradients)
    if stage > 1:
        order = gradient_order(place.network, eager=place.run.training.attention_backend == "eager")
    for bucket in buckets([gradients[one] for one in order], limit):
        enter_bucket(ledger, place, settings, bucket, times)


def enter_bucket(
    ledger: Ledger, place: Place, settings: dict[str, Any], bucket: Sequence[Gradient], times: int = 1
) -> None:
    """Enter the average of one bucket of gradients under ZeRO 1 to 3."""
    parts = place.layout.data_size
    if settings["stage"] == 3:
        padded = sum(padded_share(one.numel, parts) * parts for one in bucket)
        ledger.add("data", "reduce_scatter", times * padded * place.element, times)
        return
    for numel in _emptied((share for one in bucket for share in one.shares), settings["reduce_bucket_size"]):
        ledger.add("data", "all_reduce", times * numel * place.element, times)


def _emptied(sizes: Iterable[int], limit: int) -> Iterator[int]:
    """Elements of buckets that are emptied once they have more than `limit`."""
    total = 0
    for size in sizes:
        total += size
        if total > limit:
            yield total
            total = 0
    if total:
        yield total


def buckets(gradients: Iterable[Gradient], limit: int) -> list[list[Gradient]]:
    """Gradients in the order in which they come, in buckets of at most `limit` elements; what is larger has one of its
    own."""
    filled: list[list[Gradient]] = []
    room = 0
    for gradient in gradients:
        if not filled or gradient.numel > room:
            filled.append([])
            room = limit
        filled[-1].append(gradient)
        room -= gradient.numel
    return filled


def _sub_groups(group: ParameterGroup, parts: int, size: int) -> int:
    """How many parts of `size` elements or more ZeRO 3 takes norms of."""
    shares = [padded_share(one.numel, parts) for one in group.gradients.values()]
    return 1 if size >= sum(shares) else len(list(_emptied(shares, size - 1)))
