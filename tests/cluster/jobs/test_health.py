"""On which nodes a life trains, from what they have told."""

from pathlib import Path

import pytest

from megatron_allattn.cluster.jobs.health import Choice, choose_nodes, judge_nodes
from megatron_allattn.cluster.jobs.lives import How, Life
from megatron_allattn.cluster.nodes.checks import Check
from megatron_allattn.cluster.nodes.local import NodeReport
from megatron_allattn.config import UsageError

FIVE = ["n1", "n2", "n3", "n4", "n5"]


def report(folder: Path, node: str, *faults: str, file: str | None = None) -> None:
    names = ("devices", "/data/corpus.json", *faults)
    checks = [
        Check(
            name=name, node=node, status="fault" if name in faults else "ok", found="none", asked="8", way_out="mend it"
        )
        for name in dict.fromkeys(names)
    ]
    NodeReport(node=node, checks=tuple(checks), facts={"torch": "2.13.0"}).write(folder / f"{file or node}.json")


def choice(folder: Path, nodes: list[str], needed: int, *before: str) -> Choice:
    lives = [
        Life(number=1, job="7", restart=0, first_step=0, last_step=0, how="unfit", reason="", excluded=(node,))
        for node in before
    ]
    return choose_nodes(judge_nodes(folder, nodes), needed, lives)


def test_good_nodes_train_in_their_order(tmp_path: Path) -> None:
    for node in FIVE:
        report(tmp_path, node)
    assert choice(tmp_path, FIVE, 5) == Choice(train=tuple(FIVE))
    assert choice(tmp_path, FIVE, 4) == Choice(train=("n1", "n2", "n3", "n4"))


def test_a_bad_node_is_replaced_by_a_spare_one(tmp_path: Path) -> None:
    for node in FIVE:
        report(tmp_path, node, *(["devices"] if node == "n2" else []))
    found = choice(tmp_path, FIVE, 4)
    assert found.train == ("n1", "n3", "n4", "n5") and not found.exclude and not found.stop
    assert found.told == "n2: devices: found none, asked 8; mend it"


def test_without_a_spare_one_it_is_left_out_of_the_job(tmp_path: Path) -> None:
    for node in FIVE:
        report(tmp_path, node, *(["devices"] if node == "n2" else []))
    found = choice(tmp_path, FIVE, 5)
    assert (found.train, found.exclude, found.stop) == ((), ("n2",), "")


def test_a_node_that_comes_again_though_it_was_left_out_ends_it(tmp_path: Path) -> None:
    """SLURM was told to leave it out, and has not: it would be found again in every life."""
    for node in FIVE:
        report(tmp_path, node, *(["devices"] if node == "n2" else []))
    found = choice(tmp_path, FIVE, 5, "n2")
    assert found.stop.startswith("n2 should have been left out, and SLURM gives it again: n2: devices: found none")


def test_nodes_of_another_job_are_not_trained_on(tmp_path: Path) -> None:
    """Of a history that was moved away, whose lives have the same numbers."""
    for node in ("n1", "n2", "n9"):
        report(tmp_path, node, *(["devices"] if node == "n2" else []))
    assert choice(tmp_path, ["n1", "n2"], 2).exclude == ("n2",)


def test_a_node_that_tells_nothing_is_bad(tmp_path: Path) -> None:
    for node in FIVE[:-1]:
        report(tmp_path, node)
    found = choice(tmp_path, FIVE, 5)
    assert found.exclude == ("n5",) and found.told.startswith("n5: report: found none")


def test_names_with_a_domain_are_the_same_nodes(tmp_path: Path) -> None:
    for node in FIVE:
        report(tmp_path, f"{node}.cluster.local", *(["devices"] if node == "n4" else []))
    found = choice(tmp_path, FIVE, 4)
    assert found.train == ("n1", "n2", "n3", "n5")


@pytest.mark.parametrize(
    ("bad", "stops"), [(["n1", "n2", "n3", "n4", "n5"], True), (["n1", "n2", "n3"], True), (["n1", "n2"], False)]
)
def test_a_path_that_most_nodes_lack_is_no_nodes_fault(tmp_path: Path, bad: list[str], stops: bool) -> None:
    for node in FIVE:
        report(tmp_path, node, *(["/data/corpus.json"] if node in bad else []))
    found = choice(tmp_path, FIVE, 5)
    assert bool(found.stop) == stops and bool(found.exclude) != stops and not found.train
    assert not stops or "/data/corpus.json: found none" in found.stop


def test_nodes_are_left_out_up_to_half_of_those_needed(tmp_path: Path) -> None:
    for node in FIVE:
        report(tmp_path, node, *(["devices"] if node == "n5" else []))
    assert choice(tmp_path, FIVE, 5, "n6").exclude == ("n5",)
    found = choice(tmp_path, FIVE, 5, "n6", "n7")
    assert not found.exclude
    assert found.stop.startswith("n5, n6 and n7 were found unfit, and a job leaves out at most 2 nodes: n5: devices")


def test_one_node_alone_is_tried_elsewhere_twice(tmp_path: Path) -> None:
    report(tmp_path, "n1", "devices")
    assert choice(tmp_path, ["n1"], 1).exclude == ("n1",)
    assert choice(tmp_path, ["n1"], 1, "n8", "n9").stop


def test_nothing_at_all_is_everybodys(tmp_path: Path) -> None:
    assert choice(tmp_path, FIVE, 5).stop
    (tmp_path / "n1.json").write_text("{")
    with pytest.raises(UsageError, match=r"n1\.json: is not JSON"):
        choice(tmp_path, FIVE, 5)


def earlier(how: How, reason: str, *excluded: str) -> Life:
    return Life(number=1, job="7", restart=0, first_step=0, last_step=0, how=how, reason=reason, excluded=excluded)


EARLIER = {
    "silent": earlier("unfit", "n2: report: found none, asked one of each node; see whether it is up", "n2"),
    "broken": earlier("unfit", "n2: devices: found 7, asked 8; mend it", "n2"),
    "trained": earlier("failed", "rank 3 is gone"),
}


@pytest.mark.parametrize("host", ["n1", ""])
def test_a_healthy_node_alone_trains_whatever_was_left_out_before(tmp_path: Path, host: str) -> None:
    report(tmp_path, "n1")
    lives = [EARLIER["silent"], earlier("unfit", "n3: report: found none, asked one of each node; see", "n3")]
    assert choose_nodes(judge_nodes(tmp_path, ["n1"]), 1, lives, host) == Choice(train=("n1",))


@pytest.mark.parametrize(
    ("nodes", "before", "exclude"),
    [
        (FIVE, (), ()),  # four nodes are not silent by chance
        (["n1", "n2"], (), ("n2",)),  # the silent one is as a rule the bad one
        (["n1", "n3"], ("silent",), ()),  # the second that is silent to the same node
        (["n1", "n3"], ("broken",), ("n3",)),  # the first that is silent
        (["n1", "n3"], ("silent", "trained"), ("n3",)),  # other lives, other silences
    ],
)
def test_where_only_the_node_of_the_batch_script_is_heard(
    tmp_path: Path, nodes: list[str], before: tuple[str, ...], exclude: tuple[str, ...]
) -> None:
    report(tmp_path, "n1")
    lives = [EARLIER[name] for name in before]
    found = choose_nodes(judge_nodes(tmp_path, nodes), len(nodes), lives, "n1")
    assert (found.exclude, found.train) == (exclude, ())
    told = "n1, on which the batch script runs, is the only node whose report is in the run folder: give a --save that "
    assert found.stop.startswith("" if exclude else told) and bool(found.stop) != bool(exclude)
