"""Attention backends by name, and the choice between them: `--attention-backend {auto,eager,blocked,triton}`."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.compiled import load_library
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights

Attend = Callable[[Tensor, Tensor, LayerWeights, AttentionSettings, BlockState], Tensor]


def make_blocked(device: torch.device) -> Blocked:
    """With compiled heads where they can be had."""
    return Blocked(*load_library()) if device.type in ("cpu", "meta") else Blocked(None)


def _triton(device: torch.device) -> Attend:
    """Imported when it is chosen: triton is there on machines with a GPU only."""
    return importlib.import_module("megatron_allattn.kernels.triton_attention").Triton()


BACKENDS: dict[str, Callable[[torch.device], Attend]] = {
    "eager": lambda device: eager.attend,
    "blocked": make_blocked,
    "triton": _triton,
}
TRITON_HEAD_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class AttentionBackend:
    """A chosen backend. `note` says in one line which and why."""

    name: str
    note: str
    attend: Attend


def choose_backend(
    choice: str,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    normalization: Literal["span", "window"] = "span",
) -> AttentionBackend:
    """The backend for `--attention-backend` and what it would run on.

    normalization: of interface.py. Raises ValueError where the backend that is asked for does not exist or cannot run
    here.
    """
    obstacles = {
        "triton": triton_obstacle(device, dtype, head_size, normalization),
        "blocked": "its masks need more bits than float16 has" if dtype == torch.float16 else None,
        "eager": None,
    }
    if choice == "auto":
        name = next(name for name, obstacle in obstacles.items() if obstacle is None)
        passed = "; ".join(f"not {other}: {obstacle}" for other, obstacle in obstacles.items() if obstacle)
        return _make(name, passed or "the fastest where it can run", device, normalization)
    if choice not in BACKENDS:
        raise ValueError(f"--attention-backend {choice}: known are auto, {', '.join(sorted(BACKENDS))}")
    if (obstacle := obstacles.get(choice)) is not None:
        others = ", ".join(name for name, other in obstacles.items() if other is None)
        raise ValueError(f"--attention-backend {choice}: {obstacle}; choose auto or one of {others}")
    return _make(choice, "asked for", device, normalization)


def _make(name: str, why: str, device: torch.device, normalization: str) -> AttentionBackend:
    attend = BACKENDS[name](device)
    detail = f"; {attend.about}" if isinstance(attend, Blocked) and normalization == "span" else ""
    return AttentionBackend(name, f"{name} ({why}{detail})", attend)


def triton_obstacle(device: torch.device, dtype: torch.dtype, head_size: int, normalization: str) -> str | None:
    """Why the Triton kernels cannot do this here, or None.

    With TRITON_INTERPRET=1 in the environment Triton itself runs kernels on CPU tensors, slowly, for tests.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it runs on NVIDIA GPUs, not on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it has no {str(dtype).removeprefix('torch.')}"
    if head_size not in TRITON_HEAD_SIZES:
        return f"heads have {head_size} channels, it has {', '.join(map(str, TRITON_HEAD_SIZES))}"
    if normalization != "span":
        return f"it has no --span-normalization {normalization}"
    return None
