"""The passes of passes.py in C++, compiled for this machine's processor when they are first needed.

`passes.cpp` needs a C++ compiler with OpenMP and nothing else: no headers of PyTorch, so that it takes seconds. Its
threads are those of PyTorch, whose OpenMP library is loaded already. The result is kept in PyTorch's folder for
extensions under a name that says what it was made from; it is written under a name of its own and renamed, so that any
number of processes may do so at once, and one that dies leaves no lock behind.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from megatron_allattn.kernels.passes import Rows, bias_gradient
from megatron_allattn.parallel.random import drop_threshold

SOURCE = Path(__file__).with_name("passes.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared")
SECONDS = 120  # for the compiler


class _Rows(ctypes.Structure):
    """`Rows` of passes.cpp."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("span", ctypes.c_int64),
        ("tile", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("biased", ctypes.c_int64),
        ("row_keys", ctypes.c_void_p),
        ("pair_keys", ctypes.c_void_p),
        ("threshold", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("first", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("known", ctypes.c_int64),
    )


class CompiledPasses:
    """`Passes` on a CPU, for normalization `span`, in float32, bfloat16 and float64; nothing on the meta device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def weights(self, rows: Rows, scores: Tensor, band: Tensor, out: Tensor) -> None:
        self._call("weights", rows, scores, band, out)

    def gradients(self, rows: Rows, softmax: Tensor, grads: Tensor, band: Tensor, both: bool) -> Tensor | None:
        self._call("gradients", rows, softmax, grads, band, ctypes.c_bool(both))
        return bias_gradient(rows, grads)

    def add_windows(self, memory: Tensor, parts: Tensor, tile: int) -> None:
        if parts.device.type == "meta":
            return
        assert memory.stride(1) == 1
        numbers = (*parts.shape, tile, memory.stride(0))
        function = getattr(self._library, f"add_windows_{_type(parts)}")
        function(
            ctypes.c_void_p(memory.data_ptr()), _address(parts), *map(ctypes.c_int64, numbers), torch.get_num_threads()
        )

    def _call(self, name: str, rows: Rows, scores: Tensor, *rest: Tensor | ctypes.c_bool) -> None:
        if scores.device.type == "meta":
            return
        assert rows.factors is None
        described = _Rows(
            count=scores.shape[0],
            width=scores.shape[1],
            span=rows.span,
            tile=rows.tile,
            bias=_address(rows.bias),
            biased=0 if rows.bias is None else len(rows.bias),
            row_keys=None if rows.dropout is None else _address(rows.dropout.rows),
            pair_keys=None if rows.dropout is None else _address(rows.dropout.pairs),
            threshold=0 if rows.dropout is None else drop_threshold(rows.dropout.probability),
            threads=torch.get_num_threads(),
            first=rows.first,
            length=rows.length,
            known=rows.known,
        )
        pointers = [one if isinstance(one, ctypes.c_bool) else _address(one) for one in (scores, *rest)]
        function = getattr(self._library, f"{name}_{_type(scores)}")
        function(ctypes.byref(described), *pointers)


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _address(tensor: Tensor | None) -> ctypes.c_void_p | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def load_passes() -> tuple[CompiledPasses | None, str]:
    """The passes, compiled unless that has been done, or None; and in a few words how or why not."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None, f"passes of PyTorch: no C++ compiler {os.environ.get('CXX', 'c++')}"
    try:
        made_from = "\n".join([SOURCE.read_text(encoding="utf-8"), compiler, *FLAGS, _processor()])
        library = _folder() / f"passes-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
        if not library.exists():
            _compile(compiler, library)
        return CompiledPasses(ctypes.CDLL(str(library))), "compiled passes"
    except subprocess.CalledProcessError as error:
        reason = f"{compiler}: {(error.stderr.strip() or f'exit code {error.returncode}').splitlines()[-1]}"
    except subprocess.TimeoutExpired:
        reason = f"{compiler} took more than {SECONDS} seconds"
    except OSError as error:
        reason = str(error)
    return None, f"passes of PyTorch: {reason}"


def _folder() -> Path:
    """Of PyTorch's extensions: TORCH_EXTENSIONS_DIR, or its default."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torch_extensions"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", default)) / "megatron_allattn"


def _processor() -> str:
    """What -march=native depends on, where Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
        built.replace(library)
