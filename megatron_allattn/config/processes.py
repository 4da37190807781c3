"""Processes of our own that a program starts beside itself. Without torch."""

import ctypes
import os
import signal
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder in which this package is: that of a checkout, or of installed packages."""

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Python finds this package, installed or not."""
    return dict(environ) | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))}


def die_with_parent() -> None:
    """In the new process: the kernel kills it when its parent dies, however that happens."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
