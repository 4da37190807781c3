"""What a rank sends and receives in forward and backward passes, from shapes (docs/traffic.md has it as a table).

Shape letters: B streams of a micro-batch, M block, D hidden, K head size, L maximum span, C cached positions, T ranks
of the tensor group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_allattn.config import RunConfig
from megatron_allattn.config.rules import BatchShape, batch_shape
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.activations import vocabulary_tables
from megatron_allattn.model.network import Network, Part
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger

FLOAT, DOUBLE, LONG = 4, 8, 8  # bytes
Message = tuple[str, int]  # operation, bytes


@dataclass(frozen=True)
class Place:
    """A rank of a run, and what its stage holds. known: the stage's parameters, where they have been made."""

    run: RunConfig
    vocab_size: int
    layout: Layout
    rank: int
    part: Part
    known: Network | None = None

    @property
    def shards(self) -> int:
        """T."""
        return self.layout.tensor_size

    @property
    def sequence_parallel(self) -> bool:
        return self.run.parallel.sequence_parallel and self.shards > 1

    @property
    def half(self) -> bool:
        return self.run.training.bf16 or self.run.training.fp16

    @property
    def element(self) -> int:
        """Bytes of an element of weights, gradients and hidden states."""
        return 2 if self.half else FLOAT

    @cached_property
    def batch(self) -> BatchShape:
        return batch_shape(self.run, self.layout.world_size)

    @property
    def slots(self) -> int:
        """Micro-batches of a step."""
        return self.batch.accumulation_steps

    @property
    def tokens(self) -> int:
        """B·M."""
        return self.batch.micro_batch_size * self.run.training.seq_length

    @property
    def hidden(self) -> int:
        """Bytes of hidden states [B, M, D]."""
        return self.tokens * self.run.model.hidden_size * self.element

    @cached_property
    def network(self) -> Network:
        """This rank's parameters, without memory."""
        if self.known is not None:
            return self.known
        with torch.device("meta"):
            group = Group(tuple(range(self.shards)), self.layout.tensor_rank(self.rank), None)
            return Network(self.run.model, self.vocab_size, group, FusedOps("torch"), part=self.part)


@dataclass(frozen=True)
class Passes:
    """The tensor group's messages in one forward and one backward pass of something."""

    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward)


def enter_passes(ledger: Ledger, place: Place, cache_lengths: Sequence[int], tail_targets: int) -> None:
    """Enter a step's messages up to the reduction of gradients; the arguments are those of `step_traffic`."""
    _enter_spans(ledger, place)
    repeated = 2 if place.run.training.recompute_granularity == "full" else 1
    for layer in place.part.layers:
        cached = cache_lengths[layer] if place.run.parallel.shard_caches else None
        passes = layer_passes(place, cached)
        _enter(ledger, passes.forward * repeated + passes.backward, place.slots)
    ends = ends_passes(place)
    _enter(ledger, ends.forward + ends.backward, place.slots)
    if place.part.last:
        rows = place.slots * place.tokens + tail_targets
        ledger.add("tensor", "all_reduce", rows * FLOAT, place.slots)  # maxima
        ledger.add("tensor", "all_reduce", rows * 2 * FLOAT, place.slots)  # sums, and the targets' scores
        ledger.add("data", "all_reduce", DOUBLE)  # the loss
    _enter_pipeline(ledger, place)


def _enter(ledger: Ledger, messages: Sequence[Message], times: int) -> None:
    for operation, num_bytes in messages:
        ledger.add("tensor", operation, times * num_bytes, times)


def _enter_spans(ledger: Ledger, place: Place) -> None:
    """Today's spans, which every rank of a replica learns."""
    model = place.run.model
    if model.adaptive_span:
        spans = model.num_layers * model.num_context_heads * place.element
        ledger.add("pipeline", "all_reduce", spans // place.shards)
        ledger.add("tensor", "all_gather", spans)


def _entering(place: Place) -> Passes:
    """Hidden states become the input of sharded work (`Residual.enter`)."""
    if place.sequence_parallel:
        return Passes((("all_gather", place.hidden),), (("reduce_scatter", place.hidden),))
    return Passes(backward=(("all_reduce", place.hidden),))


def _leaving(place: Place) -> Passes:
    """Partial sums become hidden states (`Residual.leave`)."""
    if place.sequence_parallel:
        return Passes((("reduce_scatter", place.hidden),), (("all_gather", place.hidden),))
    return Passes(forward=(("all_reduce", place.hidden),))


def _replicated(place: Place, vectors: int) -> Passes:
    """Gradients of vectors [D] that act on a cut residual stream (`Residual.replicated`)."""
    num_bytes = vectors * place.run.model.hidden_size * place.element
    return Passes(backward=(("all_reduce", num_bytes),) if place.sequence_parallel else ())


def _softmax(place: Place) -> Passes:
    """A softmax per token over vectors that the ranks share (`softmax_over_shards`)."""
    numbers = place.tokens * FLOAT
    return Passes((("all_gather", 2 * place.shards * numbers),), (("all_reduce", numbers),))


def layer_passes(place: Place, cached: int | None) -> Passes:
    """A layer. cached: C where the tensor group shares its caches, else None."""
    run, variant = place.run, place.run.model.variant
    keeps = run.training.recompute_granularity != "full"  # until backward what is not made again there
    passes = _entering(place) + _leaving(place) + _replicated(place, 2)
    if cached is not None:
        cache = ("all_gather", place.batch.micro_batch_size * cached * run.model.hidden_size * place.element)
        reread = keeps and cached > 0 and run.training.attention_backend != "eager"
        passes += Passes((cache,), (cache,) if reread else ())
    readers = 2 if variant in ("attn-split", "head-split", "single-head") else 1  # products that keep what has entered
    if variant == "single-head":
        passes += Passes((("all_gather", place.hidden),), (("reduce_scatter", place.hidden),))  # of queries
        passes += Passes((("reduce_scatter", place.hidden),), (("all_gather", place.hidden),))  # of outputs
        passes += _softmax(place)
    elif variant in ("ff-attn", "transformer"):
        passes += _entering(place) + _leaving(place) + _replicated(place, 2)
        passes += _softmax(place) if variant == "ff-attn" else _replicated(place, 1)
        readers += 1
    if place.sequence_parallel and keeps:
        passes += Passes(backward=(("all_gather", place.hidden),) * readers)
    return passes


def ends_passes(place: Place) -> Passes:
    """What is not in layers: positions, embedding and output, as far as they are on this stage."""
    model = place.run.model
    passes = Passes(backward=(("all_reduce", model.head_size * model.max_attention_span * place.element),))
    projections = Passes()
    if model.cutoffs:
        widths = sum(width for _, width in vocabulary_tables(model, place.vocab_size, place.shards))
        projections = Passes(backward=(("all_reduce", model.hidden_size * widths * place.element),))
    if place.part.first:
        passes += _leaving(place) + projections
    if place.part.last:
        passes += _entering(place) + projections
    return passes


def _enter_pipeline(ledger: Ledger, place: Place) -> None:
    """What neighbouring stages tell each other of every micro-batch, as DeepSpeed sends it, and the loss.

    A message of activations is followed by its slot. Where every shard has all of them, each sends its part, after a
    description of it, and the receiver puts them together; so does the sender once more, before backward.
    """
    slots, parted = place.slots, place.shards > 1 and not place.sequence_parallel
    sizes = [place.hidden // place.shards if place.shards > 1 else place.hidden]
    if parted:
        sizes.append(LONG * (7 + place.shards))  # 3, B, M, D, T, the rank, and T + 1 bounds
    neighbours = [("recv", "send", 1)] * (not place.part.first) + [("send", "recv", 2)] * (not place.part.last)
    for activations, gradients, gathered in neighbours:
        ledger.add("pipeline", activations, slots * (sum(sizes) + LONG), slots * (len(sizes) + 1))
        ledger.add("pipeline", gradients, slots * sum(sizes), slots * len(sizes))
        if parted:
            ledger.add("tensor", "all_gather", slots * gathered * place.hidden, slots * gathered)
    ledger.add("pipeline", "all_reduce", DOUBLE)
