"""Backends by name. `eager` is the reference; faster ones register here behind the same call."""

from collections.abc import Callable

from torch import Tensor

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights

Attend = Callable[[Tensor, Tensor, LayerWeights, AttentionSettings, BlockState], Tensor]

BACKENDS: dict[str, Attend] = {"eager": eager.attend}


def backend(name: str) -> Attend:
    """The backend called `name`. Raises ValueError listing the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}: known are {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name]
