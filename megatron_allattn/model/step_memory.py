"""The order in which a stage's parts hold memory during a step: one micro-batch, or those in flight in a pipeline.

A stage of a pipeline (1F1B, as DeepSpeed runs it) has up to S − s micro-batches in flight, S stages and s from 0: it
holds all that autograd keeps of them, and one of them is at work. What neighbours send each other is in `Flight`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_allattn.config import RunConfig
from megatron_allattn.model import activations
from megatron_allattn.model.activation_shapes import Backend, Layer, Part, Shape
from megatron_allattn.model.network import Network
from megatron_allattn.model.span import cache_length


@dataclass(frozen=True)
class Phase:
    """Elements at the fullest moment of a part's forward or backward.

    backward: which of the two; activations: what autograd keeps of all parts and all micro-batches in flight, and what
    is at work; done: gradients of other parts of this micro-batch; waiting: those of them to which a part has yet to
    add (tied weights); own: this part's; again: whether an earlier micro-batch's gradients are there.
    """

    name: str
    backward: bool
    activations: int
    done: int = 0
    waiting: int = 0
    own: int = 0
    again: bool = False


@dataclass(frozen=True)
class Flight:
    """A stage's micro-batches and what DeepSpeed's pipeline holds of their messages, in elements.

    slots: micro-batches of a step; most: of them in flight at a time · received: of each, until its gradient is sent;
    receiving: the most while it comes in · sent: of each that waits for its backward (negative: less than autograd
    keeps of its own) · through: during a whole backward, the gradient that has come · restoring: the most while it and
    the output are put together · output: what was given to the next stage or the loss, which stays when autograd needs
    it no more · buffers: in which messages come, for good.
    """

    slots: int
    most: int = 1
    received: int = 0
    receiving: int = 0
    sent: int = 0
    through: int = 0
    restoring: int = 0
    output: int = 0
    buffers: int = 0


def flight_of(stage: int, stages: int, slots: int, shape: Shape, hidden_size: int) -> Flight:
    """Of stage `stage` of `stages`."""
    if stages == 1:
        return Flight(slots)
    first, last = stage == 0, stage == stages - 1
    most, whole, own = min(stages - stage, slots), shape.tokens * hidden_size, shape.own * hidden_size
    if shape.ranks == 1 or shape.cut:  # a rank's own positions, as they are: what has come in, and a copy
        ends = 0 if first else 2 * own, 0 if first else 2 * own
        return Flight(slots, most, *ends, output=own, buffers=own * ((not first) + (not last)))
    part = whole // shape.ranks  # each rank sends a part, and the receivers put them together
    return Flight(
        slots,
        most,
        received=0 if first else whole,
        receiving=0 if first else 2 * whole + 2 * part,
        sent=0 if last else part - whole,
        through=0 if last else whole,
        restoring=0 if last else 3 * whole,
        output=whole,
        buffers=part * ((not first) + (not last)),
    )


def step_parts(
    network: Network,
    run: RunConfig,
    shape: Shape,
    layers: Sequence[Layer],
    backend: Backend,
    cluster_tokens: Sequence[int],
) -> list[Part]:
    """The parts of a network, or of a stage of it, in the order of a forward pass.

    layers: of this stage; cluster_tokens: with an adaptive softmax, how many of a micro-batch's targets are in each
    cluster. Raises ValueError: they are not a micro-batch's.
    """
    model = network.config
    tables = activations.vocabulary_tables(model, network.vocab_size, shape.ranks)
    position, recompute = numel(network.position), run.training.recompute_granularity
    parts = [Part("positions", position, position, 3 * position, position)]
    for layer in layers:
        parts += activations.layer_parts(model, shape, layer, backend, recompute)
    tied = 0
    if network.part.last:
        if model.cutoffs:
            activations.check_cluster_tokens(cluster_tokens, len(tables), shape.tokens)
        assert network.output is not None
        tokens = [shape.tokens, *cluster_tokens[1:]]  # every target takes part in the first softmax
        logits = [(count, *table) for count, table in zip(tokens, tables, strict=True)]
        of_output = numel(network.output)
        if network.embedding is not None and network.part.first:
            both = torch.nn.ModuleList([network.embedding, network.output])
            tied = of_output + numel(network.embedding) - numel(both)
        parts.append(activations.output(model, shape, logits, of_output, tied))
    if network.part.first:
        assert network.embedding is not None
        sizes = [rows * width for rows, width in tables]
        parts.insert(0, activations.embedding(model, shape, sizes, numel(network.embedding) - tied))
    return parts


def layers_of(
    network: Network,
    windows: Sequence[int],
    look_back: Sequence[Sequence[int]],
    *,
    shared: bool,
) -> list[Layer]:
    """The layers of a stage. windows: of all layers; look_back: of the local heads of this stage's layers; shared:
    whether the tensor group shares its caches."""
    layers, longest = [], network.config.max_attention_span
    for place, index in enumerate(network.part.layers):
        cached = cache_length(windows[index], longest) if shared else 0
        gradients = numel(network.layers[place])
        layers.append(Layer(index, windows[index], tuple(look_back[place]), gradients, cached, cached))
    return layers


def step_phases(parts: Sequence[Part], flight: Flight) -> Iterator[Phase]:
    """A micro-batch at work while as many others are in flight as there can be; gradients accumulate from the first
    micro-batch whose backward is over."""
    kept = flight.received + sum(part.kept for part in parts)
    live = flight.buffers + (flight.most - 1) * (kept + flight.sent)
    again = flight.slots > flight.most
    if flight.receiving:
        yield Phase("receive", False, live + flight.receiving, again=again)
    live += flight.received
    for part in parts:
        yield Phase(f"{part.name} forward", False, live + part.forward, again=again)
        live += part.kept
    again, done, waiting = flight.slots > 1, 0, 0
    if flight.restoring:
        yield Phase("restore", True, live + flight.sent + flight.restoring, again=again)
    live += flight.through
    output = flight.output
    for part in reversed(parts):
        live -= part.kept
        working = live + part.backward - part.gradients
        yield Phase(f"{part.name} backward", True, working, done, waiting, part.gradients, again)
        done, waiting = done + part.gradients, waiting + part.unfinished
        if part.name.startswith("layer"):  # the last one's result was its own until here
            live, output = live + output, 0


def numel(module: torch.nn.Module) -> int:
    """Elements of its parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
