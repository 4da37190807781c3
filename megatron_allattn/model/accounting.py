"""How large a model is: its parameters, the memory that a rank needs to train it, and what the rank sends."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_allattn.config import RunConfig
from megatron_allattn.config.errors import usage_error
from megatron_allattn.config.rules import batch_shape
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.activation_backends import blocked_scratch
from megatron_allattn.model.activation_shapes import FLOAT, Shape
from megatron_allattn.model.network import Network, Part
from megatron_allattn.model.partition import first_reach, stage_parts
from megatron_allattn.model.span import cache_length
from megatron_allattn.model.step_memory import Flight, layers_of, numel, step_parts
from megatron_allattn.model.step_memory import step_phases as step_kinds
from megatron_allattn.model.traffic import Place, enter_passes
from megatron_allattn.model.traffic_update import enter_update, zero_settings
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of logical parameters (vocabulary padding and shards' copies not counted)."""

    total: int
    persistent: int
    local: int  # elements this rank holds, padding included


def count_parameters(network: Network) -> ParameterCount:
    """Count the parameters of a network of any layout."""
    logicals = [logical for logical, _ in network.logical_parameters()]
    return ParameterCount(
        total=sum(logical.numel for logical in logicals),
        persistent=sum(logical.numel for logical in logicals if ".persistent." in logical.name),
        local=sum(parameter.numel() for parameter in network.parameters()),
    )


def count_by_part(network: Network) -> dict[str, ParameterCount]:
    """The same for each part: `embedding`, `position`, `layers` and `output`, an adaptive vocabulary by its clusters
    (`embedding.cluster0`, …, `output.cluster_logits`). A tied weight counts with the embedding.
    """
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for logical, parameter in network.logical_parameters():
        names = logical.name.split(".")
        part = ".".join(names[:2]) if names[1].startswith("cluster") else names[0]
        persistent = logical.numel if ".persistent." in logical.name else 0
        parts.setdefault(part, []).append((logical.numel, persistent, parameter.numel()))
    return {part: ParameterCount(*map(sum, zip(*counts, strict=True))) for part, counts in parts.items()}


def state_bytes(local_parameters: int, *, zero_stage: int, data_size: int, half: bool, moments: int) -> int:
    """Bytes of weights, gradients and optimizer state on a rank (ZeRO, Rajbhandari et al. 2020, section 5).

    moments: float32 values an optimizer keeps per parameter beside the master weight (Adagrad 1, Adam 2).
    """
    compute = 2 if half else 4
    master = 4 if half else 0
    weights = local_parameters * compute / (data_size if zero_stage >= 3 else 1)
    gradients = local_parameters * compute / (data_size if zero_stage >= 2 else 1)
    optimizer = local_parameters * (4 * moments + master) / (data_size if zero_stage >= 1 else 1)
    return int(weights + gradients + optimizer)


def cache_bytes(lengths: list[int], streams: int, hidden_size: int, element_bytes: int) -> int:
    """Bytes of the hidden-state caches of a rank's `streams` at these cache lengths (one per layer)."""
    return sum(lengths) * streams * hidden_size * element_bytes


def peak_step_bytes(
    run: RunConfig,
    vocab_size: int,
    world_size: int,
    windows: Sequence[int],
    cluster_tokens: Sequence[int] = (),
    longest: int | None = None,
) -> int:
    """The most bytes of tensors that a rank holds at any moment of a training step: the highest of `step_phases`."""
    return max(step_phases(run, vocab_size, world_size, windows, cluster_tokens, longest).values())


def step_phases(
    run: RunConfig,
    vocab_size: int,
    world_size: int,
    windows: Sequence[int],
    cluster_tokens: Sequence[int] = (),
    longest: int | None = None,
) -> dict[str, int]:
    """The most bytes of tensors on a rank in each phase of a training step of `PlainEngine` in float32.

    The backend is eager if the run says so and blocked otherwise. Included: weights, gradients and optimizer state;
    Adagrad's gradients with weight decay and, with several replicas, the flat copies of the average; the blocked
    backend's scratch memory; today's and the next hidden-state caches of every micro-batch slot, as long as they get;
    what autograd keeps of every part of the network and the most that the part works with (`activations`). Not
    included: indices and other small tensors, buffers of the communication library, Python and PyTorch themselves.
    cluster/planning/memory.py does the same for DeepSpeed's engines, pipelines and half precision.

    Args:
        windows: W of every layer.
        cluster_tokens: with an adaptive softmax, how many of a micro-batch's targets are in each cluster.
        longest: how far the head of all layers looks back that looks farthest (`look_back` of model/span.py), for the
            scratch memory; by default the longest window.

    Raises UsageError for a pipeline, which that engine does not have.
    """
    parallel, training, model = run.parallel, run.training, run.model
    if parallel.pipeline_model_parallel_size > 1:
        stages, fix = parallel.pipeline_model_parallel_size, "leave it out, or see tools/plan.py"
        raise usage_error("--pipeline-model-parallel-size", stages, "the plain engine has no pipeline", fix)
    batch, ranks = batch_shape(run, world_size), parallel.tensor_model_parallel_size
    cut = parallel.sequence_parallel and ranks > 1
    shape = Shape(batch.micro_batch_size, training.seq_length, ranks, cut=cut)
    with torch.device("meta"):
        network = Network(model, vocab_size, Group(tuple(range(ranks)), 0, None), FusedOps("torch"))
    total, backend = numel(network), "eager" if training.attention_backend == "eager" else "blocked"
    shared = parallel.shard_caches and ranks > 1
    heads = model.num_context_heads // ranks
    layers = layers_of(network, windows, [(window,) * heads for window in windows], shared=shared)
    parts = step_parts(network, run, shape, layers, backend, cluster_tokens)  # type: ignore[arg-type]
    lengths = [cache_length(window, model.max_attention_span) for window in windows]
    streams = batch.micro_batch_size * batch.accumulation_steps
    moments = 2 if run.optimizer.optimizer == "adam" else 1
    caches = cache_bytes(lengths, streams, model.hidden_size, 1) // (ranks if shared else 1)
    always = total * (1 + moments) + 2 * caches
    if backend == "blocked":
        whole = model.adaptive_span and model.span_normalization == "window"
        always += blocked_scratch(model, shape, max(windows) if whole or longest is None else longest)

    phases = {}
    for phase in step_kinds(parts, Flight(batch.accumulation_steps)):
        gradients = (total + phase.waiting if phase.again else phase.done) + phase.own
        phases[phase.name] = always + phase.activations + gradients
    if batch.data_parallel_size > 1:
        phases["average"] = always + 3 * total
    phases["update"] = always + total + _update_elements(network, run)
    return {phase: elements * FLOAT for phase, elements in phases.items()}


def step_traffic(
    run: RunConfig,
    vocab_size: int,
    world_size: int,
    rank: int = 0,
    *,
    cache_lengths: Sequence[int] = (),
    tail_targets: int = 0,
    parts: Sequence[Part] | None = None,
) -> Ledger:
    """The messages that a rank exchanges in a training step with DeepSpeed, by group and operation: those of
    `Engine.spans`, `forward_backward` and `update` together.

    Of a step of a run that is under way: DeepSpeed sends more in the first two micro-batches, and ZeRO 3 gathers
    weights at other times after an evaluation. Evaluations and checkpoints are not included.

    Args:
        cache_lengths: with shared caches, how many positions the cache of every layer has that the step reads.
        tail_targets: with an adaptive softmax, how many of this replica's targets in the step are in a cluster after
            the first.
        parts: what every stage of a pipeline holds, by default as a new run deals the layers.

    Raises UsageError for a DeepSpeed JSON whose traffic is not known.
    """
    place = place_of(run, vocab_size, world_size, rank, parts)
    ledger = passes_traffic(place, cache_lengths, tail_targets)
    ledger.include(update_traffic(place))
    return ledger


def passes_traffic(place: Place, cache_lengths: Sequence[int] = (), tail_targets: int = 0) -> Ledger:
    """Of `step_traffic`, what forward and backward passes send."""
    run = place.run
    if run.parallel.shard_caches and len(cache_lengths) != run.model.num_layers:
        raise ValueError(f"cache_lengths {list(cache_lengths)}: {run.model.num_layers} layers need one each")
    ledger = Ledger(place.layout, place.rank)
    enter_passes(ledger, place, cache_lengths, tail_targets)
    return ledger


def update_traffic(place: Place) -> Ledger:
    """Of `step_traffic`, the reduction of gradients, the update, and weights that ZeRO 3 gathers."""
    ledger = Ledger(place.layout, place.rank)
    enter_update(ledger, place, zero_settings(place))
    return ledger


def place_of(run: RunConfig, vocab_size: int, world_size: int, rank: int, parts: Sequence[Part] | None = None) -> Place:
    """A rank and what its stage holds, by default as a new run deals the layers."""
    sizes = run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size
    layout = Layout.from_world(world_size, *sizes)
    if parts is None:
        parts = stage_parts(run.parallel, run.model, vocab_size, first_reach(run.model), run.training.seq_length)
    return Place(run, vocab_size, layout, rank, parts[layout.pipeline_rank(rank)])


def _update_elements(network: Network, run: RunConfig) -> int:
    """Temporaries of an update, which goes in place: with weight decay, Adagrad's copy of the gradients."""
    return numel(network) if run.optimizer.optimizer == "adagrad" and run.optimizer.weight_decay else 0
