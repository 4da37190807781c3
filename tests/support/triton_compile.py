"""Compiles what the Triton backend would launch on a GPU, without one: registers, spills and shared memory per kernel.

A call with tensors of PyTorch's meta device goes through the whole backend; in place of its kernels stand recorders
that keep the arguments. Each distinct kernel is then compiled ahead of time for a GPU and read by cuobjdump.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_allattn.kernels import triton_launch
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.kernels.triton_attention import Triton
from megatron_allattn.parallel.random import DropoutKeys

KERNELS = (
    "position_products",
    "forward_rows",
    "add_positions",
    "backward_rows",
    "edge_gradient",
    "context_gradient",
    "persistent_gradient",
    "position_gradient",
)
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32"}
OPTIONS = ("num_warps", "num_stages")
DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Launched:
    """A kernel and the arguments it was launched with."""

    kernel: Any
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """Of a compiled kernel: registers of a thread, bytes of its stack and local memory (spills), of shared memory."""

    registers: int
    stack: int
    local: int
    shared: int


class _Recorder:
    def __init__(self, kernel: Any, launched: list[Launched]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self._launched.append(Launched(self._kernel, arguments))


def launches(monkeypatch: Any, size: int, dtype: torch.dtype, position_values: str = "none") -> list[Launched]:
    """All kernels of a training step's call, at 8 heads, a block of 512, 1024 vectors, dropout and adaptive spans."""
    launched: list[Launched] = []
    for name in KERNELS:
        monkeypatch.setattr(triton_launch, name, _Recorder(getattr(triton_launch, name), launched))
    hidden, spans = 8 * size, (33, 40, 64, 100, 160, 300, 700, 1519)

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    weights = LayerWeights(
        *(tensor(hidden, hidden) for _ in range(3)),
        persistent_key=tensor(8, size, 1024),
        persistent_value=tensor(8, 1024, size),
        span=tensor(8, 1, 1),
        position_key=tensor(1, size, 8192),
    )
    settings = AttentionSettings(8192, 32, position_values, "attend", 0.3, "span")
    ids = torch.empty(8, dtype=torch.int32, device="meta")
    keys = DropoutKeys(1, 1, torch.empty(2, dtype=torch.int32, device="meta"))
    state = BlockState(1536, 1536, ids, 0, keys, spans)
    output = Triton()(
        tensor(2, 512, hidden), torch.empty(2, 1600, hidden, dtype=dtype, device="meta"), weights, settings, state
    )
    output.backward(torch.empty_like(output))
    return launched


def compiled(launch: Launched, capability: int) -> Resources:
    """Compile for a GPU of this capability (80: A100, 90: H100)."""
    kernel, arguments = launch.kernel, launch.arguments
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: arguments[name] for name in OPTIONS}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [DUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(found["REG"], found["STACK"], found["LOCAL"], binary.metadata.shared)
