"""Print what a checkpoint holds and whether it is intact. Exit code 0: intact, 1: damaged, 2: wrong usage.

    python tools/inspect_checkpoint.py runs/books                           # the newest step of a run
    python tools/inspect_checkpoint.py runs/books/checkpoints/step_00000100 --json
    python tools/inspect_checkpoint.py runs/books --verify                  # every byte, and every number
    python tools/inspect_checkpoint.py --diff runs/books runs/other         # two of them; 0: the same, 1: not

Without --verify it reads headers and compares sizes.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config.reporting import refuse, run_program, tell_early_ends

if __name__ == "__main__":
    tell_early_ends()  # numpy is loaded next

from megatron_allattn.checkpoint.inspect import Inspection, difference, inspect
from megatron_allattn.config.errors import UsageError
from megatron_allattn.config.tool_flags import ToolParser


def _parser() -> ToolParser:
    parser = ToolParser("inspect_checkpoint.py", __doc__)
    parser.add_argument("path", type=Path, nargs="?", help="a run folder or one of its step folders")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--verify", action="store_true", help="compare every byte's SHA-256 and look at every number")
    parser.add_argument("--diff", type=Path, nargs=2, metavar=("A", "B"), help="tell what differs between two")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    try:
        options = parser.parse_args(sys.argv[1:] if argv is None else argv)
        if (options.path is None) == (options.diff is None):
            parser.error("give a path, or --diff A B")
        if options.diff and options.json:
            parser.error("--diff A B: --json has no effect")
        if options.diff:
            return _tell_difference(*(inspect(path, every_byte=options.verify) for path in options.diff))
        inspection = inspect(options.path, every_byte=options.verify)
    except UsageError as error:
        return refuse(error)
    print(json.dumps(inspection.to_dict(), indent=2) if options.json else inspection.to_text())
    return 0 if inspection.intact else 1


def _tell_difference(one: Inspection, other: Inspection) -> int:
    """Print what differs between two intact checkpoints; the exit code."""
    if damage := [*one.problems, *other.problems]:
        print("\n".join(f"damaged: {problem}" for problem in damage))
        return 1
    lines = difference(one, other)
    print("\n".join(lines) or "the same: every tensor and every value of the state")
    return 1 if lines else 0


if __name__ == "__main__":
    run_program(main)
