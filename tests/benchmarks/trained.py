"""Training runs of the comparisons beside this file."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def comparison_flags(description: str, train_iters: int) -> argparse.ArgumentParser:
    """The flags that every comparison has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--output", type=lambda name: Path(name).resolve(), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--train-iters", type=int, default=train_iters)
    return parser


def records_of(folder: Path, flags: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of `pretrain.py FLAGS --save folder`, which runs unless the folder says it is done.

    The command goes to standard error, its output to a file beside the folder; a run that fails ends the program.
    """
    outcome = folder / "outcome.json"
    if not (outcome.exists() and json.loads(outcome.read_text())["outcome"] == "done"):
        command = f"pretrain.py {flags} --save {folder}"
        print(f"python {command}", file=sys.stderr, flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_name(f"{folder.name}.log")
        with log.open("w") as file:
            done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, stdout=file, stderr=file, check=False)
        if done.returncode:
            sys.exit(f"error: {folder.name}: exit code {done.returncode}; see {log}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
