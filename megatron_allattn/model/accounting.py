"""How large a model is: its parameters, the memory that a rank needs to train it, and what the rank sends."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_allattn.config import ParallelConfig, RunConfig
from megatron_allattn.config.errors import usage_error
from megatron_allattn.config.rules import batch_shape
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model import activations
from megatron_allattn.model.activations import FLOAT
from megatron_allattn.model.network import Network, Part
from megatron_allattn.model.partition import first_reach, stage_parts
from megatron_allattn.model.span import cache_length
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

    The backend is eager if the run says so and blocked otherwise (triton keeps about the same; what it works with is
    its own). Included: weights, gradients and optimizer state; Adagrad's gradients with weight decay and, with several
    replicas, the flat copies of the average; the blocked backend's scratch memory; today's and the next hidden-state
    caches of every micro-batch slot, as long as they get; what autograd keeps of every part of the network and the most
    that the part works with (`activations`). Not included: indices and other small tensors, buffers of the
    communication library, Python and PyTorch themselves.

    Args:
        windows: W of every layer.
        cluster_tokens: with an adaptive softmax, how many of a micro-batch's targets are in each cluster.
        longest: how far the head of all layers looks back that looks farthest (`look_back` of model/span.py), for the
            scratch memory; by default the longest window.

    Raises UsageError for what it does not know yet: pipelines, sequence parallelism, shared caches.
    """
    _check_predictable(run.parallel)
    batch = batch_shape(run, world_size)
    ranks = run.parallel.tensor_model_parallel_size
    model, shape = run.model, activations.Shape(batch.micro_batch_size, run.training.seq_length, ranks)
    with torch.device("meta"):
        network = Network(model, vocab_size, Group(tuple(range(ranks)), 0, None), FusedOps("torch"))
    total = _numel(network)
    parts = _parts(network, run, shape, windows, cluster_tokens)
    lengths = [cache_length(window, model.max_attention_span) for window in windows]
    streams = batch.micro_batch_size * batch.accumulation_steps
    moments = 2 if run.optimizer.optimizer == "adam" else 1
    always = total * (1 + moments) + 2 * cache_bytes(lengths, streams, model.hidden_size, 1)
    if run.training.attention_backend != "eager":
        whole = model.adaptive_span and model.span_normalization == "window"
        always += activations.blocked_scratch(model, shape, max(windows) if whole or longest is None else longest)

    phases = {}
    accumulates = batch.accumulation_steps > 1  # then all gradients are there before the last micro-batch
    live = always + (total if accumulates else 0)
    for part in parts:
        phases[f"{part.name} forward"] = live + part.forward
        live += part.kept
    for part in reversed(parts):
        live -= part.kept
        phases[f"{part.name} backward"] = live + part.backward
        live += part.unfinished if accumulates else part.gradients
    if batch.data_parallel_size > 1:
        phases["average"] = always + 3 * total
    phases["update"] = always + total + _update_elements(network, run)
    return {phase: elements * FLOAT for phase, elements in phases.items()}


def _check_predictable(parallel: ParallelConfig) -> None:
    stages = parallel.pipeline_model_parallel_size
    for flag, value in (
        ("--pipeline-model-parallel-size", str(stages) if stages > 1 else None),
        ("--sequence-parallel", "on" if parallel.sequence_parallel else None),
        ("--shard-caches", "on" if parallel.shard_caches else None),
    ):
        if value is not None:
            raise usage_error(flag, value, "its memory in a step cannot be predicted", "leave it out to predict memory")


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
    if run.parallel.shard_caches and len(cache_lengths) != run.model.num_layers:
        raise ValueError(f"cache_lengths {list(cache_lengths)}: {run.model.num_layers} layers need one each")
    sizes = run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size
    layout = Layout.from_world(world_size, *sizes)
    if parts is None:
        reach = first_reach(run.model)
        parts = stage_parts(run.parallel, run.model, vocab_size, reach, run.training.seq_length)
    place = Place(run, vocab_size, layout, rank, parts[layout.pipeline_rank(rank)])
    ledger = Ledger(layout, rank)
    enter_passes(ledger, place, cache_lengths, tail_targets)
    enter_update(ledger, place, zero_settings(place))
    return ledger


def _parts(
    network: Network,
    run: RunConfig,
    shape: activations.Shape,
    windows: Sequence[int],
    cluster_tokens: Sequence[int],
) -> list[activations.Part]:
    """The network's parts in the order of a forward pass."""
    model, vocab_size = network.config, network.vocab_size
    assert network.embedding is not None and network.output is not None
    tables = activations.vocabulary_tables(model, vocab_size, shape.ranks)
    if model.cutoffs and (len(cluster_tokens) != len(tables) or sum(cluster_tokens) != shape.tokens):
        raise ValueError(f"cluster_tokens {list(cluster_tokens)}: {len(tables)} clusters share {shape.tokens} targets")
    tokens = [shape.tokens, *cluster_tokens[1:]]  # every target takes part in the first softmax
    logits = [(count, *table) for count, table in zip(tokens, tables, strict=True)]
    position, of_output = _numel(network.position), _numel(network.output)
    tied = of_output + _numel(network.embedding) - _numel(torch.nn.ModuleList([network.embedding, network.output]))
    sizes = [rows * width for rows, width in tables]
    parts = [
        activations.embedding(model, shape, sizes, _numel(network.embedding) - tied),
        activations.Part("positions", position, position, 3 * position, position),
    ]
    eager, recompute = run.training.attention_backend == "eager", run.training.recompute_granularity
    for layer, window in enumerate(windows):
        gradients = _numel(network.layers[layer])
        parts += activations.layer_parts(model, shape, window, layer, gradients, eager, recompute)
    return [*parts, activations.output(model, shape, logits, of_output, tied)]


def _numel(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _update_elements(network: Network, run: RunConfig) -> int:
    """Temporaries of an update, which goes in place: with weight decay, Adagrad's copy of the gradients."""
    return _numel(network) if run.optimizer.optimizer == "adagrad" and run.optimizer.weight_decay else 0
