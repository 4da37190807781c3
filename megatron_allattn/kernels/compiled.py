"""The passes of passes.py in C++, compiled for this machine's processor when they are first needed.

`passes.cpp` needs GCC and nothing else: no headers of PyTorch, so that it takes seconds. Its threads are those of
PyTorch, whose packages for Linux bring GCC's OpenMP library, which is loaded already. The result is kept in PyTorch's
folder for extensions under a name that says what it was made from; it is written under a name of its own and renamed,
so that any number of processes may do so at once, and one that dies leaves no lock behind.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from megatron_allattn.kernels.interface import wide_type
from megatron_allattn.kernels.passes import Rows, bias_gradient
from megatron_allattn.parallel.random import drop_threshold

SOURCE = Path(__file__).with_name("passes.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared")
SECONDS = 120  # for the compiler
TYPES = (torch.float32, torch.bfloat16, torch.float64)


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
        assert rows.factors is None and (rows.bias is None or rows.bias.dtype == wide_type(scores.dtype))
        assert all(one.dtype == scores.dtype for one in rest if isinstance(one, Tensor))
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
    """The passes, compiled unless that has been done, or None; and in a few words how or why not.

    CXX: the compiler's command, c++ by default. TORCH_EXTENSIONS_DIR: where the library is kept.
    """
    command = shlex.split(os.environ.get("CXX") or "c++")
    compiler = shutil.which(command[0])
    if compiler is None:
        return None, f"passes of PyTorch: no C++ compiler {command[0]}"
    try:
        return CompiledPasses(_library([compiler, *command[1:], *FLAGS])), "compiled passes"
    except subprocess.CalledProcessError as error:
        reason = f"{compiler}: {_first_error(error.stderr) or f'exit code {error.returncode}'}"
    except subprocess.TimeoutExpired:
        reason = f"{compiler} took more than {SECONDS} seconds"
    except (OSError, RuntimeError, ValueError) as error:  # of files; of a home that is not known; of names and messages
        reason = str(error)
    return None, f"passes of PyTorch: {reason}"


def _library(command: list[str]) -> ctypes.CDLL:
    """What `command` makes of the source, from the folder if it is there."""
    made_from = "\n".join([SOURCE.read_text(encoding="utf-8"), *command, *_system()])
    library = _folder() / f"passes-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(library.parent)
    if library.exists():
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # cut short by a crash, or of another system: made again
            library.unlink(missing_ok=True)
    _compile(command, library)
    return ctypes.CDLL(str(library))


def _folder() -> Path:
    """Of PyTorch's extensions: TORCH_EXTENSIONS_DIR, or its default."""
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(root) / "megatron_allattn"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions" / "megatron_allattn"


def _check_owner(folder: Path) -> None:
    """Code is loaded from the folder, so nobody else may put some there."""
    status = folder.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {folder}")


def _system() -> list[str]:
    """What -march=native depends on, where Linux tells it, and the C library."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return [platform.machine(), *platform.libc_ver(), features]


def _compile(command: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        subprocess.run(
            [*command, str(SOURCE), "-o", str(built)],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
        with built.open("rb") as file:
            os.fsync(file.fileno())
        if not library.exists():  # another process may have mapped what it made meanwhile
            built.replace(library)


def _first_error(messages: str) -> str:
    """A compiler's first line that tells of one, else its last line."""
    lines = messages.strip().splitlines() or [""]
    return next((line for line in lines if "error" in line or "cannot find" in line), lines[-1])
