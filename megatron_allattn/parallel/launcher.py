"""Whether DeepSpeed's launcher, which does not always end its ranks with itself, is still there.

The `deepspeed` command on one host starts a second process, which starts the ranks. It passes no signal on to that one,
and both die of most signals without a word to the ranks, which would train on unseen (0.19.8). torchrun needs no such
look: its agent holds the store at which ranks meet, which is missed at once (failures.py).
"""

import os
from pathlib import Path

_SECOND = b"deepspeed.launcher.launch"


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
