"""Print what a checkpoint holds and whether it is intact. Exit code 0: intact, 1: damaged, 2: wrong usage.

    python tools/inspect_checkpoint.py RUN                                  # the newest complete step of a run
    python tools/inspect_checkpoint.py RUN/checkpoints/step_00000100 --json

Reads headers and checks every byte's SHA-256; loads no tensor.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.checkpoint.inspect import inspect
from megatron_allattn.config.errors import UsageError
from megatron_allattn.config.reporting import run_program


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def main(argv: list[str] | None = None) -> int:
    parser = _OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a run folder or one of its step folders")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(argv)
    try:
        inspection = inspect(options.path)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(inspection.to_dict(), indent=2) if options.json else inspection.to_text())
    return 0 if inspection.intact else 1


if __name__ == "__main__":
    run_program(main)
