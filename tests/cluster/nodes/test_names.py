"""One node by its several names, and lists of names for a sentence."""

import socket

import pytest

from megatron_allattn.cluster.nodes.names import find_node, node_name, same_node, short_name, shown
from megatron_allattn.cluster.nodes.places import Place, Places


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("node1", "node1", True),
        ("node1", "node1.cluster.local", True),
        ("NODE1.cluster", "node1.cluster.local.", True),
        ("node1", "node10", False),
        ("node1.a", "node1.b", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.11", False),
        ("10.0.0", "10.0.0.1", False),
    ],
)
def test_same_node(one: str, other: str, same: bool) -> None:
    assert same_node(one, other) is same_node(other, one) is same


def test_short_names() -> None:
    assert [short_name(name) for name in ("n1.x.y", "n1", "10.1.2.3", "fe80::1")] == ["n1", "n1", "10.1.2.3", "fe80::1"]


def test_own_name_is_the_batch_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7.cluster.local")
    assert node_name({}) == "gpu7"
    assert node_name({"SLURMD_NODENAME": "n3"}) == "n3"


def test_found_in_their_spelling() -> None:
    assert find_node("n2.x", ["n1", "n2", "n20"]) == "n2"
    assert find_node("n3", ["n1", "n2"]) is None


def test_shown() -> None:
    assert [shown(list("abcdef"[:count])) for count in range(7)] == [
        *("none", "a", "a and b", "a, b and c", "a, b, c and d", "a, b, c, d and 1 more", "a, b, c, d and 2 more")
    ]


def test_places() -> None:
    """Two machines that are both called localhost, and one with two ranks that are not neighbours."""
    ranks = [("n1", "a"), ("localhost", "b"), ("localhost", "c"), ("n1", "a")]
    places = Places.of([Place(name, boot, 0) for name, boot in ranks])
    assert places.of_rank == ("n1", "localhost", "localhost#2", "n1")
    assert places.nodes == ["n1", "localhost", "localhost#2"]
    assert (places.ranks("n1"), places.first_ranks, places.on([0, 3, 2])) == ([0, 3], [0, 1, 2], "n1 and localhost#2")
