"""What launchers do to their ranks: whether DeepSpeed's, which does not always end them with itself, is still there,
and how long one leaves them after a signal.

The `deepspeed` command on one host starts a second process, which starts the ranks. It passes no signal on to that one,
and both die of most signals without a word to the ranks, which would train on unseen (0.19.8). torchrun needs no such
look: its agent holds the store at which ranks meet, which is missed at once (failures.py).
"""

import os
from collections.abc import Mapping
from pathlib import Path

_SECOND = b"deepspeed.launcher.launch"
_SECONDS = 30.0  # what DeepSpeed's launcher always leaves the ranks, and torchrun if it is not told otherwise


def deepspeed_launcher() -> tuple[int, int] | None:
    """The pids of DeepSpeed's process that has started this one and of what has started that; None where this one was
    started by something else (or there is no /proc)."""
    parent = os.getppid()
    try:
        if _SECOND not in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0"):
            return None
        status = Path(f"/proc/{parent}/status").read_text()
    except OSError:
        return None
    return parent, int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


def save_outlasts_launcher(seconds: float, environ: Mapping[str, str]) -> str | None:
    """What there is to say where a save of so many seconds would be killed by what has started this rank: DeepSpeed's
    launcher or torchrun, asked to stop by SIGINT or SIGTERM. They are known by the variables that they set."""
    if "CROSS_RANK" in environ:
        name, left, instead = "DeepSpeed's launcher", _SECONDS, "start with launch/torchrun.sh or launch/mpirun.sh"
    elif "TORCHELASTIC_RUN_ID" in environ:
        told = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        left = float(told) if told.isdecimal() else _SECONDS
        name, instead = "torchrun", "set TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or start with launch/torchrun.sh"
    else:
        return None
    if seconds < left:
        return None
    return (
        f"saves take longer than the {left:g} s after which {name} kills ranks that it was asked to stop: what was "
        f"trained since the last checkpoint would be lost; {instead}"
    )
