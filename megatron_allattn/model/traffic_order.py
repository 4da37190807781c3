"""In which order a network uses its parameters, and in which autograd completes their gradients: buckets of gradients
follow it, and the weights that ZeRO 3 gathers.

Autograd goes through its nodes from the last that was made to the first, and a gradient is complete after the node that
has used its parameter first. Parameters of one node come in the order of its arguments, unless there are many (autograd
has a heap of what is ready): those of an adaptive output, whose buckets may hence be one more or one less than is said.
"""

from collections.abc import Iterable, Iterator

from torch import nn

from megatron_allattn.model.attention import SelfAttention
from megatron_allattn.model.network import Network
from megatron_allattn.model.persistent import PersistentMemory
from megatron_allattn.model.position import PositionEmbedding
from megatron_allattn.model.variants import AttnSplit, HeadSplit, SingleHead
from megatron_allattn.parallel.adaptive import AdaptiveEmbedding, AdaptiveOutput
from megatron_allattn.parallel.linear import ColumnParallelLinear, RowParallelLinear

Use = tuple[nn.Parameter, ...]  # of one node


def called(module: nn.Module) -> Iterable[nn.Module]:
    """What a module calls, in order."""
    if isinstance(module, SelfAttention):
        return [one for one in (module.span, getattr(module, "persistent", None), module.out) if one is not None]
    if isinstance(module, Network):
        every = [module.embedding if module.part.first else None, module.position, *module.layers, module.output]
        return [one for one in every if one is not None]
    return module.children()


def gradient_order(network: Network, *, eager: bool) -> list[nn.Parameter]:
    """Parameters as their gradients are completed in a micro-batch. eager: the attention backend is."""
    uses = list(_uses(network, eager))
    first: dict[nn.Parameter, int] = {}
    for place, use in enumerate(uses):
        for one in use:
            first.setdefault(one, place)
    return [one for place in reversed(range(len(uses))) for one in uses[place] if first[one] == place]


def _uses(module: nn.Module, eager: bool) -> Iterator[Use]:
    """A forward pass."""
    if isinstance(module, SelfAttention):
        yield from _attention(module, eager)
    elif isinstance(module, AdaptiveEmbedding | AdaptiveOutput):
        yield from _clusters(module)
    elif isinstance(module, PersistentMemory | PositionEmbedding):
        yield from ((one,) for one in module.parameters())
    elif isinstance(module, ColumnParallelLinear) and module.bias is not None:
        yield module.bias, module.weight
    elif isinstance(module, RowParallelLinear):
        yield from ((one,) for one in module.parameters())
    elif own := tuple(module.parameters(recurse=False)):
        yield own
    else:
        for one in called(module):
            yield from _uses(one, eager)


def _attention(module: SelfAttention, eager: bool) -> Iterator[Use]:
    pairs = module.key, module.value
    context: list[Use] = [(module.query,), (module.key,), (module.value,)] if eager else [(module.query, *pairs)]
    memory: list[Use] = []
    if hasattr(module, "persistent"):
        memory = [(one,) for one in module.get_submodule("persistent").parameters()]
    if module.span is not None:
        yield (module.span.z,)
    if isinstance(module, AttnSplit | SingleHead | HeadSplit):  # queries are used once more, and before
        yield (module.query,)
    yield from [*context, *memory] if isinstance(module, HeadSplit) else [*memory, *context]
    yield (module.out.weight,)


def _clusters(module: AdaptiveEmbedding | AdaptiveOutput) -> Iterator[Use]:
    """Of an adaptive vocabulary."""
    count = range(len(module.clusters))
    projections = [module.get_parameter(f"projection{k}") for k in count]
    if module.group.size > 1:
        yield tuple(projections)
    if isinstance(module, AdaptiveEmbedding):
        for k in count:
            yield from ((module.weight(k),), (projections[k],))
        return
    yield from ((one,) for one in projections)
    words = [(module.weight(k), module.get_parameter(f"bias{k}")) for k in count]
    yield tuple(one for pair in [words[0], (module.cluster_weight, module.cluster_bias), *words[1:]] for one in pair)
