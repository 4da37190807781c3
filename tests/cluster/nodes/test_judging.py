"""What measured numbers come to: skewed clocks, slow ranks, groups and links, wrong sums, each named."""

from collections.abc import Mapping

import pytest

from megatron_allattn.cluster.nodes.checks import ALL, Check
from megatron_allattn.cluster.nodes.judging import GroupRate, Link, clock_checks, group_checks, link_checks, rate_checks
from megatron_allattn.cluster.nodes.places import Places

FOUR = Places(("n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"))  # nodes of two ranks


def faults(checks: list[Check]) -> list[tuple[str, str]]:
    return [(check.node, check.found) for check in checks if check.status == "fault"]


def rates(**slow: float) -> Mapping[int, float]:
    """10 of each rank, but for `r5=3.0`."""
    return {rank: slow.get(f"r{rank}", 10.0) for rank in range(8)}


def test_clocks() -> None:
    offsets = {2: (0.001, 0.0005), 4: (-40.0, 0.1), 6: (1.2, 0.5)}
    checks = clock_checks(offsets, FOUR, most=1.0)
    assert [(check.node, check.status) for check in checks] == [("n2", "ok"), ("n3", "fault"), ("n4", "unchecked")]
    assert [check.found for check in checks] == ["+1.00 ms ± 0.50 ms", "-40.0 s ± 100.00 ms", "+1.200 s ± 500.00 ms"]
    assert checks[1].asked == "within 1 s of n1"
    assert [check.status for check in clock_checks({}, Places(("n1",)), 1.0)] == ["unchecked"]


def test_a_slow_rank_is_named_with_its_node() -> None:
    checks = rate_checks("compute rate", rates(r5=3.0), FOUR, 0.7, "GFLOP/s")
    assert faults(checks) == [("n3", "rank 5 0.30 × the median 10 GFLOP/s")]
    assert checks[0].found == "median 10 GFLOP/s, slowest 0.30 × (rank 5 on n3)"
    assert faults(rate_checks("compute rate", rates(r5=7.0), FOUR, 0.7, "GFLOP/s")) == []
    assert faults(rate_checks("compute rate", rates(r4=1.0, r5=2.0), FOUR, 0.7, "GFLOP/s")) == [
        ("n3", "rank 4 0.10 ×, rank 5 0.20 × the median 10 GFLOP/s")
    ]


def test_one_rank_has_nothing_beside_it() -> None:
    assert [check.status for check in rate_checks("compute rate", {0: 5.0}, Places(("n1",)), 0.7, "x")] == ["unchecked"]


def group(*ranks: int, rate: float = 5e9, wrong: dict[tuple[int, int], int] | None = None) -> GroupRate:
    """wrong: (place in the group, segment) → elements."""
    size = len(ranks)
    table = tuple(tuple((wrong or {}).get((place, part), 0) for part in range(size + 1)) for place in range(size))
    return GroupRate("TP", ranks, rate, table)


def test_right_and_equally_fast_groups() -> None:
    checks = group_checks([group(0, 1), group(2, 3), group(4, 5)], FOUR, 0.7)
    assert [(check.name, check.node, check.status) for check in checks] == [("TP all-reduce", ALL, "ok")]
    assert checks[0].found == "3 groups of 2: 5 GB/s a rank in the median, slowest 1.00 × (ranks [0, 1] on n1)"
    assert group_checks([], FOUR, 0.7) == []
    assert group_checks([group(0, 1, 2)], FOUR, 0.7)[0].found == "1 group of 3: 5 GB/s a rank"


def test_a_slow_group() -> None:
    checks = group_checks([group(0, 1), group(2, 3, rate=1e9), group(4, 5)], FOUR, 0.7)
    assert faults(checks) == [("n2", "ranks [2, 3]: 0.20 × the median 5 GB/s")]
    across = group_checks([group(0, 2), group(1, 3), group(4, 6, rate=1e9)], FOUR, 0.7)
    assert faults(across) == [("n3 and n4", "ranks [4, 6]: 0.20 × the median 5 GB/s")]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({(0, 1): 7, (1, 1): 7, (2, 1): 9}, [("n2", "what rank 2 gives is wrong in all sums (9 elements)")]),
        ({(2, 0): 3, (2, 3): 2}, [("n3", "rank 4 has a wrong sum (5 elements)")]),
        ({(0, 3): 1, (2, 3): 1}, [("n1", "rank 0 has a wrong sum (1 el"), ("n3", "rank 4 has a wrong sum (1 el")]),
    ],
)
def test_wrong_sums(wrong: dict[tuple[int, int], int], told: list[tuple[str, str]]) -> None:
    """A group of ranks 0, 2 and 4: what one gave is wrong everywhere, or what some have got."""
    found = faults(group_checks([group(0, 2, 4, wrong=wrong)], FOUR, 0.7))
    assert [(node, words[: len(begin)]) for (node, words), (_, begin) in zip(found, told, strict=True)] == told


def test_links() -> None:
    """n3's ranks are slow with all of their peers, which are slow with it alone."""
    pairs = [(0, 2), (4, 6), (0, 4), (2, 6), (0, 6), (2, 4)]
    links = []
    for one, other in pairs:
        rate = 1e9 if 4 in (one, other) else 10e9
        links += [Link(one, other, rate, 0), Link(other, one, rate, 0)]
    checks = link_checks(links, FOUR, 0.7)
    assert faults(checks) == [("n3", "rank 4 0.10 × the median 10 GB/s")]
    torn = link_checks([*links, Link(2, 4, 10e9, 5)], FOUR, 0.7)
    assert ("n2", "what arrives is wrong (rank 2 from rank 4: 5 elements)") in faults(torn)


def test_of_two_nodes_none_is_the_slow_one() -> None:
    places = Places(("n1", "n2"))
    checks = link_checks([Link(0, 1, 1e9, 0), Link(1, 0, 9e9, 0)], places, 0.7)
    assert [(check.status, check.found[:14]) for check in checks] == [("unchecked", "1 to 9 GB/s a ")]
    assert [check.status for check in link_checks([], Places(("n1",)), 0.7)] == ["unchecked"]
