"""Speed and memory on this machine, as ratios measured in one run.

    python tools/benchmark.py attention                   # --check: that every backend computes the same
    python tools/benchmark.py attention --sweep mean-span max-span --plot cost.svg
    python tools/benchmark.py layer                       # beside other layers of as many parameters
    python tools/benchmark.py step --recipe enwik8-small --micro-batch-size 2 --span-profile facts --json step.json
    python tools/benchmark.py generate
    python tools/benchmark.py data
    python tools/benchmark.py save
    python tools/benchmark.py plan-check                  # what tools/plan.py predicts beside what this device does

`python tools/benchmark.py COMMAND --help` lists a command's flags. What is compared takes turns, round after round,
after a warm-up; medians are printed and every number goes to --json. docs/performance.md says what each number means.
Exit code 0: done, 1: --check found a wrong result, 2: wrong usage.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.benchmark.profiles import packaged
from megatron_allattn.benchmark.shapes import DEFAULT_PROFILE, DEFAULT_RECIPE
from megatron_allattn.config.checks import check_output
from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.reporting import refuse, run_program
from megatron_allattn.config.tool_flags import ToolParser, count, integer, number

DTYPES, BACKENDS = ("float32", "bfloat16"), ("eager", "blocked", "triton")
ANY_BACKEND = ("auto", *BACKENDS)


def add_attention(parser: ToolParser) -> None:
    """The attention of all layers, forward and backward."""
    add = _add_shape(parser)
    add("--attention-backend", nargs="+", choices=ANY_BACKEND, default=["auto"], help="those to measure (default auto)")
    add("--check", action="store_true", help="first hold every backend that runs here against eager in float64")
    add("--sweep", nargs="+", choices=("mean-span", "max-span"), default=[], help="cost against the spans")
    add("--longest-span", type=count, metavar="S", help="of a sweep's longest head (default 2048)")
    add("--mean-span", type=count, metavar="S", help="of --sweep max-span (default 300)")
    add("--points", type=integer(3), metavar="N", help="of a sweep (default 7)")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the sweeps (needs matplotlib)")


def add_layer(parser: ToolParser) -> None:
    """All-attention layers beside others of as many parameters."""
    add = _add_shape(parser)
    add("--attention-backend", choices=ANY_BACKEND, default="auto", help="of the layer that leads (default auto)")
    peers = ("standard", "x-transformers", "eager")
    add("--peers", nargs="+", choices=peers, help="layers beside it (default: all that are installed)")


def add_step(parser: ToolParser) -> None:
    """A whole training step without its optimizer."""
    add = _add_shape(parser)
    add("--attention-backend", choices=ANY_BACKEND, default="auto", help="default: auto")
    add("--recompute-granularity", choices=("none", "selective", "full"), default="none", help="default: none")
    changes = (*BACKENDS, *DTYPES)
    add("--compare", nargs="+", choices=changes, default=[], help="the same step too with one thing changed")


def add_generate(parser: ToolParser) -> None:
    """Time per token of cached decoding."""
    add = _add_shape(parser)
    positions = [512, 2048, 8192]
    add("--positions", type=count, nargs="+", default=positions, metavar="N", help="tokens read before (512 2048 8192)")
    add("--tokens", type=count, default=16, metavar="N", help="tokens of a run (default 16)")


def add_data(parser: ToolParser) -> None:
    """Token files to batches, and text to token files, on one core."""
    add: Any = parser.add_argument
    add("--input", nargs="+", metavar="FILE", help="text to prepare (default: the standard library's sources)")
    add("--megabytes", type=count, default=64, metavar="N", help="size of the token files (default 64)")
    add("--global-batch-size", type=count, default=64, metavar="S", help="streams (default 64)")
    add("--seq-length", type=count, default=512, metavar="M", help="tokens of a stream's block (default 512)")


def add_save(parser: ToolParser) -> None:
    """What a checkpoint costs: its rate beside plain files, and how long training stands still."""
    add = _add_shape(parser)
    add("--folder", type=Path, default=Path("."), metavar="DIR", help="where to write, and remove (default here)")


def add_plan_check(parser: ToolParser) -> None:
    """The peak of memory and the time of a training step, predicted and measured."""
    add = _add_shape(parser)
    add("--attention-backend", choices=ANY_BACKEND, default="auto", help="default: auto")
    add("--recompute-granularity", choices=("none", "selective", "full"), default="none", help="default: none")
    add("--zero-stage", type=int, choices=range(4), default=1, help="default: 1")
    add("--micro-batches", type=count, default=1, metavar="A", help="of a step (default 1)")
    add("--gpu", metavar="D", help="device of the table whose shares are taken (default: by the driver's name)")


PROBABILITY = number("from 0 up to, and without, 1", lambda value: 0 <= value < 1)
COMMANDS: dict[str, Callable[[ToolParser], None]] = {
    "attention": add_attention,
    "layer": add_layer,
    "step": add_step,
    "generate": add_generate,
    "data": add_data,
    "save": add_save,
    "plan-check": add_plan_check,
}


def _add_shape(parser: ToolParser) -> Any:
    """Flags of the commands that run a model."""
    add: Any = parser.add_argument
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    profiles = f"{', '.join(packaged())}, a JSON file or a run folder"
    add("--device", choices=("cpu", "cuda"), help="default: the GPU, where there is one")
    add(
        "--threads",
        type=partial(_threads, cores),
        default=cores,
        metavar="N",
        help=f"threads of a CPU (default {cores}, all cores)",
    )
    add("--recipe", default=DEFAULT_RECIPE, metavar="R", help=f"the model's shape (default {DEFAULT_RECIPE})")
    add("--micro-batch-size", type=count, default=1, metavar="B", help="streams (default 1)")
    add("--seq-length", type=count, metavar="M", help="tokens of a stream (default: the recipe's)")
    add("--num-layers", type=count, metavar="N", help="layers (default: the recipe's, 4 in a sweep)")
    add("--persistent-memory-size", type=integer(0), metavar="N", help="vectors of a head (default: the recipe's)")
    add("--attention-dropout", "--dropout", type=PROBABILITY, metavar="P", help="default: the recipe's")
    add("--span-profile", metavar="P", help=f"how far heads look: {profiles} (default {DEFAULT_PROFILE})")
    add("--dtype", choices=DTYPES, default="float32", help="default: float32")
    return add


def _threads(cores: int, text: str) -> int:
    threads = count(text)
    if threads > cores:
        raise argparse.ArgumentTypeError(f"{text}: this process may use {cores} cores, and more threads would wait")
    return threads


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of the command that `argv` begins with, which is `command`. Raises UsageError."""
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        fix = f"did you mean {near[0]}?" if near else f"give one of {', '.join(COMMANDS)} first"
        raise usage_error("command", name, "there is no such benchmark", fix)
    parser = ToolParser(f"benchmark.py {name}", COMMANDS[name].__doc__)
    COMMANDS[name](parser)
    add: Any = parser.add_argument
    add("--runs", type=count, default=5, metavar="N", help="rounds that count (default 5)")
    add("--warmup", type=integer(0), default=1, metavar="N", help="rounds before them that do not (default 1)")
    add("--json", type=Path, metavar="FILE", help="write every number as JSON")
    options = parser.parse_args(argv[1:])
    options.command = name
    check_output("--json", options.json)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__, end="")
        return 0
    try:
        options = parse(argv)
        # read when torch is loaded, here and in child processes
        os.environ["OMP_NUM_THREADS"] = str(getattr(options, "threads", 1))
        return importlib.import_module(f"megatron_allattn.benchmark.commands.{options.command.replace('-', '_')}").run(
            options
        )
    except UsageError as error:
        return refuse(error)


if __name__ == "__main__":
    run_program(main)
