"""Reports of several nodes beside each other: whose fault a fault is, and which nodes are to be left out."""

import json
from pathlib import Path

import pytest

from megatron_allattn.cluster.nodes.checks import ALL, Check
from megatron_allattn.cluster.nodes.compare import Judgement, decide, judge, read_reports
from megatron_allattn.cluster.nodes.local import NodeReport
from megatron_allattn.config.errors import UsageError


def report(node: str, torch: str = "2.13", faults: tuple[str, ...] = ()) -> NodeReport:
    checks = tuple(Check(name=name, node=node, status="fault", found="no", asked="yes", way_out="z") for name in faults)
    return NodeReport(node=node, facts={"torch": torch}, checks=checks)


def four(**changes: NodeReport) -> list[NodeReport]:
    return [changes.get(node, report(node)) for node in ("n1", "n2", "n3", "n4")]


def verdict(judgement: Judgement) -> tuple[bool, tuple[str, ...], int]:
    return judgement.go, judgement.bad_nodes, len(judgement.reasons)


def test_all_alike() -> None:
    judgement = judge(four(), ["n1", "n2", "n3", "n4"])
    assert verdict(judgement) == (True, (), 0)
    assert {check.name for check in judgement.checks} == {"torch"}


def test_one_node_has_a_fault_or_another_version() -> None:
    assert verdict(judge(four(n2=report("n2", faults=("devices",))))) == (False, ("n2",), 0)
    judgement = judge(four(n3=report("n3", torch="2.12")))
    assert verdict(judgement) == (False, ("n3",), 0)
    fault = next(check for check in judgement.checks if check.status == "fault")
    assert (fault.found, fault.asked) == ("2.12", "2.13, as on 3 of 4 nodes")


def test_a_fault_of_all_or_most_is_no_nodes() -> None:
    """A path that nobody has: to leave out node after node would not help. Nodes that are down are still left out."""
    path = ("/data/enwik8",)
    everywhere = [report(node, faults=path) for node in ("n1", "n2", "n3", "n4")]
    assert verdict(judge(everywhere)) == (False, (), 1)
    assert judge(everywhere).reasons[0].startswith("4 of 4 nodes: /data/enwik8: found no, asked yes; z")
    most = [report("n1"), *(report(node, faults=path) for node in ("n2", "n3", "n4"))]
    assert verdict(judge(most)) == (False, (), 1)
    half = [report("n1"), report("n2"), report("n3", faults=path), report("n4", faults=path)]
    assert verdict(judge(half)) == (False, ("n3", "n4"), 0)
    both = [*most[:3], report("n4", faults=(*path, "GPU health"))]
    assert verdict(judge(both)) == (False, ("n4",), 1)


def test_hardware_is_a_nodes_own_unless_all_lack_it() -> None:
    """3 of 4 nodes with a broken GPU are three broken nodes; 4 of 4 that have fewer than asked were asked too much."""
    three = [report("n1"), *(report(node, faults=("devices",)) for node in ("n2", "n3", "n4"))]
    assert verdict(judge(three)) == (False, ("n2", "n3", "n4"), 0)
    assert verdict(judge([report(node, faults=("devices",)) for node in ("n1", "n2")])) == (False, (), 1)
    assert verdict(judge([report("n1", faults=("devices",))])) == (False, ("n1",), 0)
    assert verdict(judge([report("n1", faults=("/data",))])) == (False, (), 1)


def test_versions_of_which_none_is_most() -> None:
    judgement = judge([report("n1", torch="2.12"), report("n2")])
    assert verdict(judgement) == (False, (), 1)
    assert judgement.reasons[0].startswith("all nodes: torch: found 2.12 on n1; 2.13 on n2, asked equal on all")


def test_nodes_that_say_nothing() -> None:
    assert verdict(judge(four()[:3], ["n1", "n2", "n3", "n4"])) == (False, ("n4",), 0)
    assert verdict(judge(four()[:1], ["n1", "n2", "n3", "n4"])) == (False, ("n2", "n3", "n4"), 0)
    assert verdict(judge([], ["n1", "n2"])) == (False, (), 1)


def test_names_with_a_domain_are_the_same_nodes() -> None:
    """A node says its whole name and SLURM the short one: bad ones are named as SLURM does."""
    long = [report("n1.cluster.local"), report("n2.cluster.local", faults=("GPU health",))]
    assert verdict(judge(long, ["n1", "n2"])) == (False, ("n2",), 0)
    assert judge(long, ["n1", "n2"]).nodes == ("n1", "n2")
    assert {check.node for check in judge(long, ["n1", "n2"]).checks} == {"n1", "n2"}


def test_what_holds_for_all_is_a_reason() -> None:
    check = Check(name="DP all-reduce", node=ALL, status="fault", found="a", asked="b", way_out="c")
    assert verdict(decide(["n1", "n2"], [check])) == (False, (), 1)


def test_reports_of_a_folder(tmp_path: Path) -> None:
    for one in four(n2=report("n2", faults=("devices",))):
        one.write(tmp_path)
    found = read_reports(tmp_path)
    assert [one.node for one in found] == ["n1", "n2", "n3", "n4"]
    judge(found).write(tmp_path / "verdict", {"rate": 1.5})
    told = json.loads((tmp_path / "verdict").read_text())
    assert (told["go"], told["bad_nodes"], told["reasons"], told["numbers"]) == (False, ["n2"], [], {"rate": 1.5})
    report("n1.cluster.local").write(tmp_path)
    with pytest.raises(UsageError, match=r"has two reports of n1"):
        read_reports(tmp_path)
    with pytest.raises(UsageError, match=r"is no folder"):
        read_reports(tmp_path / "no")
