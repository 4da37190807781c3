"""Dealing layers to pipeline stages."""

from itertools import combinations, pairwise

import pytest

from megatron_allattn.config import ModelConfig, ParallelConfig
from megatron_allattn.model.network import Part
from megatron_allattn.model.partition import by_hand, cut, stage_parts

MODEL = ModelConfig(
    num_layers=5, hidden_size=32, num_attention_heads=4, persistent_memory_size=24, max_attention_span=512
)


def sizes(parts: list[Part]) -> list[int]:
    return [len(part.layers) for part in parts]


def worst(costs: list[float], first: float, last: float, counts: list[int]) -> float:
    loads, start = [], 0
    for count in counts:
        loads.append(sum(costs[start : start + count]))
        start += count
    loads[0] += first
    loads[-1] += last
    return max(loads)


@pytest.mark.parametrize(
    ("costs", "first", "last"),
    [
        ([1] * 7, 0, 0),
        ([1] * 7, 5, 0),
        ([1] * 7, 0, 9),
        ([5, 1, 1, 1, 1, 8, 1], 2, 3),
        ([1, 2, 3, 4, 5, 6, 7], 0, 1),
        ([0] * 7, 0, 0),
    ],
)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_no_cut_has_a_lighter_heaviest_stage(costs: list[float], first: float, last: float, stages: int) -> None:
    parts = cut(costs, first, last, stages)
    assert [layer for part in parts for layer in part.layers] == list(range(7))  # every layer, once, in order
    assert [part.first for part in parts] == [True] + [False] * (stages - 1)
    assert [part.last for part in parts] == [False] * (stages - 1) + [True]
    edges = ([0, *inner, 7] for inner in combinations(range(1, 7), stages - 1))
    every = [[b - a for a, b in pairwise(edge)] for edge in edges]
    assert worst(costs, first, last, sizes(parts)) == min(worst(costs, first, last, counts) for counts in every)


def test_equal_layers_are_dealt_evenly_and_the_first_stages_have_more() -> None:
    assert sizes(cut([1.0] * 5, 0, 0, 2)) == [3, 2]
    assert sizes(cut([1.0] * 7, 0, 0, 3)) == [3, 2, 2]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="4 stages: 3 layers fill at most 3"):
        cut([1.0] * 3, 0, 0, 4)


def test_by_hand() -> None:
    assert [part.layers for part in by_hand([2, 1, 2], 5)] == [range(2), range(2, 3), range(3, 5)]
    for wrong in ([2, 2], [5, 0], [6]):
        with pytest.raises(ValueError, match="together they must be 5"):
            by_hand(wrong, 5)


def of(parallel: ParallelConfig, spans: list[int], vocab_size: int) -> list[int]:
    reach = [[span] * 4 for span in spans]
    return sizes(stage_parts(parallel, MODEL, vocab_size, reach, 64))


def test_cost_is_spans_and_a_large_vocabulary_and_parameters_are_neither() -> None:
    two = {"pipeline_model_parallel_size": 2}
    assert of(ParallelConfig(), [33] * 5, 100) == [5]
    assert of(ParallelConfig(**two), [33] * 5, 100) == [3, 2]
    assert of(ParallelConfig(**two), [512, 512, 33, 33, 33], 100) == [1, 4]
    assert of(ParallelConfig(**two), [33] * 5, 5000) == [4, 1]
    by_weights = ParallelConfig(pipeline_partition="parameters", **two)
    assert of(by_weights, [512, 512, 33, 33, 33], 100) == [3, 2]
    assert of(ParallelConfig(pipeline_layers="1,4", **two), [33] * 5, 100) == [1, 4]
