"""Run the cells of an ablation one after another, each as a pretrain.py of its own that goes on where it stopped."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron_allattn.ablation.cells import Cell, with_flags
from megatron_allattn.ablation.results import is_done

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "pretrain.py"
USAGE, STOPPED = 2, 3  # exit codes of pretrain.py


@dataclass(frozen=True)
class Plan:
    """Where runs go and what they have in common. launch: the words before pretrain.py; arguments: those of all."""

    output: Path
    launch: tuple[str, ...]
    arguments: tuple[str, ...]

    def folder(self, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self.output / cell.name

    def flags(self, cell: Cell) -> list[str]:
        """All arguments of pretrain.py for a cell; the same command begins it and goes on with it."""
        folder = str(self.folder(cell))
        return [*with_flags(self.arguments, cell.flags), "--save", folder, "--load", folder]


class Stopped(Exception):
    """The sweep was asked to stop; the run under way has saved."""


def run_cells(plan: Plan, cells: Sequence[Cell], say: Callable[[str], None]) -> list[str]:
    """Run those that are not done; names of those that failed. Raises Stopped, or UsageError's exit code as SystemExit.

    A cell that fails is told, and the sweep goes on; one that pretrain.py refuses ends it, since all would be.
    """
    failed = []
    for number, cell in enumerate(cells, start=1):
        if is_done(plan.folder(cell)):
            continue
        began = time.monotonic()
        say(f"{number}/{len(cells)} {cell.name}: {plan.folder(cell).with_suffix('.log')} has what it prints")
        code = run_cell(plan, cell)
        if code == USAGE:
            raise SystemExit(USAGE)
        if code == STOPPED:
            raise Stopped
        if code or not is_done(plan.folder(cell)):
            say(f"{number}/{len(cells)} {cell.name}: failed with exit code {code}")
            failed.append(cell.name)
        else:
            say(f"{number}/{len(cells)} {cell.name}: done in {time.monotonic() - began:,.0f} s")
    return failed


def run_cell(plan: Plan, cell: Cell) -> int:
    """Train a cell to its end; its exit code. Ctrl-C and SIGTERM let it save first, and give 3.

    What it prints is appended to FOLDER.log; what it refuses is repeated here.
    """
    plan.output.mkdir(parents=True, exist_ok=True)
    command = [*plan.launch, str(PRETRAIN), *plan.flags(cell)]
    log = plan.folder(cell).with_suffix(".log")
    asked = False
    with open(log, "ab") as output:
        start = output.tell()
        # a session of its own: a terminal's Ctrl-C comes here alone, and is passed on as what a run saves upon
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

        def stop(_number: int, _frame: FrameType | None) -> None:
            nonlocal asked
            asked = True
            child.terminate()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if code == USAGE:
        with open(log, "rb") as printed:
            printed.seek(start)
            sys.stderr.write(printed.read().decode(errors="replace"))
    return STOPPED if asked else code
