#!/usr/bin/env python3
"""Which layouts a run has over a number of nodes, and what each needs, sends and takes; best first.

    python tools/plan.py --recipe allattn-1.3b --nodes 8 --gpus-per-node 8 --gpu h100-80
    python tools/plan.py --recipe enwik8-large --nodes 1 --gpus-per-node 8 --gpu a100-40 --bf16 --span-profile late
    python tools/plan.py … --write DIR          # of the best: deepspeed.json, command.sh and (with --save) job.sbatch
    python tools/plan.py … --plot growth.svg    # its memory and time while spans grow

Flags of the plan are those below; all others are pretrain.py's. They override the recipe, and what they fix of the
layout (--tensor-model-parallel-size, --pipeline-model-parallel-size, --zero-stage, --micro-batch-size,
--recompute-granularity, --sequence-parallel, --shard-caches) stays. Nothing is started, and no GPU is needed.
docs/planning.md says what is predicted from what, and how exactly.
Exit code 0: there is a layout, 1: none fits, 2: wrong usage.
"""

import argparse
import difflib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config.reporting import refuse, run_program, tell_early_ends

if __name__ == "__main__":
    tell_early_ends()  # numpy is loaded next

from megatron_allattn.benchmark.plots import check_plotting
from megatron_allattn.benchmark.profiles import FLAG, packaged, read_profile
from megatron_allattn.cluster.planning.devices import DEVICES, Device, device_named
from megatron_allattn.config import RECIPES, RunConfig, UsageError, usage_error
from megatron_allattn.config.checks import check_output
from megatron_allattn.config.cli import parse
from megatron_allattn.config.tool_flags import ToolParser, count
from megatron_allattn.data.manifest import vocabulary_size

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_PROFILE = "late"


def _parser() -> ToolParser:
    parser = ToolParser("plan.py", __doc__)
    add: Any = parser.add_argument
    profiles = f"{', '.join(packaged())}, a JSON file or a run folder"
    add("--nodes", type=count, default=1, metavar="N", help="default 1")
    add("--gpus-per-node", type=count, default=8, metavar="G", help="default 8")
    add("--gpu", default="h100-80", metavar="D", help=f"{', '.join(DEVICES)} (default h100-80)")
    add("--span-profile", metavar="P", help=f"how far heads look: {profiles} (default {DEFAULT_PROFILE})")
    add("--vocab-size", type=count, metavar="V", help="tokens of the vocabulary (default: the recipe's corpus)")
    add("--top", type=count, default=10, metavar="K", help="layouts to show (default 10)")
    add("--all", action="store_true", help="show every layout, not the best for each TP × PP and ZeRO stage")
    add("--layout", type=count, default=1, metavar="K", help="the one of the table for --write and --plot (default 1)")
    add("--write", type=Path, metavar="DIR", help="write its DeepSpeed JSON, batch script and command")
    add("--json", type=Path, metavar="FILE", help="write every layout with every number")
    add("--plot", type=Path, metavar="FILE.svg", help="draw its memory and time while spans grow (also .png)")
    return parser


def reach_of(run: RunConfig, given: str | None) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """How far every head looks at a span profile, and what is to be said of that."""
    from megatron_allattn.model.partition import first_reach  # noqa: PLC0415  (torch, once flags are right)
    from megatron_allattn.model.span import layer_windows, layers_look_back  # noqa: PLC0415

    model = run.model
    if not model.adaptive_span:
        if given is not None:
            raise usage_error(FLAG, given, "spans are fixed", "leave it out")
        return tuple(map(tuple, first_reach(model))), []
    read = read_profile(given or DEFAULT_PROFILE)
    profile = read.fit(model.num_layers, model.num_context_heads, model.max_attention_span)
    z, sizes = profile.z(model.max_attention_span), (model.max_attention_span, model.span_ramp)
    about = f"spans: {profile.name}, mean {profile.mean:.0f}, longest {profile.longest:.0f} tokens"
    return layers_look_back(z, layer_windows(z, *sizes), *sizes), [about, *profile.notes]


def vocabulary_of(run: RunConfig, given: int | None) -> tuple[int, str]:
    """The size of the vocabulary, and who says so: the flag, data that are there, or else the recipe."""
    if given is not None:
        return given, "--vocab-size"
    if (prepared := vocabulary_size(run.data.data_path)) is not None:
        return prepared, f"of {run.data.data_path}"
    if run.recipe is None:
        raise usage_error("--recipe", "", "is left out, so the vocabulary is not known", "add it, or --vocab-size N")
    return RECIPES[run.recipe].vocab_size, f"of the recipe {run.recipe}"


def show(options: argparse.Namespace, given: list[str], run: RunConfig, explicit: frozenset[str]) -> int:
    """Plan, print and write."""
    from megatron_allattn.cluster.planning import growth, report  # noqa: PLC0415  (torch, once flags are right)
    from megatron_allattn.cluster.planning.plan import Planner, Task, distinct  # noqa: PLC0415

    device: Device = device_named(options.gpu)
    vocab_size, source = vocabulary_of(run, options.vocab_size)
    reach, notes = reach_of(run, options.span_profile)
    task = Task(run, vocab_size, options.nodes, options.gpus_per_node, device, reach, explicit)
    planner = Planner(task)
    found = planner.candidates()
    running = [one for one in found if one.refused is None]
    shown = (running if options.all else list(distinct(running)))[: options.top]
    where = f"{run.recipe or 'custom'} on {options.nodes} × {options.gpus_per_node} {device.name}"
    print(where, f"vocabulary {vocab_size:,} ({source})", *notes, sep="; ")
    if shown:
        print(*report.table(shown), sep="\n")
        print(f"{len(running)} layouts fit, {len(shown)} are shown; times are predictions (docs/planning.md)")
    for line in report.refusals(found, 5):
        print(line)
    if options.json is not None:
        _write(options.json, json.dumps(report.as_json(task, found), indent=1) + "\n")
    if not found:
        raise usage_error(
            "--nodes", options.nodes, "no layout divides model and batch", "change the batch or the sizes"
        )
    if not shown:
        return 1
    if options.layout > len(shown):
        raise usage_error("--layout", options.layout, f"the table has {len(shown)}", "give one of it")
    chosen = shown[options.layout - 1]
    if options.plot is not None:
        title = f"{run.recipe}: {report.sizes(chosen)} {report.extras(chosen)} on {device.name}"
        growth.plot(options.plot, growth.grow(planner, chosen), chosen.limit, title)
    if options.write is not None:
        write(options, given, chosen, task)
    return 0


def write(options: argparse.Namespace, given: list[str], chosen: Any, task: Any) -> None:
    """The files of --write."""
    from megatron_allattn.cluster.jobs.arguments import submitted  # noqa: PLC0415
    from megatron_allattn.cluster.jobs.script import JobOptions, write_job  # noqa: PLC0415  (with torch)
    from megatron_allattn.cluster.planning import files  # noqa: PLC0415

    folder = options.write.resolve()
    arguments = files.arguments_of(given, chosen.choice.flags(task.run), folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [files.write_deepspeed(chosen, task.world_size, folder)]
        if task.run.checkpoint.save is None:
            print("no job.sbatch: a job that lives again needs a run folder; add --save DIR")
        else:
            submitted(arguments)  # what a job could not live again with, it need not queue to find out
            job = JobOptions(nodes=options.nodes, gpus_per_node=options.gpus_per_node)
            written.append(write_job(folder, arguments, job))
        written.append(files.write_command(arguments, options.nodes, options.gpus_per_node, folder, ROOT))
    except OSError as error:
        raise usage_error("--write", folder, f"cannot be written ({error.strerror})", "name another folder") from None
    print(*(f"wrote {path}" for path in written), sep="\n")
    print(f"pretrain.py {shlex.join(arguments)}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        fix = "make room or name another file"
        raise usage_error("--json", path, f"cannot be written ({error.strerror})", fix) from None


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        parser = _parser()
        own, others = parser.split(argv)
        options = parser.parse_args(own)
        device_named(options.gpu)
        check_output("--json", options.json)
        check_output("--plot", options.plot)
        if options.plot is not None and options.plot.suffix.lower() not in (".svg", ".png"):
            raise usage_error("--plot", options.plot, "is neither .svg nor .png", "name one of the two")
        check_plotting("--plot", options.plot)
        run, explicit = _parse(others, parser)
        return show(options, others, run, explicit)
    except UsageError as error:
        return refuse(error)


def _parse(others: list[str], parser: ToolParser) -> tuple[RunConfig, frozenset[str]]:
    """pretrain.py's flags; a mistyped flag of the plan is told as such."""
    try:
        return parse(others)
    except UsageError as error:
        flag, _, said = str(error).partition(":")
        near = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
        if "unknown flag" in said and near:
            raise usage_error("flag", flag, "is unknown", f"did you mean {near[0]}?") from None
        raise


if __name__ == "__main__":
    run_program(main)
