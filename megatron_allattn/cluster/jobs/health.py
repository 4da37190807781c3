"""On which nodes a life trains, after each of them was looked at (tools/preflight.py --local).

Bad nodes are left out where there are as many good ones as the job needs (SPARE_NODES); else the job is requeued
without them. A fault that most nodes have is no node's (cluster/nodes/compare.py): the job ends with it, and so it does
where leaving out nodes has not helped.

Reports come through the run folder. Where only the node of the batch script is heard, and more than one other is silent
or was in the lives just before, it is that node which does not see the folder of the others, or there is none: the job
ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from megatron_allattn.cluster.jobs.lives import Life
from megatron_allattn.cluster.nodes.compare import REPORT, Judgement, judge, read_reports
from megatron_allattn.cluster.nodes.names import find_node, shown


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Exactly one of: nodes to train on, nodes to leave out of the job from now on, a reason to end it.

    told: in a line, what was wrong with which node, empty if nothing was.
    """

    train: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    stop: str = ""
    told: str = ""


def judge_nodes(reports: Path, nodes: Sequence[str]) -> Judgement:
    """What the reports of these nodes in a folder come to. Raises UsageError: a file there is no report."""
    return judge([report for report in read_reports(reports) if find_node(report.node, nodes)], nodes)


def choose_nodes(judgement: Judgement, needed: int, lives: Sequence[Life], host: str = "") -> Choice:
    """What follows for a job that needs so many of these nodes.

    lives: of the job, before this one; host: the node of the batch script.
    """
    before = {node for life in lives for node in life.excluded}
    silent = {check.node for check in judgement.checks if check.name == REPORT and check.status == "fault"}
    alone = {*judgement.nodes} - silent == {find_node(host, judgement.nodes)}
    if silent and alone and len(silent | _just_silent(lives)) > 1:
        rule = f"{host}, on which the batch script runs, is the only node whose report is in the run folder"
        return Choice(
            stop=f"{rule}: give a --save that all nodes see, or leave that node out (sbatch --exclude={host})"
        )
    if judgement.reasons:
        return Choice(stop="; ".join(judgement.reasons))
    bad = judgement.bad_nodes
    faults = [check.told() for check in judgement.checks if check.status == "fault" and check.node in bad]
    told = "; ".join(faults)
    good = tuple(node for node in judgement.nodes if node not in bad)
    if len(good) >= needed:
        return Choice(train=good[:needed], told=told)
    if again := sorted(before & set(bad)):
        return Choice(stop=f"{shown(again)} should have been left out, and SLURM gives it again: {told}", told=told)
    most = max(2, needed // 2)
    if len(before | set(bad)) > most:
        reason = (
            f"{shown(sorted(before | set(bad)))} were found unfit, and a job leaves out at most {most} nodes: {told}"
        )
        return Choice(stop=reason, told=told)
    return Choice(exclude=bad, told=told)


def _just_silent(lives: Sequence[Life]) -> set[str]:
    """Nodes that told nothing in the lives since the last one that could train."""
    unfit = takewhile(lambda life: life.how == "unfit", reversed(lives))
    return {node for life in unfit for node in life.excluded if f"{node}: {REPORT}: " in life.reason}
