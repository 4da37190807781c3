"""What must be the same on all nodes: versions of what runs there. Without torch, whose own word devices.py has."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import megatron_allattn
from megatron_allattn.cluster.nodes.checks import Check
from megatron_allattn.cluster.nodes.devices import Devices
from megatron_allattn.config.processes import ROOT

PACKAGES = ("deepspeed", "numpy")
SOURCES = ("megatron_allattn", "ds_configs", "pretrain.py")


def versions(node: str, devices: Devices) -> tuple[dict[str, str], list[Check]]:
    """What is to be compared between nodes, by name, and what is wrong already on this one."""
    facts, checks = {"python": platform.python_version()}, []
    if devices.torch:
        facts["torch"] = str(devices.torch["torch"])
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            way = "install requirements.txt there, or use a Python that has it"
            checks.append(
                Check(name=package, node=node, status="fault", found="not installed", asked="installed", way_out=way)
            )
    facts["project"] = f"{megatron_allattn.__version__} ({source_hash()[:12]})"
    for name, value in (("CUDA", devices.torch.get("cuda")), ("NCCL", devices.torch.get("nccl"))):
        if value and devices.found:
            facts[name] = str(value)
    if devices.driver:
        facts["driver"] = devices.driver
    if devices.found:
        facts["GPU"] = ", ".join(dict.fromkeys(str(one["name"]) for one in devices.found))
    return facts, checks


def source_hash(root: Path = ROOT) -> str:
    """SHA-256 of the project's files that a run reads: names and contents, in order."""
    digest = hashlib.sha256()
    files = [
        one for name in SOURCES for one in ([root / name] if (root / name).is_file() else (root / name).rglob("*"))
    ]
    for path in sorted(files):
        if path.is_file() and path.suffix in (".py", ".json", ".cpp", ".h"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()
