"""Which layers a pipeline stage holds."""

from collections.abc import Sequence
from functools import cache

from megatron_allattn.model.network import Part


def cut(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[Part]:
    """Consecutive layers for every stage, at least one each, so that the largest stage's cost is least.

    costs: of every layer; first, last: what the first stage has beside layers (the embedding), and the last (the
    output). Of cuts that are equally good, the one whose later stages have fewer layers.
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
