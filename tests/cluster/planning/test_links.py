"""Which links a rank's messages take, by hand, and that none is lost."""

from dataclasses import replace

import pytest

from megatron_allattn.cluster.planning.links import by_group, by_link, link_of
from megatron_allattn.model.accounting import step_traffic
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger
from tests.support.trained import VOCABULARY, Trained, deepspeed


def test_groups_on_nodes() -> None:
    assert link_of([4, 5, 6, 7], 4) == "node"
    assert link_of([3, 4], 4) == "network"


def test_by_hand() -> None:
    """TP 2 × DP 4 on two nodes of four: tensor groups stay in a node, replicas are on both."""
    layout = Layout(tensor_size=2, data_size=4)
    ledger = Ledger(layout, 0)
    ledger.add("tensor", "all_reduce", 1000, 10)
    ledger.add("data", "all_gather", 800)
    found = by_link(ledger, layout, 0, 4)
    assert (found["node"].num_bytes, found["node"].count) == (2 * 1000 / 2, 10)
    assert (found["network"].num_bytes, found["network"].count) == (800 * 3 / 4, 1)


@pytest.mark.parametrize("gpus_per_node", [1, 2, 4, 8])
def test_nothing_is_lost(gpus_per_node: int) -> None:
    case = Trained(deepspeed(2, 2, 1, 2, accumulation=2))
    layout = Layout(tensor_size=2, data_size=2, pipeline_size=2)
    for rank in range(8):
        ledger = step_traffic(case.run, VOCABULARY, 8, rank, parts=case.parts)
        links = by_link(ledger, layout, rank, gpus_per_node)
        assert sum(one.num_bytes for one in links.values()) == pytest.approx(ledger.sent())
        assert sum(one.num_bytes for one in by_group(ledger, layout, rank).values()) == pytest.approx(ledger.sent())
        assert (links["network"].count > 0) == (gpus_per_node < 8)


def test_a_larger_node_sends_less_between_nodes() -> None:
    case = replace(Trained(deepspeed(2, 4, 1)))
    layout = Layout(tensor_size=2, data_size=4)
    ledger = step_traffic(case.run, VOCABULARY, 8, 0)
    between = [by_link(ledger, layout, 0, size)["network"].num_bytes for size in (1, 2, 8)]
    assert between[0] > between[1] > between[2] == 0
