"""What the machine can do at most: the rates that every result is divided by.

GEMM rate: a product of two square matrices, 2·n³ operations, n = 2048 on a CPU and 8192 on a GPU, less where a product
would take more than a second (bfloat16 on a CPU that has no instructions for it); float32 without TF32. Copy bandwidth:
bytes read and written per second by a copy of 256 MB (2 GB on a GPU), far larger than a cache.
"""

import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_allattn.benchmark.timing import seconds
from megatron_allattn.parallel.products import product_type

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {"cpu": 2048, "cuda": 8192}  # n of the products
COPIES = {"cpu": 256_000_000, "cuda": 2_000_000_000}  # bytes
REPEATS = 3  # products and copies of one measurement
SLOW = 1.0  # seconds that no product shall take
_ALLOCATOR = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "PYTORCH_", "OMP_", "KMP_", "MKL_", "GOMP_")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(threads: int) -> None:
    """Set this process up for measuring: its threads, and float32 products in float32 (some images allow TF32)."""
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")


def rate_name(dtype: str, device_name: str) -> str:
    """Whose GEMM rate bounds work in a type: float32's where products are widened (parallel/products.py)."""
    wide = product_type(torch.empty(0, dtype=DTYPES[dtype], device=device_name))
    return next(name for name, found in DTYPES.items() if found == wide)


def rates(device_name: str, size: int | None = None, copy_bytes: int | None = None) -> Callable[[], dict[str, float]]:
    """One measurement of the rates: GEMM in GFLOP/s of each of `DTYPES`, and `copy` in GB/s (10⁹ bytes).

    size, copy_bytes: other than the documented ones, for tests.
    """
    device = torch.device(device_name)
    size = size or SIZES[device.type]
    elements = (copy_bytes or COPIES[device.type]) // 4
    generator = torch.Generator(device).manual_seed(0)

    def pair(dtype: torch.dtype) -> list[torch.Tensor]:
        side = _affordable(size, dtype, device)
        return [torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2)]

    factors = {name: pair(dtype) for name, dtype in DTYPES.items()}
    products = {name: torch.empty_like(pair[0]) for name, pair in factors.items()}
    source = torch.zeros(elements, device=device)
    target = torch.empty_like(source)

    def repeat(action: Callable[[], object]) -> float:
        return seconds(lambda: [action() for _ in range(REPEATS)], device) / REPEATS

    def measure() -> dict[str, float]:
        found = {}
        for name, (a, b) in factors.items():
            found[name] = 2 * len(a) ** 3 / repeat(partial(torch.mm, a, b, out=products[name])) / 1e9
        found["copy"] = 8 * elements / repeat(partial(target.copy_, source)) / 1e9
        return found

    return measure


def _affordable(size: int, dtype: torch.dtype, device: torch.device) -> int:
    """n of a product: `size`, or less where it would take longer than `SLOW`."""
    probe = min(size, 256)
    square = torch.ones(probe, probe, device=device, dtype=dtype)
    for _ in range(2):  # the first call prepares
        expected = seconds(lambda: square @ square, device) * (size / probe) ** 3
    while expected > SLOW and size > probe:
        size, expected = size // 2, expected / 8
    return size


def describe(device: torch.device, threads: int) -> dict[str, Any]:
    """What was measured on, for the JSON file."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "cores": usable_cores(),
        "threads": threads,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "gemm_size": SIZES[device.type],
        "copy_bytes": COPIES[device.type],
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ALLOCATOR)},
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
