"""Dealing heads to tensor-parallel ranks, against every way to do it."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

import pytest
import torch

from megatron_allattn.benchmark.profiles import packaged, read_profile
from megatron_allattn.config import ModelConfig
from megatron_allattn.model.placement import balance, head_costs, loads, slowest_share
from megatron_allattn.model.span import layer_windows, layers_look_back
from megatron_allattn.parallel.logical import Init, LayerHeads, LogicalTensor, Placement, in_order


@cache
def splits(count: int, ranks: int) -> list[Placement]:
    """Every way to deal `count` heads evenly, ranks not told apart."""

    def rest(heads: tuple[int, ...]) -> Iterator[Placement]:
        if not heads:
            yield ()
        for others in combinations(heads[1:], count // ranks - 1 if heads else 0):
            own = (heads[0], *others) if heads else ()
            for more in rest(tuple(head for head in heads if head not in own)) if own else ():
                yield (own, *more)

    return list(rest(tuple(range(count))))


def best(costs: Sequence[float], ranks: int) -> float:
    return min(max(loads(costs, split)) for split in splits(len(costs), ranks))


def test_every_split_is_looked_at() -> None:
    assert len(splits(8, 4)) == 105 and len(splits(8, 2)) == 35 and len(splits(12, 3)) == 5775  # times ranks!: 2520 …
    assert best([5, 1, 1, 1, 5, 1, 1, 1], 2) == 8 and best([4, 3, 2, 1], 2) == 5


@pytest.mark.parametrize(("count", "ranks"), [(8, 2), (8, 4), (8, 8), (8, 1), (9, 3), (10, 2)])
def test_near_the_best_split_of_heavy_tails(count: int, ranks: int) -> None:
    generator = random.Random(5)
    for _ in range(150):
        costs = [min(8192.0, 40 * generator.paretovariate(0.7)) for _ in range(count)]
        found = balance(costs, ranks)
        assert sorted(head for own in found for head in own) == list(range(count))
        assert {len(own) for own in found} == {count // ranks}
        assert max(loads(costs, found)) <= 1.1 * best(costs, ranks)
        assert max(loads(costs, found)) <= max(loads(costs, in_order(count, ranks)))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", packaged())
def test_near_the_best_split_of_every_profile(name: str, ranks: int) -> None:
    for layer in read_profile(name).tokens:
        assert max(loads(layer, balance(layer, ranks))) <= 1.1 * best(layer, ranks)


def test_by_hand() -> None:
    assert balance([9, 8, 1, 1], 2) == ((0, 3), (1, 2))
    assert balance([1, 1, 1, 1, 1, 1, 9, 7], 4) == ((0, 2), (1, 3), (4, 7), (5, 6))


def test_heads_are_exchanged_where_dealing_by_falling_cost_is_not_enough() -> None:
    """It deals 3 + 2 + 2 and 3 + 2 + 0; a 3 for a 2 makes 6 of both."""
    assert loads([3, 3, 2, 2, 2, 0], balance([3, 3, 2, 2, 2, 0], 2)) == [6, 6]


def test_rounding_does_not_exchange_for_ever() -> None:
    assert balance([0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1 + 2e-17, 0.7], 4) == balance([1, 2, 3, 1, 2, 3, 1, 7], 4)


def test_heads_stay_in_order_where_that_is_as_good() -> None:
    assert balance([3.0] * 8, 4) == in_order(8, 4)
    assert balance([5, 1, 1, 1, 5, 1, 1, 1], 2) == in_order(8, 2)
    assert balance([4, 4, 9, 1], 1) == ((0, 1, 2, 3),)


def test_what_cannot_be_dealt_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="6 heads cannot be dealt evenly to 4 ranks"):
        balance([1] * 6, 4)


def test_the_share_of_the_slowest_rank_is_taken_layer_by_layer() -> None:
    """Ranks wait for each other in every layer: 6 of 8 and 5 of 8."""
    costs, placements = [[5, 1, 1, 1], [1, 1, 1, 5]], [((0, 1), (2, 3)), ((0, 1, 2), (3,))]
    assert slowest_share(costs, placements) == 11 / 16


def test_what_a_head_costs() -> None:
    """Columns in steps of 16, and the persistent vectors of its softmax."""
    model = ModelConfig(num_layers=2, num_attention_heads=4, persistent_memory_size=10, max_attention_span=256)
    z = [[0.0, 0.25, 1.0, 0.5], [0.0] * 4]
    reach = layers_look_back(z, layer_windows(z, 256, 32), 256, 32)
    assert reach == ((33, 97, 256, 161), (33,) * 4)
    assert head_costs(model, reach[0]) == [58, 122, 266, 186]
    apart = ModelConfig(num_attention_heads=4, persistent_memory_size=10, variant="attn-split")
    assert head_costs(apart, reach[0]) == [48, 112, 256, 176]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("placement", [((2, 0), (3, 1)), ((0, 1), (2, 3)), ((3,), (1,), (0,), (2,)), ((1, 0, 3, 2),)])
def test_placed_shards_join_to_the_logical_tensor(placement: Placement, dim: int) -> None:
    full = torch.arange(12 * 8).view(12, 8)
    logical = LogicalTensor("w", (12, 8), dim, Init("constant", 0.0), LayerHeads(0, 4))
    parts = len(placement)
    shards = [logical.shard(full, rank, parts, placement) for rank in range(parts)]
    assert {tuple(shard.shape) for shard in shards} == {logical.local_shape(parts)}
    size = full.shape[dim] // 4
    own = torch.cat([full.narrow(dim, head * size, size) for head in placement[0]], dim)
    assert torch.equal(shards[0], own) and torch.equal(logical.join(shards, placement), full)
