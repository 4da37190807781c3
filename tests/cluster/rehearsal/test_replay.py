"""The replay of ranks' calls, by hand: what meets, what differs, and who waits for ever."""

from dataclasses import replace

import pytest

from megatron_allattn.cluster.rehearsal.mismatch import Mismatch, describe
from megatron_allattn.cluster.rehearsal.replay import replay
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.silent import BACK, ONWARD, Call

PAIR = Layout(tensor_size=2)
STAGES = Layout(pipeline_size=2)
GRID = Layout(tensor_size=2, data_size=2, pipeline_size=2)
FIRST = Call("tensor", "all_reduce", 64, (4, 4), "float32", 0, "forward", "layers.0")
SECOND = replace(FIRST, module="layers.1")


def message(operation: str, towards: int, *, size: int = 64) -> Call:
    return Call("pipeline", operation, size, towards=towards, module="activations")


SEND, RECEIVE = message("send", ONWARD), message("recv", BACK)
SEND_BACK, RECEIVE_BACK = message("send", BACK), message("recv", ONWARD)


def test_what_meets_is_counted_once() -> None:
    counts = replay(STAGES, {0: [SEND, RECEIVE_BACK], 1: [RECEIVE, SEND_BACK]})
    assert (counts.collectives, counts.between_stages, counts.calls, counts.groups) == (0, 2, 4, {(0, 1)})
    counts = replay(GRID, {rank: [FIRST, replace(FIRST, group="world")] for rank in range(8)})
    assert (counts.collectives, counts.between_stages, counts.calls, len(counts.groups)) == (5, 0, 16, 5)


def test_groups_wait_for_their_own_ranks_alone() -> None:
    """Rank 0 of the data group waits until both tensor groups are through, whichever comes first."""
    data = replace(FIRST, group="data")
    calls = {0: [FIRST, data], 1: [FIRST, data], 2: [FIRST, data], 3: [FIRST, data]}
    assert replay(Layout(tensor_size=2, data_size=2), calls).collectives == 4


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(FIRST, operation="all_gather"), ["all_gather of [4, 4] float32", "all_reduce of [4, 4] float32"]),
        (replace(FIRST, operation="all_reduce (max)"), ["all_reduce (max) of [4, 4] float32"]),
        (replace(FIRST, shape=(2, 8)), ["[2, 8]", "[4, 4]"]),
        (replace(FIRST, num_bytes=32, dtype="bfloat16"), ["bfloat16", "float32"]),
        (SECOND, ["layers.0", "layers.1"]),
        (replace(FIRST, micro_batch=1), ["micro-batch 0", "micro-batch 1"]),
        (
            replace(FIRST, group="world"),
            ["group tensor 0, 1", "group world 0, 1"],
        ),  # of the same ranks, and another one
    ],
)
def test_what_differs_is_named(other: Call, words: list[str]) -> None:
    with pytest.raises(Mismatch) as caught:
        replay(PAIR, {0: [FIRST], 1: [other]})
    assert "rank 1 (tensor 1) calls" in str(caught.value) and "rank 0 (tensor 0) calls" in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_odd_one_is_named_and_how_many_differ_from_it() -> None:
    layout = Layout(tensor_size=4)
    with pytest.raises(Mismatch, match=r"^rank 2 \(tensor 2\) calls .*layers\.1\), where rank 0 .* and 2 more of its "):
        replay(layout, {0: [FIRST], 1: [FIRST], 2: [SECOND], 3: [FIRST]})


def test_an_additional_call_at_the_end_waits_for_ever() -> None:
    with pytest.raises(Mismatch) as caught:
        replay(PAIR, {0: [FIRST], 1: [FIRST, SECOND]})
    assert str(caught.value) == (
        "rank 1 (tensor 1) calls all_reduce of [4, 4] float32 in the group tensor 0, 1 (micro-batch 0, forward, "
        "layers.1) and waits for ever for rank 0, while rank 0 (tensor 0) has ended the step"
    )


def test_stages_that_both_send_wait_for_ever() -> None:
    """Each would receive next; without a buffer neither comes to it."""
    with pytest.raises(Mismatch, match=r"^rank 0 \(stage 0\) calls send .* waits for ever for rank 1, while rank 1 "):
        replay(STAGES, {0: [SEND, RECEIVE_BACK], 1: [SEND_BACK, RECEIVE]})


def test_a_neighbour_that_expects_another_size_is_named() -> None:
    with pytest.raises(Mismatch, match=r"rank 1 .* calls recv of 32 bytes from rank 0"):
        replay(STAGES, {0: [SEND], 1: [message("recv", BACK, size=32)]})


def test_two_groups_in_another_order_wait_for_ever() -> None:
    """Ranks 0 and 3 begin with their tensor group, 1 and 2 with their data group: a circle."""
    layout, data = Layout(tensor_size=2, data_size=2), replace(FIRST, group="data")
    calls = {0: [FIRST, data], 1: [data, FIRST], 2: [data, FIRST], 3: [FIRST, data]}
    with pytest.raises(
        Mismatch, match=r"rank 0 .* in the group tensor 0, 1 .* waits for ever for rank 1, while rank 1"
    ):
        replay(layout, calls)


def test_ranks_are_described_by_the_axes_that_there_are() -> None:
    assert describe(Layout(), 0) == "rank 0"
    assert describe(GRID, 6) == "rank 6 (tensor 0, data 1, stage 1)"
