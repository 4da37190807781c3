"""What DeepSpeed's engines hold of a rank's parameters: weights, gradients, optimizer state and ZeRO's own buffers.

Follows DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py) tensor by tensor; a test counts the real ones. W
elements of the rank's parameters, e bytes of an element, P ranks of the data group, B elements of `reduce_bucket_size`:

    stage  weights             optimizer                 gradients while they come      after the last backward
    0      W·e                 moments·W·4               W·e                            W·e
    1      W'·e                (1 + moments)·W'/P·4      W·e                            Q·e
    2      W'·e                (1 + moments)·W'/P·4      Q·e, twice from the second     Q·e
                                                         micro-batch on
    3      W"/P·e, and small   moments·W"/P·4, and in    W"/P·e, always                 W"/P·e
           ones whole          half precision masters

W' has each parameter group rounded up to 2·P, W" each tensor to P. Q is the whole of every tensor of which the rank
updates any part, so it differs from replica to replica. In float32 stages 1 and 2 have masters too; stage 3 has not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_allattn.config import usage_error
from megatron_allattn.model.traffic import FLOAT, Place
from megatron_allattn.model.traffic_update import WHOLE_BUCKET, ParameterGroup, optimizer_groups, zero_settings
from megatron_allattn.model.traffic_weights import most_gathered
from megatron_allattn.parallel.layout import padded_share


@dataclass(frozen=True)
class States:
    """Bytes on a rank.

    gradients: after the last backward; gradients_of_all: of all parameters · partial: what ZeRO 2 and 3 keep of the
    gradients that other parts of the network have completed, in the first micro-batch and in later ones; 0 where whole
    gradients stay · buckets: of the reduction, while there are gradients (at stage 3 always); reduction: what is at work
    in it beside them · gathered: weights that ZeRO 3 has whole at a time, messages included · reduce, update: gradients
    and buffers in the two phases after the last backward.
    """

    stage: int
    element: int
    weights: int
    optimizer: int
    gradients: int
    gradients_of_all: int
    partial: tuple[int, int]
    buckets: int
    reduction: int
    gathered: int
    reduce: tuple[int, int]
    update: tuple[int, int]

    def gradients_in(self, done: int, own: int, *, again: bool, backward: bool) -> int:
        """Bytes of gradients while a part of the network is at work that has `own` elements of them, when others have
        completed `done`. again: an earlier micro-batch's are there."""
        if self.stage < 2:
            return (self.gradients_of_all if again else done * self.element) + own * self.element
        kept = self.partial[1 if again else 0] if backward else self.partial[0] if again or self.stage == 3 else 0
        return kept + own * self.element


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
        partial=(0, 0),
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
    at_end = (whole, buckets + own + bucket * pipeline) if stage == 1 else (2 * own, buckets + reduction)
    return States(
        stage=stage,
        element=element,
        weights=sum(flat) * element,
        optimizer=(1 + _moments(place)) * sum(flat) // parts * FLOAT,
        gradients=own,
        gradients_of_all=whole,
        partial=(own, 2 * own) if stage == 2 else (0, 0),
        buckets=buckets,
        reduction=reduction if stage == 2 else 0,
        gathered=0,
        reduce=at_end,
        update=(own, copies),
    )


def _touched(group: ParameterGroup, share: int, rank: int) -> int:
    """Elements of the tensors of a group of which elements [rank, rank + 1) · share have any."""
    start, total = 0, 0
    for gradient in group.gradients.values():
        stop = start + gradient.numel
        if start < (rank + 1) * share and stop > rank * share:
            total += gradient.numel
        start = stop
    return total


def _all_cut(place: Place, settings: dict[str, Any], groups: Sequence[ParameterGroup]) -> States:
    parts, element = place.layout.data_size, place.element
    sizes = [one.numel for group in groups for one in group.gradients.values()]
    shares = sum(padded_share(size, parts) for size in sizes)
    small = settings["stage3_param_persistence_threshold"]
    stay = sum(padded_share(size, parts) * parts for size in sizes if size <= small)
    bucket, largest = settings["reduce_bucket_size"], max(sizes)
    reduction = min(sum(sizes), max(bucket, largest)) * element
    group = max(sum(padded_share(one.numel, parts) for one in group.gradients.values()) for group in groups)
    copies = group * element + group * FLOAT * (place.half + _decayed(place))
    masters = 1 if place.half else 0
    return States(
        stage=3,
        element=element,
        weights=(shares + stay) * element,
        optimizer=(masters + _moments(place)) * shares * FLOAT,
        gradients=shares * element,
        gradients_of_all=sum(sizes) * element,
        partial=(shares * element, shares * element),
        buckets=bucket * element,
        reduction=reduction,
        gathered=most_gathered(place, settings) * element,
        reduce=(shares * element, bucket * element + reduction),
        update=(shares * element, bucket * element + copies),
    )
