#!/usr/bin/env python3
"""The paper's Figure 2 at a size that the machine affords: runs, table and figure.

    python tools/ablation.py --output ablation --seeds 3 --sizes 0,64,128,256 --data-path data/books \\
        --num-layers 6 --hidden-size 128 --persistent-memory-size 128 --train-iters 2000 --optimizer adam --lr 0.001
    python tools/ablation.py --output ablation … --show       # table and figure of what is done so far
    python tools/ablation.py --output ablation … --sbatch     # an array job for SLURM in place of running them here

Flags of the ablation are those below; all others are pretrain.py's, those of the model in the middle (all-attn). Every
run has a folder in DIR; the same command goes on where it was interrupted (Ctrl-C lets the run under way save) and
leaves DIR/results.md, results.json and figure.png. docs/ablation.md.
Exit code 0: all runs are done, 1: some are not, 2: wrong usage, 3: it was asked to stop.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config.reporting import refuse, run_program, tell_early_ends

if __name__ == "__main__":
    tell_early_ends()  # torch is loaded next

from megatron_allattn.ablation.cells import (
    VARIANTS,
    Cell,
    cells,
    check_seeds,
    sizes_of,
    variants_of,
    versions,
    with_flags,
)
from megatron_allattn.ablation.results import as_json, read_result, summarize, table
from megatron_allattn.ablation.runner import STOPPED, Plan, Stopped, run_cells
from megatron_allattn.benchmark.plots import check_plotting
from megatron_allattn.checkpoint.files import StorageError, write_text_atomic
from megatron_allattn.checkpoint.run_folder import check_outside
from megatron_allattn.cluster.jobs.script import JobOptions, array_text
from megatron_allattn.config import RunConfig, UsageError, parse, usage_error
from megatron_allattn.config.parameters import count_parameters
from megatron_allattn.config.tool_flags import ToolParser, count
from megatron_allattn.data.manifest import vocabulary_size

OWN = ("--save", "--load", "--seed")
FIGURE, SCRIPT = "figure.png", "array.sbatch"


def _parser() -> ToolParser:
    parser = ToolParser("ablation.py", __doc__)
    add: Any = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="where the runs and the results go")
    add("--variants", default=",".join(VARIANTS), metavar="A,B", help=f"default: {','.join(VARIANTS)}")
    add(
        "--sizes", default="", metavar="N,M", help="numbers of persistent vectors beside the model's own (default none)"
    )
    add("--seeds", type=count, default=3, metavar="K", help="runs of each (default 3)")
    add("--first-seed", type=count, default=1, metavar="S", help="default 1")
    add("--launch", default=sys.executable, metavar="WORDS", help="what starts pretrain.py (default: this Python)")
    add("--show", action="store_true", help="run nothing: table and figure of what is done")
    add("--sbatch", action="store_true", help=f"run nothing: write DIR/{SCRIPT}, a SLURM array with a run an element")
    add("--nodes", type=count, default=1, metavar="N", help="of an element of the array (default 1)")
    add("--gpus-per-node", type=count, default=8, metavar="G", help="default 8")
    add("--time", default="24:00:00", metavar="T", help="of one life of an element (default 24:00:00)")
    return parser


def _base(others: list[str]) -> RunConfig:
    """The run in the middle. Raises UsageError."""
    run, explicit = parse(others)
    if given := [name for name in OWN if name in explicit]:
        raise usage_error("flag", given[0], "every run of the ablation gets its own", "leave it out")
    if run.data.data_path is None:
        raise usage_error("--data-path", "", "is left out", "name the data that all runs have in common")
    return run


def _parameters(run: RunConfig, found: Sequence[Any], others: list[str]) -> dict[str, int]:
    """Of every version, with the vocabulary of the data."""
    prepared = vocabulary_size(run.data.data_path)
    vocabulary = prepared if prepared is not None else run.data.vocab_size
    if vocabulary is None:
        raise usage_error("--vocab-size", "", "is left out, and the data does not say it", "give it")
    return {
        one.name: count_parameters(parse(with_flags(others, one.flags))[0].model, vocabulary).total for one in found
    }


def show(output: Path, every: Sequence[Cell], plan: Plan, parameters: dict[str, int], title: str) -> int:
    """Write what there is; how many runs are not done."""
    results = [result for cell in every if (result := read_result(cell, plan.folder(cell))) is not None]
    seeds = len({cell.seed for cell in every})
    text = table(results, parameters.__getitem__, seeds)
    print(text)
    if results:
        write_text_atomic(output / "results.md", text)
        write_text_atomic(output / "results.json", as_json(results))
        from megatron_allattn.ablation.figure import draw  # noqa: PLC0415  (matplotlib, once it is known to be there)

        draw(output / FIGURE, summarize(results, "valid"), results[0].unit, title)
        print(f"{output}/results.md, results.json, {FIGURE}: {len(results)} of {len(every)} runs are done")
    else:
        print(f"none of {len(every)} runs is done")
    return len(every) - len(results)


def _write_array(options: argparse.Namespace, every: Sequence[Cell], plan: Plan) -> None:
    path = options.output / SCRIPT
    job = JobOptions(nodes=options.nodes, gpus_per_node=options.gpus_per_node, time=options.time, job_name="ablation")
    plan = replace(plan, output=plan.output.absolute())
    options.output.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, array_text([plan.flags(cell) for cell in every], job))
    print(f"wrote {path}: sbatch {path}, an array of {len(every)}; --show shows what is done")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        parser = _parser()
        own, others = parser.split(sys.argv[1:] if argv is None else argv)
        options = parser.parse_args(own)
        check_outside("--output", options.output)
        check_plotting("--output", options.output)
        run = _base(others)
        found = versions(run.model, variants_of(options.variants), sizes_of(options.sizes))
        parameters = _parameters(run, found, others)  # each of them is parsed: a mistake is told before the first run
        every = cells(found, check_seeds(options.seeds, options.first_seed))
        plan = Plan(options.output, tuple(shlex.split(options.launch)), tuple(others))
        if options.sbatch:
            _write_array(options, every, plan)
            return 0
        failed = [] if options.show else run_cells(plan, every, lambda line: print(line, flush=True))
        data = Path(run.data.data_path or "").name
        left = show(
            options.output, every, plan, parameters, f"{run.recipe or 'all-attn'} on {data}, {options.seeds} seeds"
        )
        for name in failed:
            print(f"error: {name} failed; {options.output / name}.log says why", file=sys.stderr)
        return 1 if left else 0
    except UsageError as error:
        return refuse(error)
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped:
        print("stopped: the run under way has saved; the same command goes on", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    run_program(main)
