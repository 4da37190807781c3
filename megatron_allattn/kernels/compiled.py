"""Compiling heads.cpp for this machine's processor when it is first needed.

It needs GCC, and of PyTorch only the C functions that are kept stable for compiled models, so that it takes seconds.
Its threads are those of PyTorch, whose packages for Linux bring GCC's OpenMP library, which is loaded already. The
result is kept in PyTorch's folder for extensions under a name that says what it was made from; it is written under a
name of its own and renamed, so that any number of processes may do so at once, and one that dies leaves no lock behind.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import struct
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = tuple(Path(__file__).with_name(name) for name in ("heads.cpp", "products.h", "rows.h"))
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
SECONDS = 300  # for the compiler, which on an idle machine takes 10


def load_library() -> tuple[ctypes.CDLL | None, str]:
    """heads.cpp, compiled unless that has been done, or None; and in a few words how or why not.

    CXX: the compiler's command, c++ by default. TORCH_EXTENSIONS_DIR: where the library is kept.
    """
    given = os.environ.get("CXX", "").strip() or "c++"
    try:
        command = shlex.split(given)
    except ValueError as error:
        return None, f"heads of PyTorch: CXX {given}: {error}"
    compiler = shutil.which(command[0])
    if compiler is None:
        return None, f"heads of PyTorch: no C++ compiler {command[0]}"
    try:
        return _library([compiler, *command[1:], *FLAGS]), "compiled heads"
    except subprocess.CalledProcessError as error:
        reason = f"{compiler}: {_first_error(error.stderr) or f'exit code {error.returncode}'}"
    except subprocess.TimeoutExpired:
        reason = f"{compiler} took more than {SECONDS} seconds"
    except (OSError, RuntimeError, ValueError) as error:  # of files; of a home that is not known; of names and messages
        reason = str(error)
    return None, f"heads of PyTorch: {reason}"


def _library(command: list[str]) -> ctypes.CDLL:
    """What `command` makes of the sources, from the folder if it is there."""
    sources = [source.read_text(encoding="utf-8") for source in SOURCES]
    made_from = "\n".join([*sources, *command, torch.__version__, *_system()])
    library = _folder() / f"heads-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(library.parent)
    if library.exists():
        try:
            if _is_whole(library):
                return ctypes.CDLL(str(library))
        except OSError:  # of another system
            pass
        library.unlink(missing_ok=True)
    _compile(command, library)
    return ctypes.CDLL(str(library))


def _is_whole(library: Path) -> bool:
    """Whether a library was not cut short by a crash: to load the rest would end the process.

    ELF puts the table of its sections at a file's end, and where that is into its beginning (64 bits, little-endian).
    """
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return False
    (offset,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return library.stat().st_size >= offset + size * count


def _torch() -> list[str]:
    """Where PyTorch's headers and library are."""
    root = Path(torch.__file__).parent
    return ["-isystem", str(root / "include"), "-L", str(root / "lib"), "-ltorch_cpu"]


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
            [*command, str(SOURCES[0]), *_torch(), "-o", str(built)],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
        if not built.exists() or not built.stat().st_size:
            raise RuntimeError(f"{command[0]} wrote nothing, and tells of no error")
        with built.open("rb") as file:
            os.fsync(file.fileno())
        if not library.exists():  # another process may have mapped what it made meanwhile
            built.replace(library)


def _first_error(messages: str) -> str:
    """A compiler's first line that tells of one, else its last line."""
    lines = messages.strip().splitlines() or [""]
    return next((line for line in lines if "error" in line or "cannot find" in line), lines[-1])
