"""One training for all tests that ask for the same, and after them how far layouts were from a single process."""

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import layouts
from tests.support.layouts import Train
from tests.support.pool import WorkerPools

FAR = {"first loss": "loss of step 1", "gradients": "gradients", "losses": "all losses", "first norm": "norm"}


@pytest.fixture(scope="session")
def train(pools: WorkerPools, shared: Path) -> Train:
    """The trajectory of a case, computed once."""
    trained = cache(lambda case, steps: layouts.train(pools, shared, case, steps))
    return lambda case, steps=layouts.STEPS: trained(case, steps)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A Markdown table for every kind of comparison: a row for every layout, the largest relative differences."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties:
            if name == "layout":
                kinds[value["kind"]].append(value)
    for kind, notes in kinds.items():
        for line in table(kind, notes):
            terminalreporter.write_line(line)


def table(kind: str, notes: list[dict[str, Any]]) -> list[str]:
    rows: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    for one in notes:
        rows[tuple(one["sizes"])].append(one)
    head = ["TP × PP × DP", "ZeRO", "accumulation", "trainings", *FAR.values()]
    lines = ["", f"{kind}:", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for sizes, own in [*sorted(rows.items()), ((), notes)]:
        cells = [
            " × ".join(map(str, sizes)) or "all",
            *(", ".join(map(str, sorted({one[name] for one in own}))) for name in ("zero", "accumulation")),
            str(len(own)),
            *(f"{max(one[name] for one in own):.1e}" for name in FAR),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
