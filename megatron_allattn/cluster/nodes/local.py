"""What a node can tell of itself alone, in seconds and without any other: the batch job's health check. Without torch.

`examine` looks; a `NodeReport` is what it finds, as JSON (tools/preflight.py --local --json FILE):

    {"format": 1, "node": "n3", "go": false, "time": 1764480000.0,
     "facts": {"python": "3.11.2", "torch": "2.13.0", …},           what must be equal on all nodes (compare.py)
     "checks": [{"name": "devices", "node": "n3", "status": "ok"|"fault"|"unchecked",
                 "found": "7 × H100", "asked": "8", "way_out": "…"}, …]}
"""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.cluster.nodes import devices
from megatron_allattn.cluster.nodes.checks import Check, Status, is_go
from megatron_allattn.cluster.nodes.names import node_name, same_node
from megatron_allattn.cluster.nodes.storage import storage_check
from megatron_allattn.cluster.nodes.versions import versions
from megatron_allattn.config.errors import usage_error
from megatron_allattn.config.json_files import read_json_object
from megatron_allattn.parallel.addresses import listen_error
from megatron_allattn.parallel.nodelist import expand_nodes

FORMAT = 1
GIB = 2**30
HOST_BYTES_PER_RANK = 1 * GIB
"""Host memory that must be free for each rank: about what one takes that has loaded torch and DeepSpeed."""

PROBE_SECONDS = 60.0
"""What torch gets to load and to try each GPU, and nvidia-smi for an answer."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a node must have. None: nothing is asked (of host memory `HOST_BYTES_PER_RANK`, of a GPU's `FREE_PART`).

    gpus: their number; gpu_bytes, host_bytes: free memory; need: files and folders that must be there; shared: a folder
    that must take files; port: at which ranks will meet, if this is the first node; ranks: on this node (None: as many
    as the launcher has started).
    """

    gpus: int | None = None
    gpu_bytes: float | None = None
    host_bytes: float | None = None
    need: tuple[Path, ...] = ()
    shared: Path | None = None
    port: int | None = None
    ranks: int | None = 1
    probe_seconds: float = PROBE_SECONDS


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node has told. facts: by name, versions and the like; time: of the node's clock, in seconds."""

    node: str
    checks: tuple[Check, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    time: float = 0.0

    @property
    def go(self) -> bool:
        return is_go(self.checks)

    def write(self, path: Path) -> Path:
        """As JSON into this file, or into NODE.json of this folder; where it stands. Raises StorageError."""
        path = path / f"{self.node}.json" if path.is_dir() else path
        checks = [asdict(check) for check in self.checks]
        told = {"format": FORMAT, "node": self.node, "go": self.go, "time": self.time}
        write_json_atomic(path, told | {"facts": dict(self.facts), "checks": checks})
        return path

    @classmethod
    def read(cls, path: Path) -> "NodeReport":
        """What `write` has written. Raises UsageError: it is nothing of that kind."""
        fix = "name a file that tools/preflight.py --local --json has written"
        content = read_json_object("node report", path, fix)
        try:
            if content["format"] != FORMAT:
                raise usage_error("node report", path, f"is of format {content['format']}, not {FORMAT}", fix)
            checks = tuple(Check(**{key: _text(value) for key, value in one.items()}) for one in content["checks"])
            facts = {_text(key): _text(value) for key, value in content["facts"].items()}
            if not all(check.status in ("ok", "fault", "unchecked") for check in checks):
                raise TypeError("a status is none")
            if not isinstance(content["time"], int | float):
                raise TypeError("time is no number")
            return cls(node=_text(content["node"]), checks=checks, facts=facts, time=float(content["time"]))
        except (KeyError, TypeError, AttributeError, AssertionError, OverflowError) as error:
            raise usage_error("node report", path, f"is none ({type(error).__name__}: {error})", fix) from None


def renamed(report: NodeReport, node: str) -> NodeReport:
    """The same of a node by another name."""
    return replace(report, node=node, checks=tuple(replace(check, node=node) for check in report.checks))


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def examine(asked: Asked, environ: Mapping[str, str] = os.environ) -> NodeReport:
    """Everything that this node can tell of itself."""
    node = node_name(environ)
    found = devices.look(asked.probe_seconds)
    facts, checks = versions(node, found)
    on_cpu = environ.get("DS_ACCELERATOR") == "cpu"
    checks += devices.device_checks(found, node, asked.gpus, asked.gpu_bytes, on_cpu)
    checks.append(memory_check(node, available_bytes(), asked))
    checks += [need_check(node, path) for path in asked.need]
    if asked.shared is not None:
        checks.append(storage_check(node, asked.shared))
    if asked.port is not None:
        checks.append(port_check(node, asked.port, environ))
    if environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
        checks.append(address_check(node, environ))
    return NodeReport(node=node, checks=tuple(checks), facts=facts, time=time.time())


def available_bytes(root: Path = Path("/")) -> float | None:
    """Host memory that this process could get: the kernel's, or less where its control groups allow less.

    None: the kernel does not tell.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        found = [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return None
    for line in groups:
        if line.startswith("0::/"):  # the unified hierarchy: a limit of any parent holds too
            folder = root / "sys/fs/cgroup" / line.removeprefix("0::/")
            while folder != root / "sys/fs":
                with suppress(OSError, ValueError):  # no limit is the word "max", and the root has no file
                    limit = int((folder / "memory.max").read_text())
                    found.append(float(limit - int((folder / "memory.current").read_text())))
                folder = folder.parent
    return min(found) if found else None


def memory_check(node: str, available: float | None, asked: Asked) -> Check:
    """Whether that much host memory is free."""
    ranks = asked.ranks or int(os.environ["LOCAL_WORLD_SIZE"])
    wanted = ranks * HOST_BYTES_PER_RANK if asked.host_bytes is None else asked.host_bytes
    if available is None:
        return Check(
            name="host memory", node=node, status="unchecked", found="the kernel does not tell (/proc/meminfo)"
        )
    return Check(
        name="host memory",
        node=node,
        status="ok" if available >= wanted else "fault",
        found=f"{available / GIB:.1f} GiB free",
        asked=f"{wanted / GIB:.1f} GiB",
        way_out="end what else runs there, ask the batch system for more (--mem), or lower --min-host-memory-gib",
    )


def need_check(node: str, path: Path) -> Check:
    """Whether a file or folder that the job needs is there and can be read."""
    readable = os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0))
    found = "is there" if readable else "cannot be read" if os.path.lexists(path) else "is not there"
    way = "mount the file system that has it there, or correct the path"
    status: Status = "ok" if readable else "fault"
    return Check(name=f"{path}", node=node, status=status, found=found, asked="to be read", way_out=way)


def address_check(node: str, environ: Mapping[str, str]) -> Check:
    """Whether this node's name is an address that other nodes reach: gloo, which carries control and saves on GPUs too,
    listens at that one, and on Debian it is 127.0.1.1 unless somebody has changed /etc/hosts."""
    asked = "one that other nodes reach"
    if chosen := environ.get("GLOO_SOCKET_IFNAME"):
        return Check(name="address", node=node, status="ok", found=f"GLOO_SOCKET_IFNAME={chosen}", asked=asked)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        address = f"none ({error})"
    return Check(
        name="address",
        node=node,
        status="fault" if address.startswith(("127.", "none")) else "ok",
        found=f"{name} is {address}",
        asked=asked,
        way_out="give the name its address in /etc/hosts or in the DNS, or set GLOO_SOCKET_IFNAME (launch/env.sh)",
    )


def port_check(node: str, port: int, environ: Mapping[str, str]) -> Check:
    """Whether ranks can meet at this port, on the node where they will: the first of the job."""
    name, listed = f"port {port}", environ.get("SLURM_JOB_NODELIST")
    if listed and not same_node(first := expand_nodes(listed)[0], node):
        return Check(name=name, node=node, status="unchecked", found=f"ranks meet on {first}")
    asked = "free for the ranks to meet"
    if (error := listen_error(port)) is not None:
        way = "choose another with MASTER_PORT, or end what has it (`ss -ltnp` tells)"
        return Check(name=name, node=node, status="fault", found=f"{error.strerror}", asked=asked, way_out=way)
    return Check(name=name, node=node, status="ok", found="free", asked=asked)
