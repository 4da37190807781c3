"""What a preflight has found, line by line, and the one table of it. Without torch."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_allattn.cluster.nodes.names import shown
from megatron_allattn.config.errors import printable

Status = Literal["ok", "fault", "unchecked"]
WIDTH = 56  # of a column of the table, in characters
ALL = "all"  # as a node: what holds for all of them


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at on one node (or on `all`).

    status: `fault` makes it a no-go; `unchecked` could not be looked at, or nothing was asked of it, as `found` says.
    found, asked: what there is and what is wanted of it; way_out: what to do about a fault.
    """

    name: str
    node: str
    status: Status
    found: str
    asked: str = ""
    way_out: str = ""

    def __post_init__(self) -> None:
        assert self.status != "fault" or self.way_out, f"{self.name}: a fault without a way out"

    def told(self) -> str:
        """A fault in one line: node, what was found, what was asked, the way out."""
        asked = f", asked {self.asked}" if self.asked else ""
        return f"{self.node}: {self.name}: found {self.found}{asked}; {self.way_out}"


def is_go(checks: Iterable[Check]) -> bool:
    return all(check.status != "fault" for check in checks)


def table(checks: Sequence[Check], num_nodes: int) -> str:
    """The checks as a table, those of several nodes that say the same in one row, then what is wrong, then the verdict.

    The words of a check are those of a report, which anybody may have written: what a terminal could act on is escaped.
    """
    rows = [("", "check", "node", "found", "asked")]
    same: dict[tuple[str, ...], list[str]] = {}
    for check in checks:
        mark = {"ok": "ok", "fault": "FAULT", "unchecked": "-"}[check.status]
        same.setdefault((mark, check.name, check.found, check.asked), []).append(check.node)
    for (mark, name, found, asked), nodes in same.items():
        everywhere = len(nodes) == num_nodes and num_nodes > 1
        rows.append((mark, name, f"all {num_nodes}" if everywhere else shown(nodes), found, asked))
    shown_rows = [tuple(printable(cell) for cell in row) for row in rows]
    widths = [min(WIDTH, max(len(row[column]) for row in shown_rows)) for column in range(len(rows[0]))]
    lines = [line for row in shown_rows for line in _lines(row, widths)]
    faults = [check for check in checks if check.status == "fault"]
    if faults:
        lines += ["", *(printable(f"fault: {check.told()}") for check in faults)]
    return "\n".join([*lines, "", verdict(checks)])


def verdict(checks: Sequence[Check]) -> str:
    """`go`, or `no-go` and where."""
    faults = [check for check in checks if check.status == "fault"]
    unchecked = sum(check.status == "unchecked" for check in checks)
    if not faults:
        return f"go ({unchecked} not checked)" if unchecked else "go"
    nodes = list(dict.fromkeys(check.node for check in faults))
    return f"no-go: {len(faults)} fault{'s' * (len(faults) > 1)} on {printable(shown(nodes))}"


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """A row of the table, with cells that are too long on several lines."""
    cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
    height = max(len(cell) for cell in cells)
    padded = [cell + [""] * (height - len(cell)) for cell in cells]
    return [
        "  ".join(cell[line].ljust(width) for cell, width in zip(padded, widths, strict=True)).rstrip()
        for line in range(height)
    ]
