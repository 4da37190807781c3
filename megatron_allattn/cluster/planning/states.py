"""What DeepSpeed's engines hold of a rank's parameters: weights, gradients, optimizer state and ZeRO's own buffers.

Follows DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py) tensor by tensor; a test counts the real ones. W
elements of the rank's parameters, e bytes of an element, P ranks of the data group, B elements of `reduce_bucket_size`:

    stage  weights             optimizer                 gradients while they come      after the last backward
    0      W·e                 moments·W·4               W·e                            W·e
    1      W'·e                (1 + moments)·W'/P·4      W·e                            Q·e
    2      W'·e                (1 + moments)·W'/P·4      Q·e, twice from the second     Q·e
                                                         micro-batch on
    3      W"/P·e, and small   (1 + moments)·W"/P·4      W"/P·e, always                 W"/P·e
           ones whole

W' has each parameter group rounded up to 2·P, W" each tensor to P. Q is the whole of every tensor of which the rank
updates any part, so it differs from replica to replica. There are masters in float32 too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_allattn.config import usage_error
from megatron_allattn.model.step_memory import Phase
from megatron_allattn.model.traffic import FLOAT, Place
from megatron_allattn.model.traffic_update import WHOLE_BUCKET, ParameterGroup, optimizer_groups, zero_settings
from megatron_allattn.model.traffic_weights import gathered_sizes
from megatron_allattn.parallel.layout import padded_share


@dataclass(frozen=True)
class States:
    """Bytes on a rank.

    gradients: after the last backward; gradients_of_all: of all parameters · buckets: of the reduction; reduction: what
    is at work in it beside them while ZeRO 2 and 3 reduce in backward · gathered: weights that ZeRO 3 has whole at a
    time, messages included · reduce, update: gradients and buffers in the two phases after the last backward.
    """

    stage: int
    element: int
    weights: int
    optimizer: int
    gradients: int
    gradients_of_all: int
    buckets: int
    reduction: int
    gathered: int
    reduce: tuple[int, int]
    update: tuple[int, int]

    def gradients_in(self, phase: Phase) -> int:
        """Bytes of gradients while a part of the network is at work."""
        if self.stage < 2:
            there = self.gradients_of_all + phase.waiting * self.element
            return (there if phase.again else phase.done * self.element) + phase.own * self.element
        times = (
            1 if self.stage == 3 else phase.backward + phase.again
        )  # ZeRO 2 adds those of a micro-batch to the others
        return self.gradients * times + (phase.waiting + phase.own) * self.element

    def buffers_in(self, phase: Phase) -> int:
        """Bytes of what the reduction has then: a bucket that ZeRO 1 keeps from the first backward on, ZeRO 2 makes for
        each, and ZeRO 3 has always."""
        there = {0: False, 1: phase.backward or phase.again, 2: phase.backward, 3: True}[self.stage]
        return self.buckets * there + self.reduction * phase.backward


def states_of(place: Place) -> States:
    """Of a rank. Raises UsageError for a DeepSpeed JSON whose memory is not known."""
    settings = zero_settings(place)
    source = str(place.run.parallel.deepspeed_json)
    if settings["offload_optimizer"] is not None:
        rule = "what an offload leaves on the device cannot be predicted yet"
        raise usage_error(source, "offload_optimizer", rule, "leave it out to predict memory")
    groups = optimizer_groups(place)
    make = {0: _whole, 1: _optimizer_cut, 2: _optimizer_cut, 3: _all_cut}[settings["stage"]]
    return make(place, settings, groups)


def _moments(place: Place) -> int:
    return 2 if place.run.optimizer.optimizer == "adam" else 1


def _decayed(place: Place) -> bool:
    """Whether the update has a copy of its gradients (Adagrad's with weight decay)."""
    optimizer = place.run.optimizer
    return optimizer.optimizer == "adagrad" and optimizer.weight_decay > 0


def _whole(place: Place, settings: dict[str, Any], groups: Sequence[ParameterGroup]) -> States:
    total = sum(group.numel for group in groups) * FLOAT  # half precision runs as stage 1
    copy = total if place.layout.data_size > 1 else 0
    return States(
        stage=0,
        element=FLOAT,
        weights=total,
        optimizer=_moments(place) * total,
        gradients=total,
        gradients_of_all=total,
        buckets=0,
        reduction=0,
        gathered=0,
        reduce=(total, min(copy, WHOLE_BUCKET * FLOAT)),
        update=(total, total if _decayed(place) else 0),
    )


def _optimizer_cut(place: Place, settings: dict[str, Any], groups: Sequence[ParameterGroup]) -> States:
    parts, rank, element = place.layout.data_size, place.layout.data_rank(place.rank), place.element
    flat = [2 * parts * padded_share(group.numel, 2 * parts) for group in groups]
    own = sum(_touched(group, size // parts, rank) for group, size in zip(groups, flat, strict=True)) * element
    whole, bucket = sum(group.numel for group in groups) * element, settings["reduce_bucket_size"] * element
    stage, pipeline = settings["stage"], place.layout.pipeline_size > 1
    buckets = bucket * (2 if settings.get("overlap_comm") else 1)
    largest = max(one.numel for group in groups for one in group.gradients.values()) * element
    reduction = min(whole, max(bucket, largest))
    share = max(flat) // parts  # of the group with the largest
    copies = share * element + share * FLOAT * (place.half + _decayed(place))
    # before the reduction stage 1 has all gradients; then they move into buckets, and this rank's into their own memory
    at_end = (whole, buckets + own + bucket * pipeline) if stage == 1 else (own, buckets)
    return States(
        stage=stage,
        element=element,
        weights=sum(flat) * element,
        optimizer=(1 + _moments(place)) * sum(flat) // parts * FLOAT,
        gradients=own,
        gradients_of_all=whole,
        buckets=buckets,
        reduction=reduction if stage == 2 else 0,
        gathered=0,
        reduce=at_end,
        update=(own, copies),
    )


def _touched(group: ParameterGroup, share: int, rank: int) -> int:
    """Elements of the tensors of a group of which elements [rank, rank + 1) · share have any, and of the zeros that
    fill these up behind the last tensor."""
    start, total = 0, 0
    for gradient in group.gradients.values():
        stop = start + gradient.numel
        if start < (rank + 1) * share and stop > rank * share:
            total += gradient.numel
        start = stop
    return total + min(share, max(0, (rank + 1) * share - start))


def _all_cut(place: Place, settings: dict[str, Any], groups: Sequence[ParameterGroup]) -> States:
    parts, element = place.layout.data_size, place.element
    sizes = [one.numel for group in groups for one in group.gradients.values()]
    shares = sum(padded_share(size, parts) for size in sizes)
    stay, most = gathered_sizes(place, settings)
    bucket, largest = settings["reduce_bucket_size"], max(sizes)
    reduction = min(sum(sizes), max(bucket, largest)) * element
    group = max(sum(padded_share(one.numel, parts) for one in group.gradients.values()) for group in groups)
    copies = group * element + group * FLOAT * (place.half + _decayed(place))
    return States(
        stage=3,
        element=element,
        weights=(shares + stay) * element,
        optimizer=(1 + _moments(place)) * shares * FLOAT,
        gradients=shares * element,
        gradients_of_all=sum(sizes) * element,
        buckets=bucket * element,
        reduction=reduction,
        gathered=most * element,
        reduce=(shares * element, bucket * element),
        update=(shares * element, bucket * element + copies),
    )
