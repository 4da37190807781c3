"""Which rank of the tensor group gets which heads of a layer: so that the rank with the most work has little.

Every rank holds equally many heads, whatever they cost, and a layer is done when its slowest rank is. What a head costs
follows its span, which it learns; a rank with two long heads keeps all others waiting.
"""

from collections.abc import Sequence

from megatron_allattn.config import ModelConfig
from megatron_allattn.kernels.band import columns_of
from megatron_allattn.parallel.logical import Placement, in_order


def head_costs(config: ModelConfig, reach: Sequence[int]) -> list[int]:
    """The columns of scores that every head of a layer computes, with one row for each token.

    reach: how far each one looks (`look_back` of model/span.py).
    """
    vectors = config.persistent_memory_size if config.variant == "all-attn" else 0
    return [columns_of(distance) + vectors for distance in reach]


def balance(costs: Sequence[float], ranks: int) -> Placement:
    """Heads over `ranks` ranks, equally many each, so that the largest sum of costs is small: heads of falling cost to
    the rank that has least (Graham 1969), then exchanges of two heads for as long as the most loaded rank gains.

    Heads stay in their order where that is as good. It is a function of the costs alone, so that a run that goes on
    from a checkpoint finds the same. Raises ValueError: the heads do not divide.
    """
    if len(costs) % ranks:
        raise ValueError(f"{len(costs)} heads cannot be dealt evenly to {ranks} ranks")
    held = _deal(costs, ranks)
    while _exchange(costs, held):
        pass
    found = tuple(sorted(tuple(sorted(own)) for own in held))
    plain = in_order(len(costs), ranks)
    return found if max(loads(costs, found)) < max(loads(costs, plain)) else plain


def loads(costs: Sequence[float], placement: Sequence[Sequence[int]]) -> list[float]:
    """Every rank's sum of costs."""
    return [sum(costs[head] for head in own) for own in placement]


def slowest_share(costs: Sequence[Sequence[float]], placements: Sequence[Placement]) -> float:
    """The slowest rank's part of the work of some layers, all of whose ranks wait for each other in every layer."""
    slowest = sum(max(loads(layer, placement)) for layer, placement in zip(costs, placements, strict=True))
    return slowest / sum(map(sum, costs))


def _deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    held: list[list[int]] = [[] for _ in range(ranks)]
    sums, each = [0.0] * ranks, len(costs) // ranks
    for head in sorted(range(len(costs)), key=lambda head: -costs[head]):
        rank = min((rank for rank in range(ranks) if len(held[rank]) < each), key=sums.__getitem__)
        held[rank].append(head)
        sums[rank] += costs[head]
    return held


def _exchange(costs: Sequence[float], held: list[list[int]]) -> bool:
    """Make the exchange between the most loaded rank and another that leaves the larger of the two least loaded; False
    where none helps."""
    sums = loads(costs, held)
    most = max(range(len(held)), key=sums.__getitem__)
    best, places = sums[most] * (1 - 1e-9), None  # less is rounding, which could go in circles
    for other in range(len(held)):
        for i, mine in enumerate(held[most]):
            for j, theirs in enumerate(held[other]):
                gain = costs[mine] - costs[theirs]
                worse = max(sums[most] - gain, sums[other] + gain)
                if other != most and worse < best:
                    best, places = worse, (other, i, j)
    if places is None:
        return False
    other, i, j = places
    held[most][i], held[other][j] = held[other][j], held[most][i]
    return True
