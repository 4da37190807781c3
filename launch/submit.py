#!/usr/bin/env python3
"""From a recipe and a size to a SLURM job: checked, printed and, with --submit, submitted.

    python launch/submit.py --nodes 8 --gpus-per-node 8 --time 24:00:00 --recipe enwik8-large --save /shared/runs/large
    python launch/submit.py … --submit

Flags of the job are those below; all others are pretrain.py's. Every rank of the job is built and checked here first,
and nothing is submitted without --submit. The job is told to stop early enough for the saves that were measured in the
run folder; before there are any, 660 s before its end. The script is left in RUN/jobs/job.sbatch; it lives again by
itself until the run is done (docs/cookbook/slurm.md).
Exit code 0: it is printed (submitted), 1: sbatch refuses it, 2: wrong usage.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config.reporting import refuse, run_program, tell_early_ends

if __name__ == "__main__":
    tell_early_ends()  # numpy is loaded next

from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.cluster.jobs import margin
from megatron_allattn.cluster.jobs.arguments import Submitted, submitted
from megatron_allattn.cluster.jobs.lives import FOLDER
from megatron_allattn.cluster.jobs.script import JobOptions, job_text, write_job
from megatron_allattn.cluster.planning.devices import device_named
from megatron_allattn.config import UsageError, check_world, load_deepspeed_json, usage_error
from megatron_allattn.config.tool_flags import ToolParser, count
from megatron_allattn.data.manifest import vocabulary_size

TEXTS = ("job_name", "partition", "account", "qos", "constraint", "reservation", "exclude", "dependency")
DEFAULTS = JobOptions(nodes=8, gpus_per_node=8)


def _parser() -> ToolParser:
    parser = ToolParser("submit.py", __doc__)
    add: Any = parser.add_argument
    add("--nodes", type=count, default=DEFAULTS.nodes, metavar="N", help="that train (default 8)")
    add("--gpus-per-node", type=count, default=DEFAULTS.gpus_per_node, metavar="G", help="one rank each (default 8)")
    add("--spare-nodes", type=int, default=0, metavar="N", help="more of them, for unfit ones (default 0)")
    add("--cpus-per-task", type=count, default=DEFAULTS.cpus_per_task, metavar="C", help="of a rank (default 8)")
    add("--time", default=DEFAULTS.time, metavar="T", help="of one life (default 24:00:00)")
    add("--signal-seconds", type=count, metavar="S", help="before its end it saves (default: what was measured)")
    for name in TEXTS:
        add(f"--{name.replace('_', '-')}", metavar="X", help="as of sbatch")
    add("--gpu", metavar="NAME", help="whose memory must suffice, as h100-80 (cluster/planning/devices.py)")
    add("--submit", action="store_true", help="submit it")
    add("--dry-run", action="store_true", help="do not (the default)")
    return parser


def options_of(given: argparse.Namespace, job: Submitted) -> tuple[JobOptions, list[str]]:
    """What the job asks for, and what is to be said about it. Raises UsageError."""
    found, notes = margin.measured(job.run_folder), []
    if given.signal_seconds is not None:
        asked = given.signal_seconds
    elif found is not None:
        asked = found.margin
        notes.append(f"{found.told}: told to stop {asked} s before its end")
    else:
        asked = margin.DEFAULT
        notes.append(f"no save was measured yet: told to stop {asked} s before its end")
    notes += margin.notes(found, asked, job.run.checkpoint.stop_deadline_minutes, margin.seconds(given.time))
    texts = {name: getattr(given, name) for name in TEXTS if getattr(given, name) is not None}
    options = JobOptions(
        nodes=given.nodes,
        gpus_per_node=given.gpus_per_node,
        spare_nodes=given.spare_nodes,
        cpus_per_task=given.cpus_per_task,
        time=given.time,
        signal_seconds=asked,
        **texts,
    )
    return options, notes


def check(job: Submitted, options: JobOptions, gpu: str | None) -> Iterator[str]:
    """Build every rank of the job and play one step of all of them through; what was found, line by line.

    Raises UsageError for what would fail or hang.
    """
    run = job.run
    check_world(run, options.world_size)  # what needs no torch first
    load_deepspeed_json(run, options.world_size)
    prepared = vocabulary_size(run.data.data_path)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # here only: a login node may have no GPU
    from megatron_allattn.cluster.rehearsal.rehearse import rehearse, vocabulary_of  # noqa: PLC0415
    from megatron_allattn.cluster.rehearsal.report import lines  # noqa: PLC0415

    vocabulary = vocabulary_of(run) if prepared is None else (prepared, "of the data")
    report = rehearse(run, vocabulary[0], options.world_size, options.gpus_per_node, gpu)
    return lines(report, run, vocabulary, options.gpus_per_node)


def another_python() -> str | None:
    """What to say where a job would not run in this Python's environment."""
    found = os.environ.get("PYTHON") or shutil.which("python")
    if found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve():
        return None
    fix = f"activate this one's environment first, or export PYTHON={sys.executable}"
    return f"the job would run {found or 'python, which is not there'}, not {sys.executable}: {fix}"


def _sbatch(*words: str) -> int:
    """Run sbatch, which says itself what is wrong; 0 or 1."""
    return int(subprocess.run(["sbatch", *words], check=False).returncode != 0)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        parser = _parser()
        own, others = parser.split(sys.argv[1:] if argv is None else argv)
        given = parser.parse_args(own)
        if given.submit and given.dry_run:
            raise UsageError("--submit: contradicts --dry-run; give one of the two")
        if given.submit and shutil.which("sbatch") is None:
            raise usage_error("--submit", "sbatch", "there is no such program here", "log in where jobs are submitted")
        if given.gpu is not None:
            device_named(given.gpu)
        job = submitted(others)
        options, notes = options_of(given, job)
        if (other := another_python()) is not None:
            if given.submit:
                raise UsageError(f"--submit: {other}")
            notes.append(other)
        if job.absent is not None:
            wrong = usage_error("--data-path", job.run.data.data_path, f"{job.absent} is not there", "prepare it first")
            if given.submit:
                raise wrong
            notes.append(str(wrong))
        found = [*check(job, options, given.gpu), *notes]
        print(job_text(job.arguments, options))
        for line in found:
            print(f"# {line}")
        if not given.submit:
            print("# not submitted: add --submit")
            return 0
        sys.stdout.flush()  # before what sbatch says
        folder = job.run_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        return _sbatch(str(write_job(folder, job.arguments, options)))
    except UsageError as error:
        return refuse(error)
    except (StorageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    run_program(main)
