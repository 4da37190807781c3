#!/usr/bin/env python3
"""Whether a cluster can run a job: a table of what was found and asked. Exit code 0: go, 1: no-go, 2: wrong usage.

    torchrun --nproc-per-node 8 tools/preflight.py --tensor-model-parallel-size 8 --shared /shared/runs
    srun --ntasks-per-node=1 python tools/preflight.py --local --gpus-per-node 8 --json DIR     # each node alone
    python tools/preflight.py --reports DIR --nodes "$SLURM_JOB_NODELIST" --json verdict.json   # and what they told

As the ranks of a job, under any launcher, it looks at every node (versions, GPUs, memory, the paths of --need) and
measures them together: clocks, a folder that all see, compute rates, all-reduces of the layout's groups, links. Nodes
are slow beside each other: below --slow-below of the median.

--local needs no other node and takes seconds; with --json it leaves a report, NODE.json where a folder is named.
--reports puts reports beside each other: which nodes differ, which said nothing, which to leave out (`bad_nodes`), and
what no choice of nodes would mend (`reasons`). What cannot be looked at, as GPUs where there are none, stands in the
table with a -.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.cluster.nodes.checks import table
from megatron_allattn.cluster.nodes.compare import judge, read_reports
from megatron_allattn.cluster.nodes.local import GIB, HOST_BYTES_PER_RANK, PROBE_SECONDS, Asked, examine
from megatron_allattn.config.checks import check_output
from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.reporting import first_rank_guess, refuse, run_program
from megatron_allattn.config.run import ParallelConfig
from megatron_allattn.config.tool_flags import ToolParser, above_zero, count
from megatron_allattn.parallel.nodelist import expand_nodes

SECONDS, SLOW_BELOW, CLOCK_SKEW = 240.0, 0.7, 1.0
SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
ANY = {"--json"}
NODE = {"--gpus-per-node", "--min-gpu-memory-gib", "--min-host-memory-gib", "--need", "--shared", "--probe-seconds"}
MODES = {
    "--local": ANY | NODE | {"--master-port"},
    "--reports": ANY | {"--nodes"},
    "": ANY | NODE | {*SIZES, "--slow-below", "--max-clock-skew-seconds", "--megabytes", "--timeout-seconds"},
}
"""The flags of each mode, the last one that of ranks together: what a mode would not look at is refused."""


def _parser() -> ToolParser:
    parser = ToolParser("preflight.py", __doc__)
    add: Any = parser.add_argument
    add("--local", action="store_true", help="this node alone")
    add("--reports", type=Path, metavar="DIR", help="what nodes have left there by --local --json DIR")
    add("--nodes", metavar="LIST", help="the nodes that must have told, as n[1-8] or n1,n2")
    add("--gpus-per-node", type=count, metavar="N", help="GPUs that a node must have (and, alone, ranks on it)")
    add("--min-gpu-memory-gib", type=above_zero, metavar="X", help="that must be free on each (default 90 %% of it)")
    least = HOST_BYTES_PER_RANK // GIB
    add("--min-host-memory-gib", type=above_zero, metavar="X", help=f"that must be free (default {least} a rank)")
    add("--need", type=Path, nargs="+", metavar="PATH", help="files and folders that must be there")
    add("--shared", type=Path, metavar="DIR", help="a folder of all nodes that must take files, and show them to all")
    add("--master-port", type=count, metavar="N", help="at which ranks will meet on the first node: must be free")
    for size, what in zip(SIZES, ("the heads", "the layers"), strict=True):
        add(size, type=count, metavar="N", help=f"processes that share {what}, as in training (default 1)")
    add("--slow-below", type=_part, metavar="X", help=f"of the median is a fault (default {SLOW_BELOW:g})")
    add("--max-clock-skew-seconds", type=above_zero, metavar="X", help=f"between nodes (default {CLOCK_SKEW:g})")
    add("--megabytes", type=count, metavar="N", help="of a message (default 256 on GPUs, 4 on CPUs)")
    limit = (
        f"for torch to load and for nvidia-smi (default {PROBE_SECONDS:g}, or a quarter of --timeout-seconds if less)"
    )
    add("--probe-seconds", type=above_zero, metavar="T", help=limit)
    add("--timeout-seconds", type=above_zero, metavar="T", help=f"for whatever ranks wait for (default {SECONDS:g})")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON; --local: in a folder as NODE.json")
    add("--local-rank", type=int, help=argparse.SUPPRESS)  # ranks are found by the environment
    add("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    return parser


def _part(text: str) -> float:
    value = above_zero(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be below 1, a part of the median")
    return value


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of one mode. Raises UsageError."""
    given = _parser().parse_args(argv)
    chosen = [mode for mode in MODES if mode and getattr(given, _field(mode))]
    if len(chosen) > 1:
        raise usage_error(chosen[0], chosen[1], "are two ways to look", "give one of them")
    mode = chosen[0] if chosen else ""
    for flag in sorted(set().union(*MODES.values()) - MODES[mode]):
        if getattr(given, _field(flag)) is not None:
            told = f"{mode} does not look at it" if mode else "only --local or --reports look at it"
            raise usage_error(flag, getattr(given, _field(flag)), told, "leave it out")
    if given.master_port is not None and given.master_port > 65535:
        raise usage_error("--master-port", given.master_port, "must be a TCP port, 1 to 65535", "give a free one")
    in_folder = given.local and given.json is not None and given.json.is_dir()
    if first_rank_guess() and not in_folder:  # only the first of several writes
        check_output("--json", given.json)
    return given


def _field(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _asked(given: argparse.Namespace, shared: Path | None, ranks: int | None) -> Asked:
    return Asked(
        gpus=given.gpus_per_node,
        gpu_bytes=given.min_gpu_memory_gib and given.min_gpu_memory_gib * GIB,
        host_bytes=given.min_host_memory_gib and given.min_host_memory_gib * GIB,
        need=tuple(given.need or ()),
        shared=shared,
        port=given.master_port,
        ranks=ranks,
        probe_seconds=given.probe_seconds or min(PROBE_SECONDS, (given.timeout_seconds or SECONDS) / 4),
    )


def _local(given: argparse.Namespace) -> int:
    report = examine(_asked(given, given.shared, given.gpus_per_node or 1))
    print(f"{report.node}: {', '.join(f'{name} {value}' for name, value in report.facts.items())}")
    print(table(report.checks, 1))
    if given.json is not None:
        report.write(given.json)
    return 0 if report.go else 1


def _reports(given: argparse.Namespace) -> int:
    expected = expand_nodes(given.nodes, "--nodes") if given.nodes is not None else []
    reports = read_reports(given.reports)
    if not (reports or expected):
        raise usage_error("--reports", given.reports, "has no report in it", "run --local --json DIR on each node")
    judgement = judge(reports, expected)
    if given.json is not None:
        judgement.write(given.json)
    print(table(judgement.checks, len(judgement.nodes)))
    if judgement.bad_nodes:
        print(f"to be left out: {','.join(judgement.bad_nodes)}")
    for reason in judgement.reasons:
        print(f"no choice of nodes mends: {reason}")
    return 0 if judgement.go else 1


def _together(given: argparse.Namespace) -> int:
    seconds = given.timeout_seconds or SECONDS
    parallel = ParallelConfig(
        tensor_model_parallel_size=given.tensor_model_parallel_size or 1,
        pipeline_model_parallel_size=given.pipeline_model_parallel_size or 1,
        distributed_timeout_minutes=seconds / 60,
    )
    # torch is loaded from here on, so that --help and mistakes are answered at once
    from megatron_allattn.cluster.nodes.group import GroupOptions, run_group  # noqa: PLC0415

    return run_group(
        GroupOptions(
            asked=_asked(given, None, None),
            parallel=parallel,
            seconds=seconds,
            slow_below=given.slow_below or SLOW_BELOW,
            clock_skew=given.max_clock_skew_seconds or CLOCK_SKEW,
            shared=given.shared,
            megabytes=given.megabytes,
            json=given.json,
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    try:
        given = parse(sys.argv[1:] if argv is None else argv)
        if not (given.local or given.reports):
            return _together(given)
        return _local(given) if given.local else _reports(given)
    except UsageError as error:
        return refuse(error)
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    run_program(main)
