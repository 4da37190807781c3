"""Whether every attention backend computes on this device what the reference, eager in float64, computes.

Outputs and all gradients, dropout included (masks are the same in every backend), from numbers that the precision
under test can hold. A difference is the norm of the difference over the norm of the reference's tensor, and the worst
tensor counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from megatron_allattn.benchmark.attention import Attention, AttentionCase
from megatron_allattn.config import ModelConfig, UsageError
from megatron_allattn.kernels.registry import BACKENDS
from megatron_allattn.model.backends import backend_of

LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}


@dataclass
class Comparison:
    """One line of the table; left out: `detail` says why."""

    part: str
    status: Literal["passed", "failed", "left out"]
    detail: str
    values: dict[str, Any] = field(default_factory=dict)


def _case(
    heads: int, size: int, block: int, length: int, vectors: int, z: tuple[float, ...], dropout: float, **more: Any
):
    model = ModelConfig(
        num_layers=1,
        hidden_size=heads * size,
        num_attention_heads=heads,
        persistent_memory_size=vectors,
        max_attention_span=length,
        attention_dropout=dropout,
        **more,
    )
    return AttentionCase(model, 2, block, (z,), "cpu", "float64", "eager")


# spans at both ends, on and off whole tokens (bfloat16 holds each z); no, one and many persistent vectors
CASES = {
    "4 heads of 64": _case(4, 64, 100, 256, 96, (0.0, 0.0625, 0.5, 1.0), 0.3),
    "2 heads of 32, one vector": _case(2, 32, 64, 192, 1, (0.1015625, 1.0), 0.0),
    "1 head of 64, no vectors": _case(1, 64, 33, 100, 0, (0.25,), 0.3),
    "2 heads of 128": _case(2, 128, 128, 512, 300, (0.0, 0.3125), 0.1),
    "2 heads of 64, positions on values": _case(2, 64, 70, 128, 40, (0.0, 0.5), 0.2, position_values="shared"),
}


def compare_backends(device: torch.device) -> Iterator[Comparison]:
    """A line for every backend and precision; a backend that cannot run here is left out, with the reason."""
    for backend in BACKENDS:
        for dtype in LIMITS:
            part = f"attention {backend}, {dtype}"
            try:
                for case in CASES.values():
                    backend_of(case.model, backend, device, getattr(torch, dtype))
            except UsageError as error:
                yield Comparison(part, "left out", str(error))
                continue
            yield _compare(part, backend, dtype, device)


def _compare(part: str, backend: str, dtype: str, device: torch.device) -> Comparison:
    worst: dict[str, float] = {}
    for name, case in CASES.items():
        truth = Attention(replace(case, device=device.type, rounded=dtype)).results(0)
        found = Attention(replace(case, device=device.type, dtype=dtype, backend=backend)).results(0)
        for tensor, expected in truth.items():
            worst[f"{tensor}, {name}"] = relative_difference(found[tensor], expected)
    where, difference = max(worst.items(), key=lambda item: item[1])
    limit = LIMITS[dtype]
    detail = f"{difference:.1e} (≤ {limit:.0e}) at worst: {where}"
    values = {"difference": difference, "limit": limit, "differences": worst}
    return Comparison(part, "passed" if difference <= limit else "failed", detail, values)


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; infinite where `found` is not finite."""
    difference = (torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)).item()
    return difference if difference == difference else float("inf")
