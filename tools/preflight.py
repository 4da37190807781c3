#!/usr/bin/env python3
"""Whether a cluster can run a job: a table of what was found and asked. Exit code 0: go, 1: no-go, 2: wrong usage.

    srun --ntasks-per-node=1 python tools/preflight.py --local --gpus-per-node 8 --json DIR     # each node alone
    python tools/preflight.py --reports DIR --nodes "$SLURM_JOB_NODELIST" --json verdict.json  # all together

--local needs no other node and takes seconds: versions, GPUs (number, health, free memory), host memory, the paths of
--need, a folder that takes files. With --json it leaves a report, NODE.json where a folder is named. --reports puts the
reports beside each other: which nodes differ, which said nothing, which to leave out (`bad_nodes`), and what no choice
of nodes would mend (`reasons`). What cannot be looked at, as GPUs where there are none, stands in the table with a -.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.cluster.nodes.checks import table
from megatron_allattn.cluster.nodes.compare import judge, read_reports
from megatron_allattn.cluster.nodes.local import GIB, HOST_BYTES_PER_RANK, PROBE_SECONDS, Asked, examine
from megatron_allattn.cluster.nodes.nodelist import expand_nodes
from megatron_allattn.config.checks import check_output
from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.reporting import refuse, run_program
from megatron_allattn.config.tool_flags import ToolParser, count

ANY = {"--json"}
NODE = {"--gpus-per-node", "--min-gpu-memory-gib", "--min-host-memory-gib", "--need", "--shared", "--probe-seconds"}
MODES = {"--local": ANY | NODE | {"--master-port"}, "--reports": ANY | {"--nodes"}}
"""The flags of each mode: what a mode would not look at is refused."""


def _parser() -> ToolParser:
    parser = ToolParser("preflight.py", __doc__)
    add: Any = parser.add_argument
    add("--local", action="store_true", help="this node alone")
    add("--reports", type=Path, metavar="DIR", help="what nodes have left there by --local --json DIR")
    add("--nodes", metavar="LIST", help="the nodes that must have told, as n[1-8] or n1,n2")
    add("--gpus-per-node", type=count, metavar="N", help="GPUs that a node must have (and ranks on it)")
    add("--min-gpu-memory-gib", type=_number, metavar="X", help="that must be free on each (default 90 %% of it)")
    least = HOST_BYTES_PER_RANK // GIB
    add("--min-host-memory-gib", type=_number, metavar="X", help=f"that must be free (default {least} for each rank)")
    add("--need", type=Path, nargs="+", metavar="PATH", help="files and folders that must be there")
    add("--shared", type=Path, metavar="DIR", help="folder of all nodes that must take files")
    add("--master-port", type=count, metavar="N", help="at which ranks will meet on the first node: must be free")
    limit = f"limit for torch and nvidia-smi (default {PROBE_SECONDS:g})"
    add("--probe-seconds", type=_number, metavar="T", help=limit)
    add("--json", type=Path, metavar="FILE", help="write everything as JSON; in a folder as NODE.json")
    return parser


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of one mode. Raises UsageError."""
    given = _parser().parse_args(argv)
    chosen = [mode for mode in MODES if getattr(given, _field(mode))]
    if len(chosen) != 1:
        raise UsageError("preflight.py: give one of --local and --reports DIR; see --help")
    for flag in sorted(set().union(*MODES.values()) - MODES[chosen[0]]):
        if getattr(given, _field(flag)) is not None:
            raise usage_error(flag, getattr(given, _field(flag)), f"{chosen[0]} does not look at it", "leave it out")
    if given.master_port is not None and given.master_port > 65535:
        raise usage_error("--master-port", given.master_port, "must be a TCP port, 1 to 65535", "give a free one")
    if not (given.local and given.json is not None and given.json.is_dir()):
        check_output("--json", given.json)
    return given


def _field(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _asked(given: argparse.Namespace) -> Asked:
    return Asked(
        gpus=given.gpus_per_node,
        gpu_bytes=given.min_gpu_memory_gib and given.min_gpu_memory_gib * GIB,
        host_bytes=given.min_host_memory_gib and given.min_host_memory_gib * GIB,
        need=tuple(given.need or ()),
        shared=given.shared,
        port=given.master_port,
        ranks=given.gpus_per_node or 1,
        probe_seconds=given.probe_seconds or PROBE_SECONDS,
    )


def _local(given: argparse.Namespace) -> int:
    report = examine(_asked(given))
    if given.json is not None:
        report.write(given.json)
    print(f"{report.node}: {', '.join(f'{name} {value}' for name, value in report.facts.items())}")
    print(table(report.checks, 1))
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


def main(argv: Sequence[str] | None = None) -> int:
    try:
        given = parse(sys.argv[1:] if argv is None else argv)
        return _local(given) if given.local else _reports(given)
    except UsageError as error:
        return refuse(error)
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    run_program(main)
