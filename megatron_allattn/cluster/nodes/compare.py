"""What several nodes have told, beside each other: who differs, who is silent, whose fault a fault is. Without torch.

A fault that most nodes have is no node's: a wrong path, a version that is wrong everywhere. To leave those nodes out
would go through the whole cluster, one after the other.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.cluster.nodes.checks import ALL, Check, Status, is_go
from megatron_allattn.cluster.nodes.local import FORMAT, NodeReport, renamed
from megatron_allattn.cluster.nodes.names import find_node, same_node
from megatron_allattn.config.errors import usage_error

REPORT = "report"  # of a node
HARDWARE = frozenset({"devices", "GPU memory", "GPU computes", "GPU health", "compute rate", "link rate", REPORT})
"""Faults of a node itself: they are everybody's only where all of several nodes have them."""

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """All checks of all nodes, and what follows. bad_nodes: to be left out; reasons: faults that no choice of nodes
    mends, in one line each."""

    nodes: tuple[str, ...]
    checks: tuple[Check, ...]
    bad_nodes: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def go(self) -> bool:
        return is_go(self.checks)

    def write(self, path: Path, numbers: Mapping[str, Any] | None = None) -> None:
        """As JSON: `format`, `go`, `nodes`, `bad_nodes`, `reasons`, `checks`, and what was measured, `numbers`.

        Raises StorageError.
        """
        told: dict[str, Any] = {"format": FORMAT, "go": self.go, "nodes": list(self.nodes)}
        told |= {"bad_nodes": list(self.bad_nodes), "reasons": list(self.reasons)}
        write_json_atomic(
            path, told | {"checks": [asdict(check) for check in self.checks], "numbers": dict(numbers or {})}
        )


def read_reports(folder: Path) -> list[NodeReport]:
    """Every NODE.json of a folder, by the file's name. Raises UsageError: no such folder, none in it, a bad one."""
    fix = "name the folder that tools/preflight.py --local --json DIR was given"
    try:
        paths = sorted(folder.glob("*.json"))
        found = folder.is_dir()
    except OSError as error:
        raise usage_error("--reports", folder, f"cannot be read ({error.strerror})", fix) from None
    if not found:
        raise usage_error("--reports", folder, "is no folder", fix)
    reports = [NodeReport.read(path) for path in paths]
    for first, second in pairwise(reports):
        if same_node(first.node, second.node):
            raise usage_error("--reports", folder, f"has two reports of {first.node}", "remove the older one")
    return reports


def judge(reports: Sequence[NodeReport], expected: Sequence[str] = ()) -> Judgement:
    """What the reports of these nodes come to.

    expected: the nodes that must have told, in the spelling in which bad ones are named; who did not is a fault.
    """
    names = {report.node: find_node(report.node, expected) or report.node for report in reports}
    nodes = [*dict.fromkeys([*expected, *names.values()])]
    checks = [check for report in reports for check in renamed(report, names[report.node]).checks]
    checks = [*_missing(nodes, set(names.values())), *compare_facts(reports, names), *checks]
    return decide(nodes, checks)


def decide(nodes: Sequence[str], checks: Sequence[Check]) -> Judgement:
    """Whose the faults among these checks are."""
    having: dict[tuple[str, str], set[str]] = {}
    for check in checks:
        if check.status == "fault":
            having.setdefault((check.name, check.asked), set()).add(check.node)
    common = {
        key
        for key, having_it in having.items()
        if ALL in having_it
        or (len(having_it) == len(nodes) > 1 if key[0] in HARDWARE else 2 * len(having_it) > len(nodes))
    }
    faults = [check for check in checks if check.status == "fault"]
    bad = {check.node for check in faults if (check.name, check.asked) not in common}
    reasons = {(check.name, check.asked): check for check in reversed(faults) if (check.name, check.asked) in common}
    told: list[str] = []
    for key, check in reversed(reasons.items()):
        where = "all nodes" if ALL in having[key] else f"{len(having[key])} of {len(nodes)} nodes"
        told.append(replace(check, node=where).told())
    return Judgement(
        nodes=tuple(nodes),
        checks=tuple(checks),
        bad_nodes=tuple(node for node in nodes if node in bad),
        reasons=tuple(told),
    )


def compare_facts(reports: Sequence[NodeReport], names: dict[str, str]) -> list[Check]:
    """What must be equal on all nodes: a row for each fact, or one for each node that differs from most.

    Where no value is that of most nodes, nobody can say which is right: it is a fault of all.
    """
    checks: list[Check] = []
    for fact in dict.fromkeys(fact for report in reports for fact in report.facts):
        values = {names[report.node]: report.facts.get(fact, NONE) for report in reports}
        (most, count), *others = Counter(values.values()).most_common()
        if not others:
            checks.extend(Check(name=fact, node=node, status="ok", found=most, asked="equal on all") for node in values)
            continue
        if 2 * count <= len(values):
            found = "; ".join(
                f"{value} on {', '.join(node for node in values if values[node] == value)}"
                for value in dict.fromkeys(values.values())
            )
            way = "install one version everywhere"
            checks.append(Check(name=fact, node=ALL, status="fault", found=found, asked="equal on all", way_out=way))
            continue
        for node, value in values.items():
            asked = f"{most}, as on {count} of {len(values)} nodes"
            way = "install that one there, or leave the node out"
            status: Status = "ok" if value == most else "fault"
            checks.append(Check(name=fact, node=node, status=status, found=value, asked=asked, way_out=way))
    return checks


def _missing(nodes: Sequence[str], told: set[str]) -> list[Check]:
    return [
        Check(
            name=REPORT,
            node=node,
            status="fault",
            found="none",
            asked="one of each node",
            way_out="see whether it is up (sinfo -R, ssh) and what its check printed",
        )
        for node in nodes
        if node not in told
    ]
