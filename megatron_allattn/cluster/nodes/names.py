"""What a node is called: one name for one node, whoever tells it, with its domain or without.

SLURM says `node1` where the node itself, a hostfile or a report of it may say `node1.cluster.local`. Without torch.
"""

import os
import re
import socket
from collections.abc import Iterable, Mapping

_ADDRESS = re.compile(r"[0-9]+(\.[0-9]+){3}")


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """This node's name as the batch system has it, else the first part of its host name."""
    return environ.get("SLURMD_NODENAME") or short_name(socket.gethostname())


def short_name(name: str) -> str:
    """A name without its domain: `node1.cluster.local` → `node1`. An address stays as it is."""
    return name if _ADDRESS.fullmatch(name) or ":" in name else name.partition(".")[0]


def same_node(one: str, other: str) -> bool:
    """Whether two names are one node's: equal, or one of them is the other without (a part of) its domain."""
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    if _ADDRESS.fullmatch(one) or _ADDRESS.fullmatch(other):
        return one == other
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def find_node(name: str, nodes: Iterable[str]) -> str | None:
    """The one of `nodes` that `name` means, in their spelling; None where it is none of them."""
    return next((node for node in nodes if same_node(name, node)), None)


def shown(names: Iterable[str], most: int = 4) -> str:
    """Names in a sentence: `n1`, `n1 and n2`, `n1, n2, n3, n4 and 60 more`."""
    listed = list(names)
    if len(listed) > most:
        return f"{', '.join(listed[:most])} and {len(listed) - most} more"
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}" if listed else "none"
