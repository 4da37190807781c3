"""Which layers a pipeline stage holds, and its network."""

from collections.abc import Sequence
from functools import cache

from megatron_allattn.config import ModelConfig, ParallelConfig, RunConfig
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.model.network import Network, Part, logical_tensors
from megatron_allattn.model.span import look_back, window_length
from megatron_allattn.model.work import layer_flops, vocabulary_flops
from megatron_allattn.parallel.groups import Group


def stage_parts(
    parallel: ParallelConfig, model: ModelConfig, vocab_size: int, reach: Sequence[Sequence[int]], tokens: int
) -> list[Part]:
    """What every stage of a pipeline holds, as the flags say (one stage: everything).

    reach: how far every head looks, by layer; tokens: M of a block; both for `--pipeline-partition cost`.
    """
    stages = parallel.pipeline_model_parallel_size
    if stages == 1:
        return [Part(range(model.num_layers), model.num_layers)]
    if parallel.pipeline_layers is not None:
        return by_hand(parallel.layers_of_stages, model.num_layers)
    if parallel.pipeline_partition == "parameters":
        return cut(*_weights(model, vocab_size), stages)
    return cut(*_work(model, vocab_size, reach, tokens), stages)


def stage_network(
    run: RunConfig, vocab_size: int, tensor: Group, part: Part, fused: FusedOps, attend: Attend
) -> Network:
    """What a rank of the group `tensor` holds of a stage, as the run's flags say; its weights have no values yet."""
    recompute, sequence_parallel = run.training.recompute_granularity, run.parallel.sequence_parallel
    return Network(run.model, vocab_size, tensor, fused, attend, recompute, part, sequence_parallel=sequence_parallel)


def first_reach(model: ModelConfig) -> list[list[int]]:
    """How far the heads of every layer look as training starts."""
    longest, ramp = model.max_attention_span, model.span_ramp
    reach = look_back(0.0, window_length(0.0, longest, ramp), longest, ramp) if model.adaptive_span else longest
    return [[reach] * model.num_context_heads for _ in range(model.num_layers)]


def _weights(model: ModelConfig, vocab_size: int) -> tuple[list[float], float, float]:
    """The weights of every layer, of the embedding and of the output."""
    layers, rest = [0.0] * model.num_layers, {"embedding": 0.0, "output": 0.0}
    for tensor in logical_tensors(model, vocab_size):
        kind, _, name = tensor.name.partition(".")
        if kind == "layers":
            layers[int(name.partition(".")[0])] += tensor.numel
        elif kind in rest:
            rest[kind] += tensor.numel
    return layers, rest["embedding"], rest["output"]


def _work(
    model: ModelConfig, vocab_size: int, reach: Sequence[Sequence[int]], tokens: int
) -> tuple[list[float], float, float]:
    """The operations of a step's products, of every layer, of the embedding and of the output."""
    layers = [float(layer_flops(model, 1, tokens, layer, "blocked").executed) for layer in reach]
    vocabulary = vocabulary_flops(model, vocab_size, tokens)
    embedding = vocabulary["embedding"].executed if "embedding" in vocabulary else 0
    return layers, float(embedding), float(vocabulary["output"].executed)


def cut(costs: Sequence[float], first: float, last: float, stages: int) -> list[Part]:
    """Consecutive layers for every stage, at least one each, so that the largest stage's cost is least.

    costs: of every layer; first, last: what the first stage has beside layers (the embedding), and the last (the
    output). Of cuts that are equally good, the one whose first stages have more layers.
    Raises ValueError: there are more stages than layers.
    """
    count = len(costs)
    if stages > count:
        raise ValueError(f"{stages} stages: {count} layers fill at most {count}")

    def cost(stage: int, start: int, stop: int) -> float:
        return sum(costs[start:stop]) + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    @cache
    def best(stage: int, start: int) -> tuple[float, int]:
        """The largest cost of this stage and those after it, and where this one stops."""
        if stage == stages - 1:
            return cost(stage, start, count), count
        options = range(count - (stages - stage - 1), start, -1)
        return min((max(cost(stage, start, stop), best(stage + 1, stop)[0]), -stop) for stop in options)

    parts, start = [], 0
    for stage in range(stages):
        stop = abs(best(stage, start)[1])
        parts.append(Part(range(start, stop), count))
        start = stop
    return parts


def by_hand(counts: Sequence[int], num_layers: int) -> list[Part]:
    """So many layers for every stage. Raises ValueError: a stage has none, or they are not all layers."""
    if min(counts) < 1 or sum(counts) != num_layers:
        raise ValueError(f"{list(counts)}: every stage needs a layer, and together they must be {num_layers}")
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [Part(range(start, start + size), num_layers) for start, size in zip(starts, counts, strict=True)]
