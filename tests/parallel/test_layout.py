"""Rank arithmetic, by hand."""

import pytest

from megatron_allattn.parallel.layout import Layout, padded_share, streams_of


def test_tensor_is_the_fastest_axis_then_data_then_pipeline() -> None:
    layout = Layout(tensor_size=2, data_size=3, pipeline_size=2)
    assert layout.world_size == 12
    expected = [(tensor, data, pipeline) for pipeline in range(2) for data in range(3) for tensor in range(2)]
    found = [(layout.tensor_rank(rank), layout.data_rank(rank), layout.pipeline_rank(rank)) for rank in range(12)]
    assert found == expected
    assert [layout.rank(tensor=t, data=d, pipeline=p) for t, d, p in expected] == list(range(12))


def test_groups_of_a_rank() -> None:
    layout = Layout(tensor_size=2, data_size=2, pipeline_size=2)
    assert [layout.tensor_group(rank) for rank in (0, 1, 6)] == [[0, 1], [0, 1], [6, 7]]
    assert [layout.data_group(rank) for rank in (0, 3, 5)] == [[0, 2], [1, 3], [5, 7]]
    long = Layout(tensor_size=2, data_size=1, pipeline_size=3)
    assert [long.ends_group(rank) for rank in range(6)] == [[0, 4], [1, 5], [2], [3], [0, 4], [1, 5]]
    assert Layout(tensor_size=2, data_size=1, pipeline_size=1).ends_group(1) == [1]


def test_the_data_size_follows_from_the_world() -> None:
    assert Layout.from_world(8, tensor_size=2, pipeline_size=2) == Layout(tensor_size=2, data_size=2, pipeline_size=2)
    with pytest.raises(ValueError, match=r"world size 6: it must be a multiple of tensor × pipeline = 4 × 1"):
        Layout.from_world(6, tensor_size=4, pipeline_size=1)


@pytest.mark.parametrize("axis", ["tensor_size", "data_size", "pipeline_size"])
def test_an_axis_without_ranks_is_refused(axis: str) -> None:
    with pytest.raises(ValueError, match=f"{axis} 0: a grid axis holds at least one rank"):
        Layout(**{axis: 0})


def test_shares() -> None:
    assert [padded_share(total, 4) for total in (4, 5, 8, 101)] == [1, 2, 2, 26]


def test_streams_are_dealt_once_each_over_data_ranks_and_slots() -> None:
    dealt = [
        streams_of(data, slot, data_size=2, micro_batch_size=3, num_slots=2) for data in range(2) for slot in range(2)
    ]
    assert dealt == [range(3), range(3, 6), range(6, 9), range(9, 12)]


@pytest.mark.parametrize(("data", "slot"), [(2, 0), (-1, 0), (0, 2)])
def test_streams_outside_the_grid_are_refused(data: int, slot: int) -> None:
    with pytest.raises(ValueError, match=f"data rank {data} of 2, slot {slot} of 2: out of range"):
        streams_of(data, slot, data_size=2, micro_batch_size=3, num_slots=2)
