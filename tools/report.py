#!/usr/bin/env python3
"""Draw the report of a run, or of several side by side: pictures and one HTML page that opens without a network.

    python tools/report.py runs/books                                # writes runs/books/report/index.html
    python tools/report.py runs/a runs/b runs/c --output comparison  # one page on all of them

It reads run folders only, of runs in any state, also while they run. docs/report.md says what the pictures show.
Exit code 0: written, 1: it could not be, 2: wrong usage.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.config.errors import UsageError
from megatron_allattn.config.reporting import refuse, run_program
from megatron_allattn.config.tool_flags import ToolParser


def _parser() -> ToolParser:
    parser = ToolParser("report.py", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="run folders (--save of pretrain.py)")
    default = "RUN/report of one run, report of several"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=f"where to write (default: {default})")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        from megatron_allattn.report import write_comparison, write_report  # noqa: PLC0415  (numpy, after --help)

        if len(options.runs) == 1:
            written = write_report(options.runs[0], options.output)
        else:
            written = write_comparison(options.runs, options.output or Path("report"))
    except UsageError as error:
        return refuse(error)
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {written}; open it in a browser")
    return 0


if __name__ == "__main__":
    run_program(main)
