"""SLURM's compressed lists of nodes and of counts, written out. Without torch.

gpu[007-009,12]-x,login1   →   gpu007-x gpu008-x gpu009-x gpu12-x login1
8(x3),4                    →   8 8 8 4
"""

import re
from collections.abc import Iterator
from itertools import pairwise

from megatron_allattn.config.errors import usage_error

MOST = 65_536
"""Nodes, or counts, of one list: more is a mistake, and would be written out for ever."""

_PART = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+")
_BRACKETS = re.compile(r"\[([^]]*)\]")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_nodes(text: str, what: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Every node of a list, in its order. what: the variable or flag that it comes from.

    Raises UsageError: not such a list, a node twice, more nodes than `MOST`.
    """
    fix = "give names and ranges, as n[1-4,7],login1"
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+|,", text.strip())
    names: list[str] = []
    if not parts or parts[0] == "," or parts[-1] == "," or any(a == b == "," for a, b in pairwise(parts)):
        raise usage_error(what, text, "not a list of hosts", fix)
    for part in parts:
        if part == ",":
            continue
        if not _PART.fullmatch(part) or part.startswith("-"):
            raise usage_error(what, text, f"not a list of hosts: {part} is none", fix)
        for name in _written_out(part, what, text):
            names.append(name)
            if len(names) > MOST:
                raise usage_error(what, text, f"has more than {MOST} nodes", fix)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise usage_error(what, text, f"{twice} is there twice", "name each node once")
    return names


def _written_out(part: str, what: str, text: str) -> Iterator[str]:
    match = _BRACKETS.search(part)
    if match is None:
        yield part
        return
    for piece in match[1].split(","):
        first, _, last = piece.partition("-")
        last = last or first
        if int(last) - int(first) >= MOST:
            raise usage_error(what, text, f"has more than {MOST} nodes", "give names and ranges, as n[1-4,7],login1")
        if int(last) < int(first):
            raise usage_error(what, text, f"not a list of hosts: {piece} is no range", "give the smaller number first")
        for number in range(int(first), int(last) + 1):
            head = part[: match.start()] + str(number).zfill(len(first))
            yield from _written_out(head + part[match.end() :], what, text)


def expand_counts(text: str, what: str) -> list[int]:
    """Every number of a list such as `8(x3),4`: one per node. Raises UsageError."""
    counts: list[int] = []
    for piece in text.split(","):
        match = _COUNT.fullmatch(piece.strip())
        if match is None or len(counts) + int(match[2] or 1) > MOST:
            raise usage_error(what, text, "not a list of counts", "give numbers, as 8(x3),4")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """The first host of SLURM's list: `gpu[007-009,12]-x,login1` gives gpu007-x. Raises UsageError."""
    return expand_nodes(nodelist)[0]


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Entry `node` of SLURM's compressed counts: `4(x2),3` means 4, 4, 3. Raises UsageError."""
    counts = expand_counts(tasks_per_node, "SLURM_TASKS_PER_NODE")
    if not 0 <= node < len(counts):
        raise usage_error("SLURM_NODEID", node, f"SLURM_TASKS_PER_NODE={tasks_per_node} has no such node", "use srun")
    return counts[node]
