"""The most that a rank holds in memory at any moment of a training step, by part.

The phases of a step are those of model/step_memory.py: every part of the network forward and backward, then the
reduction of gradients and the update; what of parameters is there in each is in states.py. Not included: indices and
other small tensors, what the device's driver and libraries take, and what an allocator leaves between tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

from megatron_allattn.cluster.planning.devices import Device, Precision
from megatron_allattn.cluster.planning.states import States, states_of
from megatron_allattn.config import ModelConfig, RunConfig, usage_error
from megatron_allattn.kernels.registry import TRITON_HEAD_SIZES
from megatron_allattn.model.accounting import place_of
from megatron_allattn.model.activation_backends import blocked_scratch
from megatron_allattn.model.activation_shapes import Backend, Shape
from megatron_allattn.model.network import Part
from megatron_allattn.model.span import cache_length, window_of_reach
from megatron_allattn.model.step_memory import flight_of, layers_of, step_parts, step_phases
from megatron_allattn.model.traffic import Place
from megatron_allattn.model.work import usual_cluster_tokens


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank's device in the phase of a step in which it holds most.

    weights: what the layers compute with · gradients · optimizer: its state and the master weights · caches: today's
    hidden states and the next · activations: what autograd keeps, and what is at work · buffers: of reductions, of
    messages between stages, of weights that ZeRO 3 gathers, and the scratch memory of attention · phase: which it is.
    """

    weights: int
    gradients: int
    optimizer: int
    caches: int
    activations: int
    buffers: int
    phase: str

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """By name, what `total` adds up."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "phase"}


def rank_memory(
    run: RunConfig,
    vocab_size: int,
    world_size: int,
    rank: int,
    look_back: Sequence[Sequence[int]],
    device: Device,
    *,
    parts: Sequence[Part] | None = None,
) -> RankMemory:
    """What `rank` of `world_size` needs on `device` to train this run, which `check_world` accepts, with DeepSpeed.

    Replicas need the same but for the gradients of ZeRO 1 and 2 after the last backward (states.py), shards but for
    the spans of their heads.

    Args:
        look_back: how far every head that attends to the context looks, by layer (`look_back` of model/span.py), such
            as `first_reach` of model/partition.py.
        parts: what every stage of a pipeline holds, by default as a new run deals the layers.

    Raises UsageError for what cannot be predicted, with the reason.
    """
    place = place_of(run, vocab_size, world_size, rank, parts)
    return max(memory_phases(place, look_back, device), key=lambda phase: phase.total)


def memory_phases(
    place: Place,
    look_back: Sequence[Sequence[int]],
    device: Device,
    states: States | None = None,
) -> list[RankMemory]:
    """Every phase of a step in order; the arguments are those of `rank_memory`. states: of `states_of`, if known.

    With an adaptive softmax as many targets are in each cluster as usually are.
    """
    run, states, element = place.run, states or states_of(place), place.element
    model, layout = run.model, place.layout
    shape = _shape(place)
    windows = [window_of_reach(max(layer), model.max_attention_span) for layer in look_back]
    shared = run.parallel.shard_caches and place.shards > 1
    own = [_local(look_back[layer], place) for layer in place.part.layers]
    backend, targets = backend_on(run, device), usual_cluster_tokens(model, place.vocab_size, shape.tokens)
    layers = layers_of(place.network, windows, own, shared=shared)
    flight = flight_of(layout.pipeline_rank(place.rank), layout.pipeline_size, place.slots, shape, model.hidden_size)
    parts = step_parts(place.network, run, shape, layers, backend, targets)
    caches = 2 * cache_bytes_of(place, windows)
    scratch = _scratch(place, shape, own, windows, backend, device)
    found = []
    for phase in step_phases(parts, flight):
        gradients = states.gradients_in(phase)
        buffers = scratch + states.gathered + states.buffers_in(phase)
        activations = phase.activations * element
        found.append(RankMemory(states.weights, gradients, states.optimizer, caches, activations, buffers, phase.name))
    inputs = flight.buffers * element
    for name, (gradients, buffers) in (("reduction", states.reduce), ("update", states.update)):
        buffers += scratch
        found.append(RankMemory(states.weights, gradients, states.optimizer, caches, inputs, buffers, name))
    return found


def _shape(place: Place) -> Shape:
    batch = place.batch.micro_batch_size
    return Shape(batch, place.run.training.seq_length, place.shards, place.element, place.sequence_parallel)


def _local(layer: Sequence[int], place: Place) -> tuple[int, ...]:
    """Of this rank's heads, which are consecutive."""
    count, rank = len(layer) // place.shards, place.layout.tensor_rank(place.rank)
    return tuple(layer[rank * count : (rank + 1) * count])


def cache_bytes_of(place: Place, windows: Sequence[int]) -> int:
    """Bytes of the hidden states that a rank keeps between two steps, once its caches are full."""
    model, streams = place.run.model, place.slots * place.batch.micro_batch_size
    positions = sum(cache_length(windows[layer], model.max_attention_span) for layer in place.part.layers)
    sharers = place.shards if place.run.parallel.shard_caches else 1
    return positions * streams * (model.hidden_size // sharers) * place.element


def _scratch(
    place: Place,
    shape: Shape,
    look_back: Sequence[Sequence[int]],
    windows: Sequence[int],
    backend: Backend,
    device: Device,
) -> int:
    """Bytes of the blocked backend's memory that all layers share."""
    if backend != "blocked":
        return 0
    model = place.run.model
    whole = model.adaptive_span and model.span_normalization == "window"
    longest = max(windows[layer] for layer in place.part.layers) if whole else max(map(max, look_back))
    return _blocked_scratch(model, replace(shape, cut=False), longest, device.shared) * shape.element


@cache
def _blocked_scratch(model: ModelConfig, shape: Shape, longest: int, compiled: bool) -> int:
    """`blocked_scratch`, which takes a while, of all layouts of one shape."""
    return blocked_scratch(model, shape, longest, compiled=compiled)


def backend_on(run: RunConfig, device: Device) -> Backend:
    """The attention backend that runs on a device, as kernels/registry.py chooses there. Raises UsageError."""
    model, choice = run.model, run.training.attention_backend
    obstacles = {
        "triton": f"it does not run on {device.name}"
        if not device.triton
        else f"heads have {model.head_size} channels"
        if model.head_size not in TRITON_HEAD_SIZES
        else "it has no --span-normalization window"
        if model.span_normalization != "span"
        else None,
        "blocked": "its masks need more bits than float16 has" if run.training.fp16 else None,
        "eager": None,
    }
    name = choice if choice != "auto" else next(name for name, obstacle in obstacles.items() if obstacle is None)
    obstacle = obstacles[name]
    if obstacle is not None:
        raise usage_error("--attention-backend", name, obstacle, "choose auto")
    if name == "eager" and precision_of(run) != "float32":
        rule = "its memory in half precision cannot be predicted"
        raise usage_error("--attention-backend", name, rule, "choose another backend or precision, or another device")
    return name  # type: ignore[return-value]


def precision_of(run: RunConfig) -> Precision:
    """In which it computes."""
    return "bfloat16" if run.training.bf16 else "float16" if run.training.fp16 else "float32"
