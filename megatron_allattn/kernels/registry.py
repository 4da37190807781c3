"""Attention backends by name, and the choice between them: `--attention-backend {auto,eager,blocked,triton}`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights

Attend = Callable[[Tensor, Tensor, LayerWeights, AttentionSettings, BlockState], Tensor]

BACKENDS: dict[str, Callable[[], Attend]] = {"eager": lambda: eager.attend, "blocked": Blocked}


@dataclass(frozen=True)
class AttentionBackend:
    """A chosen backend. `note` says in one line which and why."""

    name: str
    note: str
    attend: Attend


def choose_backend(choice: str, device: torch.device, dtype: torch.dtype, head_size: int) -> AttentionBackend:
    """The backend for `--attention-backend` and what it would run on.

    Raises ValueError where the one that is asked for does not exist or cannot run here.
    """
    if choice == "auto":
        return AttentionBackend("blocked", f"blocked (the fastest on {device.type})", BACKENDS["blocked"]())
    if choice not in BACKENDS:
        raise ValueError(f"--attention-backend {choice}: known are auto, {', '.join(sorted(BACKENDS))}")
    return AttentionBackend(choice, f"{choice} (asked for)", BACKENDS[choice]())
