"""Time of a step, by hand."""

from dataclasses import replace

import pytest

from megatron_allattn.cluster.planning.devices import device_named
from megatron_allattn.cluster.planning.step_time import (
    StageTime,
    operations_of,
    slowest_heads,
    stage_time,
    step_time,
)
from megatron_allattn.config import UsageError
from megatron_allattn.model.accounting import place_of
from megatron_allattn.model.work import step_flops
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger
from tests.support.trained import MODEL, VOCABULARY, Trained, deepspeed

STAGE = StageTime(compute=2.0, tensor=0.5, neighbours=0.5, replicas=4.0, update=1.0, operations=1)


def test_equal_stages_wait_as_a_pipeline_does() -> None:
    """(K − 1) / (A + K − 1) of the time of micro-batches (GPipe, Huang et al. 2019)."""
    stages, slots = 4, 8
    found = step_time([replace(STAGE, replicas=0.0, update=0.0)] * stages, slots)
    assert found.total == pytest.approx((slots + stages - 1) * 3.0)
    assert found.bubble == pytest.approx((stages - 1) / (slots + stages - 1))


def test_the_slowest_stage_sets_the_pace() -> None:
    found = step_time([STAGE, replace(STAGE, compute=5.0)], 4)
    assert found.compute == 4 * 5.0 and found.tensor == found.neighbours == 4 * 0.5
    assert found.waiting == 3.0 and found.replicas == 4.0 and found.update == 1.0
    assert found.total == pytest.approx(20 + 2 + 2 + 3 + 4 + 1)


def test_one_stage_waits_for_none() -> None:
    assert step_time([STAGE], 4).bubble == 0


def test_operations_are_those_of_work() -> None:
    case = Trained(deepspeed())
    reach = [[20, 30, 40, 50]] * MODEL.num_layers
    place = place_of(case.run, VOCABULARY, 1, 0)
    expected = step_flops(MODEL, VOCABULARY, 8, 16, reach, "blocked")
    assert operations_of(place, reach, "blocked") == expected.executed


def test_shards_wait_for_the_longest_heads() -> None:
    assert slowest_heads([1, 2, 30, 4], 2) == (30, 4)
    case = Trained(deepspeed(tensor=2))
    place = place_of(case.run, VOCABULARY, 2, 0)
    even, uneven = ([row] * MODEL.num_layers for row in ([40, 40, 40, 40], [8, 8, 72, 72]))
    assert operations_of(place, uneven, "blocked") > operations_of(place, even, "blocked")


def test_messages_by_hand() -> None:
    """10 messages of together 4.5 GB that a rank sends over the links of a node, in one of two micro-batches."""
    case = Trained(deepspeed(tensor=2, accumulation=2))
    device, layout = device_named("h100-80"), Layout(tensor_size=2)
    ledger = Ledger(layout, 0)
    ledger.add("tensor", "all_reduce", 4_500_000_000, 10)
    place = place_of(case.run, VOCABULARY, 2, 0)
    found = stage_time(place, [[40] * 4] * MODEL.num_layers, device, ledger, 8, 10**9)
    rate = device.node_link.value * device.link_reached.value
    assert found.tensor == pytest.approx((4.5e9 / rate + 10 * device.message.value) / 2)
    assert found.update == pytest.approx(3e9 / device.bandwidth.value)
    across = stage_time(place, [[40] * 4] * MODEL.num_layers, device, ledger, 1, 10**9)
    assert across.tensor == pytest.approx(
        (4.5e9 / (device.network_link.value * device.link_reached.value) + 10 * device.message.value) / 2
    )


def test_a_precision_that_is_not_there_is_refused() -> None:
    case = Trained(deepspeed(dtype="float16"))
    place = place_of(case.run, VOCABULARY, 1, 0)
    with pytest.raises(UsageError, match="--gpu cpu: it computes in float32, bfloat16, the run in float16"):
        stage_time(place, [[40] * 4] * MODEL.num_layers, device_named("cpu"), Ledger(Layout(), 0), 1, 1)
