"""Show a run live in a terminal, from its run folder. Exit code 0: closed or shown, 2: wrong usage, 1: anything else.

    python tools/watch.py RUN                  # until q or Ctrl-C; the run goes on
    python tools/watch.py RUN --once           # as it stands now; so too where the output is no terminal
    python tools/watch.py RUN --wait           # for a run that is still to come

It only reads, can be opened and closed at any time and as often as one likes, and shows runs that have ended as well:
how, or that they have ended without a word. It needs rich (pip install rich). docs/watching.md says what is shown.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config.errors import UsageError
from megatron_allattn.config.reporting import refuse, run_program
from megatron_allattn.config.tool_flags import ToolParser


def _parser() -> ToolParser:
    parser = ToolParser("watch.py", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="run folder, as given to --save")
    parser.add_argument("--once", action="store_true", help="print one summary and end")
    parser.add_argument("--wait", action="store_true", help="wait for a folder that is not there yet")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        if importlib.util.find_spec("rich") is None:
            raise UsageError("watch.py: needs the package rich, which is not installed; pip install rich")
        from megatron_allattn.watching.terminal import watch  # noqa: PLC0415  (needs rich)

        return watch(given.folder, once=given.once, wait=given.wait)
    except UsageError as error:
        return refuse(error)
    except KeyboardInterrupt:  # while it is loaded
        return 0


if __name__ == "__main__":
    run_program(main)
