"""Named tensors ↔ several safetensors files PREFIX-00001.safetensors, …, each bounded in size. Nothing is pickled.

Tensors are logical and complete: no rank, shard or layout appears in names or shapes. They arrive one at a time; a file
is written as soon as the next tensor would take it over the bound, tensor by tensor without a second copy, so that one
bound's worth is held in memory (a tensor above the bound gets a file alone). Values come back bit for bit.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_allattn.checkpoint.files import storage_errors
from megatron_allattn.checkpoint.header import TensorInfo, pack_header, read_header
from megatron_allattn.config.errors import UsageError

DEFAULT_MAX_BYTES = 256 * 2**20
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


class TensorFiles:
    """Write tensors to FOLDER/PREFIX-00001.safetensors and so on: `add` each one, then `close`.

    A failed write (StorageError) leaves a partial file: the caller removes the whole temporary folder (folder.abort).
    """

    def __init__(self, folder: Path, prefix: str, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        assert re.fullmatch(r"[A-Za-z0-9_]+", prefix), f"prefix {prefix!r}: letters, digits and _ only"
        self._folder, self._prefix, self._max_bytes = folder, prefix, max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._num_files = 0
        self._file_of: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a copy of `tensor` (any device and layout of memory); it may be changed or freed afterwards."""
        assert name not in self._file_of and name not in self._pending, f"tensor {name} was added twice"
        assert tensor.dtype in DTYPE_NAMES, f"tensor {name}: {tensor.dtype} has no safetensors name"
        num_bytes = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + num_bytes > self._max_bytes:
            self._write_pending()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy.copy_(tensor.detach())
        self._pending[name] = copy
        self._pending_bytes += num_bytes

    def close(self) -> dict[str, str]:
        """Write what is left; returns the file's name for every tensor's name."""
        if self._pending:
            self._write_pending()
        return dict(self._file_of)

    def _write_pending(self) -> None:
        # Wide types first, as the safetensors library does, so that every tensor starts at a multiple of its item size.
        names = sorted(self._pending, key=lambda name: (-self._pending[name].element_size(), name))
        self._num_files += 1
        path = self._folder / file_name(self._prefix, self._num_files)
        write_tensors(path, [info_of(name, self._pending[name]) for name in names], map(self._pending.pop, names))
        self._file_of.update(dict.fromkeys(names, path.name))
        self._pending_bytes = 0


def file_name(prefix: str, number: int) -> str:
    """PREFIX-00001.safetensors for 1."""
    return f"{prefix}-{number:05d}.safetensors"


def info_of(name: str, tensor: torch.Tensor) -> TensorInfo:
    """What a header says of a tensor."""
    return TensorInfo(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.numel() * tensor.element_size())


def write_tensors(path: Path, infos: list[TensorInfo], tensors: Iterable[torch.Tensor]) -> str:
    """Write a new safetensors file and flush it to the disk; its SHA-256.

    tensors: on the CPU, contiguous, as `infos` describe them, in this order; each is asked for when the one before it
    is written. Raises StorageError; a partial file is then left.
    """
    header, digest = pack_header(infos), hashlib.sha256()
    needed = len(header) + sum(info.num_bytes for info in infos)
    with storage_errors(path, needed), open(path, "xb", buffering=0) as handle:

        def write(content: memoryview) -> None:
            digest.update(content)
            while content:
                content = content[handle.write(content) :]

        write(memoryview(header))
        for info, tensor in zip(infos, tensors, strict=True):
            assert info_of(info.name, tensor) == info, f"tensor {info.name}: {tensor.dtype} {tuple(tensor.shape)}"
            write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        os.fsync(handle.fileno())
    return digest.hexdigest()


class TensorReader:
    """The tensors of FOLDER/PREFIX-*.safetensors, read one at a time.

    `names` lists them in the order they lie on the disk, `infos` has type, shape and size of each. UsageError: when a
    file is missing from the numbering or damaged, or a name occurs twice (`folder.verify` looks at every byte).
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._path_of: dict[str, Path] = {}
        self.infos: dict[str, TensorInfo] = {}
        for number, path in enumerate(_numbered_files(folder, prefix), start=1):
            if path.name != file_name(prefix, number):
                raise UsageError(f"{folder}: {file_name(prefix, number)} is missing, found {path.name}")
            for info in read_header(path):
                if info.name in self.infos:
                    raise UsageError(f"{path}: tensor {info.name} is also in {self._path_of[info.name].name}")
                self._path_of[info.name], self.infos[info.name] = path, info

    @property
    def names(self) -> list[str]:
        return list(self.infos)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its own memory on the CPU. Raises UsageError when there is none of this name."""
        if name not in self._path_of:
            raise UsageError(f"tensor {name}: not in this checkpoint ({len(self.infos)} tensors)")
        path = self._path_of[name]
        try:
            with safe_open(path, framework="pt", device="cpu") as handle:
                return handle.get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path}: tensor {name} cannot be read: {error}") from error


def _numbered_files(folder: Path, prefix: str) -> list[Path]:
    pattern = re.compile(re.escape(prefix) + r"-\d{5}\.safetensors")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
