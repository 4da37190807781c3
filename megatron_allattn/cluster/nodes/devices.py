"""The GPUs of a node: how many, which, how much of their memory is free, and whether they are healthy. Without torch.

What can hang with a driver that hangs, torch and nvidia-smi, runs as a child process that is not waited for longer
than its limit. `look` asks them; `device_checks` judges what they have said.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_allattn.cluster.nodes.checks import Check
from megatron_allattn.config.errors import one_line
from megatron_allattn.config.processes import with_package

GIB = 2**30
FREE_PART = 0.9
"""Of a GPU's memory that must be free: the rest is what the driver itself takes, and more is another process."""

PROBE = (sys.executable, "-m", "megatron_allattn.cluster.nodes.device_probe")
HEALTH = "index,driver_version,ecc.errors.uncorrected.volatile.total,retired_pages.pending"
ROWS = "remapped_rows.pending,remapped_rows.failure"
QUERIES = (f"--query-gpu={HEALTH}", f"--query-remapped-rows={ROWS}")
_POLL_SECONDS = 0.05
_SAID = 300  # characters of a program's last words


class Mute(RuntimeError):
    """A program did not answer, or not as it should; the message says what it did."""


@dataclass(frozen=True)
class Devices:
    """What was found. torch: the probe's answer, or why there is none; health: a row of each GPU; driver: its version.

    health is None where there is no nvidia-smi; `mute` says what kept it from answering.
    """

    torch: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""
    driver: str = ""
    health: Sequence[tuple[str, ...]] | None = None
    mute: str = ""

    @property
    def found(self) -> Sequence[Mapping[str, Any]]:
        return self.torch.get("devices", [])


def answer(command: Sequence[str], seconds: float) -> str:
    """What a program prints within so many seconds. Raises Mute. One that cannot even be killed is left behind."""
    environment = with_package(os.environ)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment, start_new_session=True
            )
        except OSError as error:
            raise Mute(f"{command[0]} cannot be started ({error.strerror})") from None
        deadline = time.monotonic() + seconds
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if child.poll() is None:
            child.kill()
            raise Mute(f"no answer within {seconds:g} s")
        output.seek(0)
        errors.seek(0)
        said, complaint = output.read().decode(errors="replace"), errors.read().decode(errors="replace")
    if child.returncode != 0:
        raise Mute(f"exit code {child.returncode}: {one_line(complaint or said)[-_SAID:]}")
    return said


def look(seconds: float) -> Devices:
    """Ask torch and nvidia-smi, each for at most so many seconds."""
    found, trouble = {}, ""
    try:
        found = json.loads(answer(PROBE, seconds).strip().rpartition("\n")[2])
    except (Mute, ValueError) as error:
        trouble = str(error)
    if shutil.which("nvidia-smi") is None:
        return Devices(found, trouble)
    try:
        rows = [_rows(answer(("nvidia-smi", query, "--format=csv,noheader"), seconds)) for query in QUERIES]
    except Mute as error:
        return Devices(found, trouble, mute=str(error))
    health = [(*row, *more) for row, more in zip(*rows, strict=False)]
    return Devices(found, trouble, driver=health[0][1] if health else "", health=health)


def _rows(text: str) -> list[tuple[str, ...]]:
    return [tuple(cell.strip() for cell in line.split(",")) for line in text.splitlines() if line.strip()]


def device_checks(devices: Devices, node: str, gpus: int | None, memory: float | None, cpu_wanted: bool) -> list[Check]:
    """What is to be said of them.

    gpus: how many are asked for; memory: bytes of each that must be free, `FREE_PART` of it if None; cpu_wanted: ranks
    are to run on the CPU (DS_ACCELERATOR=cpu).
    """
    if devices.trouble:
        way = "run `python -c 'import torch'` there; reinstall torch or restart the node"
        return [Check(name="torch loads", node=node, status="fault", found=devices.trouble, asked="", way_out=way)]
    if cpu_wanted:
        return [Check(name="devices", node=node, status="unchecked", found="DS_ACCELERATOR=cpu: ranks use the CPU")]
    asked = "" if gpus is None else f"{gpus}"
    if not devices.found and not gpus:
        return [Check(name="devices", node=node, status="unchecked", found="torch sees no GPU", asked=asked)]
    counted = len(devices.found)
    names = ", ".join(dict.fromkeys(str(one["name"]) for one in devices.found))
    checks = [
        Check(
            name="devices",
            node=node,
            status="fault" if gpus is not None and counted != gpus else "ok",
            found=f"{counted} × {names}" if counted else "torch sees no GPU",
            asked=asked,
            way_out="see nvidia-smi there (a GPU that has fallen off the bus needs a restart), and what "
            "CUDA_VISIBLE_DEVICES and the batch system let this process see",
        )
    ]
    return checks + _memory(devices, node, memory) + _working(devices, node) + _health(devices, node)


def _memory(devices: Devices, node: str, memory: float | None) -> list[Check]:
    if not devices.found:
        return []
    least = min(devices.found, key=lambda one: one["free"] / one["total"] if memory is None else one["free"])
    wanted = FREE_PART * least["total"] if memory is None else memory
    return [
        Check(
            name="GPU memory",
            node=node,
            status="ok" if least["free"] >= wanted else "fault",
            found=f"at least {_gib(least['free'])} free of {_gib(least['total'])}",
            asked=f"{_gib(wanted)} free",
            way_out=f"GPU {list(devices.found).index(least)}: end the processes that nvidia-smi shows, "
            "or ask for less with --min-gpu-memory-gib",
        )
    ]


def _working(devices: Devices, node: str) -> list[Check]:
    if not devices.found:
        return []
    broken = [f"GPU {index}: {one['fails']}" for index, one in enumerate(devices.found) if one["fails"]]
    return [
        Check(
            name="GPU computes",
            node=node,
            status="fault" if broken else "ok",
            found="; ".join(broken) or "a product, right on each",
            way_out="take the node out and look into its kernel log (dmesg, Xid)",
        )
    ]


def _health(devices: Devices, node: str) -> list[Check]:
    """By what nvidia-smi tells: errors in memory that were not corrected, pages or rows that wait for a restart."""
    if devices.mute:
        way = "restart the node, or its driver: nvidia-smi must answer"
        return [Check(name="GPU health", node=node, status="fault", found=f"nvidia-smi: {devices.mute}", way_out=way)]
    if devices.health is None:
        return [Check(name="GPU health", node=node, status="unchecked", found="there is no nvidia-smi")]
    words = ("uncorrected memory errors", "pages to retire", "rows to remap", "rows that could not be remapped")
    bad, known = [], 0
    for index, _, *values in devices.health:
        for value, what in zip(values, words, strict=False):
            known += not value.startswith("[")  # [N/A], [Not Supported]
            if not value.startswith("[") and value.lower() not in ("0", "no"):
                bad.append(f"GPU {index}: {what}: {value}")
    return [
        Check(
            name="GPU health",
            node=node,
            status="fault" if bad else "ok" if known else "unchecked",
            found="; ".join(bad) or ("no errors" if known else "nvidia-smi knows of no error counters here"),
            way_out="restart the node (pages and rows are replaced then), or take it out",
        )
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
