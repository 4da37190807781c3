"""Hostfiles: read strictly, made from SLURM's variables, written for each launcher. Without torch.

    # comment
    node1 slots=8

is the form of DeepSpeed and of launch/hostfile.example. DeepSpeed itself trains on one host alone where there is no
such file, and hands whatever stands in it to ssh and a shell. Here a name has letters, digits, `.`, `_` and `-` and
begins with a letter or digit, so that nothing in it is an option or reaches a shell.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_allattn.cluster.nodes.names import node_name, same_node
from megatron_allattn.config.errors import UsageError, one_line, usage_error
from megatron_allattn.config.json_files import read_bytes
from megatron_allattn.config.tool_flags import ToolParser, count
from megatron_allattn.parallel.nodelist import expand_counts, expand_nodes

EXAMPLE = "see launch/hostfile.example"
SLURM = "slurm"
MOST_SLOTS = 4096  # of a host: more is a slip of the finger
MOST_BYTES = 2**22

_LINE = re.compile(r"[ \t]*([A-Za-z0-9][A-Za-z0-9._-]*)[ \t]+slots=([0-9]+)[ \t]*", re.ASCII)
_IGNORED = re.compile(r"[ \t]*(#.*)?")
_GPUS = re.compile(r"(?:[A-Za-z0-9._-]+:)*([0-9]+)")


@dataclass(frozen=True)
class Host:
    """A line of a hostfile: a name, and how many ranks run there."""

    name: str
    slots: int


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a file, in its order. Raises UsageError with file, line number and text."""
    if not os.path.lexists(path):
        raise UsageError(f"HOSTFILE {path}: no such file; {EXAMPLE}")
    content = read_bytes("HOSTFILE", path, EXAMPLE, MOST_BYTES).decode(errors="backslashreplace")
    hosts: list[Host] = []
    for number, line in enumerate(content.removesuffix("\n").split("\n"), 1):
        if _IGNORED.fullmatch(line):
            continue
        match = _LINE.fullmatch(line)
        if match is None or not 0 < int(match[2][:9]) <= MOST_SLOTS or len(match[2].lstrip("0")) > 4:
            raise _refused(path, number, f"'{_shown(line)}' is not \"HOST slots=N\"; {EXAMPLE}")
        name = match[1]
        twice = next((host.name for host in hosts if same_node(host.name, name)), None)
        if twice is not None:
            again = f"{name} is there twice" if twice == name else f"{name} is {twice}, which is there already"
            raise _refused(path, number, f"{again}; give it one line")
        hosts.append(Host(name, int(match[2])))
    if not hosts:
        raise UsageError(f"{path}: names no host; {EXAMPLE}")
    return hosts


def _refused(path: Path, number: int, what: str) -> UsageError:
    return UsageError(f"{path}, line {number}: {what}")


def _shown(line: str) -> str:
    text = "".join(character if character.isprintable() else "?" for character in line)
    return text if len(text) <= 120 else f"{text[:60]}…{text[-60:]}"


def slurm_hosts(environ: Mapping[str, str] = os.environ, slots: int | None = None) -> list[Host]:
    """The hosts of the allocation that this process is in. slots: of each; else what SLURM says of GPUs or tasks.

    Raises UsageError: there is no allocation, or nothing says how many ranks a node gets.
    """
    listed = environ.get("SLURM_JOB_NODELIST")
    if not listed:
        raise UsageError("HOSTFILE=slurm: SLURM_JOB_NODELIST is not set; start it within a job (salloc, sbatch)")
    names = expand_nodes(listed)
    counts = [slots] * len(names) if slots is not None else _slots(environ, len(names))
    if len(counts) != len(names) or not all(0 < one <= MOST_SLOTS for one in counts):
        raise UsageError(
            f"HOSTFILE=slurm: {len(names)} nodes in SLURM_JOB_NODELIST={listed}, but ranks for {len(counts)} "
            f"({','.join(map(str, counts[:20]))}); give their number with GPUS_PER_NODE"
        )
    return [Host(name, one) for name, one in zip(names, counts, strict=True)]


def _slots(environ: Mapping[str, str], nodes: int) -> list[int]:
    """Ranks of each node: its GPUs, where SLURM was asked for some, else its tasks."""
    if gpus := environ.get("SLURM_GPUS_PER_NODE"):
        matches = [_GPUS.fullmatch(part) for part in gpus.split(",")]  # h100:8, or of several kinds
        if not all(matches):
            raise usage_error("SLURM_GPUS_PER_NODE", gpus, "not a number of GPUs", "set GPUS_PER_NODE")
        return [sum(int(match[1][:9]) for match in matches if match)] * nodes
    if tasks := environ.get("SLURM_TASKS_PER_NODE"):
        counts, here = expand_counts(tasks, "SLURM_TASKS_PER_NODE"), environ.get("SLURM_GPUS_ON_NODE", "")
        if here.isdecimal() and set(counts) != {int(here)}:  # asked for by --gres: nothing says what other nodes have
            rule = f"a node has {here} GPUs (SLURM_GPUS_ON_NODE): which is meant?"
            raise usage_error("SLURM_TASKS_PER_NODE", tasks, rule, "set GPUS_PER_NODE to the ranks of a node")
        return counts
    raise UsageError(
        "HOSTFILE=slurm: neither SLURM_GPUS_PER_NODE nor SLURM_TASKS_PER_NODE is set; set GPUS_PER_NODE to the ranks "
        "of a node"
    )


def written(hosts: Sequence[Host], form: str) -> str:
    """The hosts for a launcher: `deepspeed` and `openmpi` (HOST slots=N), `mpich` (HOST:N)."""
    line = "{}:{}\n" if form == "mpich" else "{} slots={}\n"
    return "".join(line.format(host.name, host.slots) for host in hosts)


def torchrun_place(hosts: Sequence[Host], own_name: str) -> tuple[int, int, int, str]:
    """For the node of this name: number of nodes, its rank among them, ranks on it, the first. Raises UsageError."""
    for place, host in enumerate(hosts):
        if same_node(host.name, own_name):
            return len(hosts), place, host.slots, hosts[0].name
    names = ", ".join(host.name for host in hosts[:8])
    raise usage_error(
        "HOSTFILE", names, f"this host, {own_name}, is not in it", "name it there, or set NODE_NAME to its name there"
    )


FORMS = ("deepspeed", "openmpi", "mpich", "torchrun", "count")


def main(argv: Sequence[str] | None = None, about: str | None = None) -> int:
    """Read a hostfile (or `slurm`) and print it for a launcher; about: what --help says first. Exit code 2: it is not
    one."""
    parser = ToolParser("hostfile.py", about)
    add: Any = parser.add_argument
    add("form", choices=FORMS, help="for whom: torchrun gets NNODES NODE_RANK SLOTS FIRST_HOST, count the ranks in all")
    add("hostfile", help="a file with a line HOST slots=N for each host; slurm: the nodes of this allocation")
    add("--gpus-per-node", type=count, metavar="N", help="ranks of a node of the allocation, if not as SLURM says")
    try:
        given = parser.parse_args(sys.argv[1:] if argv is None else argv)
        if given.hostfile == SLURM:
            hosts = slurm_hosts(slots=given.gpus_per_node)
        elif given.gpus_per_node is not None:
            raise usage_error("--gpus-per-node", given.gpus_per_node, "the file says how many", "leave it out")
        else:
            hosts = read_hosts(Path(given.hostfile))
        if given.form == "count":
            print(sum(host.slots for host in hosts))
        elif given.form == "torchrun":
            print(*torchrun_place(hosts, os.environ.get("NODE_NAME") or node_name()))
        else:
            print(written(hosts, given.form), end="")
    except UsageError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
