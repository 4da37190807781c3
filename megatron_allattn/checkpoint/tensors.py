"""Named tensors ↔ several safetensors files PREFIX-00001.safetensors, …, each bounded in size. Nothing is pickled.

Tensors are logical and complete: no rank, shard or layout appears in names or shapes. They are written one at a time,
in their order, as many into a file as its bound allows (a tensor above the bound gets a file alone); so one tensor is
held in memory. Values come back bit for bit.
"""

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch

from megatron_allattn.checkpoint.files import storage_errors
from megatron_allattn.checkpoint.header import TensorInfo, pack_header, read_header, values_start
from megatron_allattn.config.errors import UsageError
from megatron_allattn.engine.finite import is_finite

T = TypeVar("T")
DEFAULT_MAX_BYTES = 256 * 2**20
PIECE_BYTES = 16 * 2**20  # of a tensor that is written at a time, and of a file before the disk begins
HELD_BYTES = 64 * 2**20  # of tensors that are written and not hashed yet, when the next one is asked for
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


def write_files(
    folder: Path,
    prefix: str,
    infos: Sequence[TensorInfo],
    read: Callable[[str], torch.Tensor],
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> dict[str, str]:
    """Write FOLDER/PREFIX-00001.safetensors and so on; the SHA-256 of every file by its name.

    read: a tensor by its name, of any device and layout of memory; each is asked for when the one before it is written.
    Raises StorageError, which leaves a partial file: the caller removes the whole temporary folder (folder.abort).
    """
    assert re.fullmatch(r"[A-Za-z0-9_]+", prefix), f"prefix {prefix!r}: letters, digits and _ only"
    with TensorWriter() as writer:
        for number, part in enumerate(cut(infos, lambda info: info.num_bytes, max_bytes), start=1):
            tensors = (read(info.name).detach().cpu().contiguous() for info in part)
            writer.write(folder / file_name(prefix, number), part, tensors)
        return writer.finish()


def cut(items: Sequence[T], num_bytes: Callable[[T], int], max_bytes: int) -> list[list[T]]:
    """Items by file: as many as fit, in order; one that is larger alone."""
    parts: list[list[T]] = []
    room = -1
    for item in items:
        size = num_bytes(item)
        if size > room:
            parts.append([])
            room = max_bytes
        parts[-1].append(item)
        room -= size
    return parts


def file_name(prefix: str, number: int) -> str:
    """PREFIX-00001.safetensors for 1."""
    return f"{prefix}-{number:05d}.safetensors"


def info_of(name: str, tensor: torch.Tensor) -> TensorInfo:
    """What a header says of a tensor."""
    return TensorInfo.of(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on the CPU have the same type, shape and bytes: -0.0 is not 0.0, and a NaN is itself."""
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and bool(_bytes(one).equal(_bytes(other)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def write_tensors(
    path: Path, infos: list[TensorInfo], tensors: Iterable[torch.Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a new safetensors file and flush it to the disk; its SHA-256. As `TensorWriter.write`."""
    with TensorWriter() as writer:
        writer.write(path, infos, tensors, metadata)
        return writer.finish()[path.name]


class TensorWriter:
    """Writes new safetensors files, one after the other, while one thread hashes and another one flushes to the disk
    what has been written: each of the three takes about as long.

        with TensorWriter() as writer:
            writer.write(path, infos, tensors)
            ...
            hashes = writer.finish()
    """

    def __init__(self) -> None:
        self._hashing, self._flushing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._digests: dict[str, Any] = {}
        self._unhashed: deque[tuple[Future[None], int]] = deque()  # tensors, with their sizes
        self._held = self._unflushed = 0  # bytes that are not hashed yet; those of this file that are not flushed
        self._flushes: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hashing.shutdown()
        self._flushing.shutdown()

    def write(
        self,
        path: Path,
        infos: list[TensorInfo],
        tensors: Iterable[torch.Tensor],
        metadata: Mapping[str, str] | None = None,
        look: Callable[[str, torch.Tensor], None] = lambda *_: None,
    ) -> None:
        """Write a file, which is whole and on the disk once `finish` has returned.

        metadata: texts for its header; tensors: on the CPU, contiguous, as `infos` describe them, in this order; each
        is asked for when the one before it is written, and of those before it at most HELD_BYTES are still held.
        look: is shown a tensor, by its name, piece by piece while it is hashed: that takes no time of its own.
        Raises StorageError; a partial file is then left.
        """
        header = pack_header(infos, metadata)
        needed = len(header) + sum(info.num_bytes for info in infos)
        with storage_errors(path, needed):
            handle = open(path, "xb", buffering=0)  # noqa: SIM115 — closed by the thread that flushes it
            try:
                digest, self._unflushed = hashlib.sha256(header), 0
                self._digests[path.name] = digest
                flush = partial(_flush, handle, path, needed)
                self._put(memoryview(header), handle, flush)
                for info, tensor in zip(infos, tensors, strict=True):
                    assert info_of(info.name, tensor) == info, f"{info.name}: {tensor.dtype} {tuple(tensor.shape)}"
                    for piece in tensor.reshape(-1).split(PIECE_BYTES // tensor.itemsize):
                        content = piece.view(torch.uint8).numpy().data
                        hashed = self._hashing.submit(digest.update, content)
                        look(info.name, piece)
                        self._put(content, handle, flush)
                    self._hold(hashed, info.num_bytes)
            finally:
                self._flushes.append(self._flushing.submit(_close, handle, path, needed))

    def finish(self) -> dict[str, str]:
        """Wait until all files are on the disk; the SHA-256 of each by its name. Raises StorageError."""
        for flush in self._flushes:
            flush.result()
        self._hashing.shutdown()
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def _put(self, content: memoryview, handle: FileIO, flush: Callable[[], None]) -> None:
        left = content
        while left:
            written = handle.write(left[:PIECE_BYTES])
            left, self._unflushed = left[written:], self._unflushed + written
            if self._unflushed >= PIECE_BYTES and all(last.done() for last in self._flushes[-1:]):
                self._flushes.append(self._flushing.submit(flush))
                self._unflushed = 0

    def _hold(self, hashed: Future[None], num_bytes: int) -> None:
        """A tensor is written, and held until it is hashed: wait until no more than HELD_BYTES are."""
        self._unhashed.append((hashed, num_bytes))
        self._held += num_bytes
        while self._held > HELD_BYTES:
            done, size = self._unhashed.popleft()
            done.result()
            self._held -= size


def _flush(handle: FileIO, path: Path, needed: int) -> None:
    with storage_errors(path, needed):
        os.fdatasync(handle.fileno())


def _close(handle: FileIO, path: Path, needed: int) -> None:
    with storage_errors(path, needed), handle:
        os.fsync(handle.fileno())


class TensorReader:
    """The tensors of FOLDER/PREFIX-*.safetensors, read one at a time.

    `names` lists them in the order they lie on the disk, `infos` has type, shape and size of each. UsageError: when a
    file is missing from the numbering or damaged, or a name occurs twice (`manifest.verify` looks at every byte).
    """

    def __init__(self, folder: Path, prefix: str, *, finite: bool = False) -> None:
        """finite: a tensor that is not is refused when it is read."""
        self._finite = finite
        paths = _numbered_files(folder, prefix)
        for number, path in enumerate(paths, start=1):
            if path.name != file_name(prefix, number):
                raise UsageError(f"{folder}: {file_name(prefix, number)} is missing, found {path.name}")
        self._open(paths)

    @classmethod
    def of_files(cls, *paths: Path) -> Self:
        """The tensors of these files."""
        reader = cls.__new__(cls)
        reader._finite = False
        reader._open(paths)
        return reader

    def _open(self, paths: Iterable[Path]) -> None:
        self._path_of: dict[str, Path] = {}
        self._start_of: dict[str, int] = {}
        self.infos: dict[str, TensorInfo] = {}
        for path in paths:
            infos = read_header(path)
            start = values_start(path)
            for info in infos:
                if info.name in self.infos:
                    raise UsageError(f"{path}: tensor {info.name} is also in {self._path_of[info.name].name}")
                self._path_of[info.name], self.infos[info.name], self._start_of[info.name] = path, info, start
                start += info.num_bytes

    @property
    def names(self) -> list[str]:
        return list(self.infos)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(info.num_bytes for info in self.infos.values())

    def map(self, name: str) -> torch.Tensor:
        """One tensor as it lies on the disk, to be read as it is used and never written to. As `read`, but that an
        error of the disk is told when the tensor is used, by a signal (SIGBUS)."""
        path, info, dtype = self._found(name)
        if not info.num_bytes:
            return torch.empty(info.shape, dtype=dtype)
        values = np.memmap(path, np.uint8, "c", self._start_of[name], (info.num_bytes,))
        return self._checked(name, torch.from_numpy(values).view(dtype).view(info.shape))

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its own memory on the CPU. Raises UsageError: none of this name, or of another type."""
        path, info, dtype = self._found(name)
        try:
            tensor = torch.empty(info.shape, dtype=dtype)
        except RuntimeError:  # of no elements, since the header fits the file, but torch computes with the other sizes
            raise UsageError(f"{path}: tensor {name} has shape {info.shape}, which torch cannot hold") from None
        left = tensor.view(-1).view(torch.uint8).numpy().data
        try:
            with open(path, "rb", buffering=0) as handle:
                handle.seek(self._start_of[name])
                while left and (count := handle.readinto(left)):
                    left = left[count:]
        except OSError as error:
            raise UsageError(f"{path}: tensor {name} cannot be read: {error.strerror}") from error
        if left:
            raise UsageError(f"{path}: tensor {name}: {len(left):,} bytes are missing")
        return self._checked(name, tensor)

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._finite and not is_finite(tensor):
            rule = "has numbers that are not finite, which no run saves"
            raise UsageError(f"{self._path_of[name]}: tensor {name} {rule}; take an earlier step")
        return tensor

    def _found(self, name: str) -> tuple[Path, TensorInfo, torch.dtype]:
        """The file of a tensor, and what it is."""
        if name not in self._path_of:
            raise UsageError(f"tensor {name}: not in this checkpoint ({len(self.infos)} tensors)")
        path, info = self._path_of[name], self.infos[name]
        dtype = next((dtype for dtype, known in DTYPE_NAMES.items() if known == info.dtype), None)
        if dtype is None:
            raise UsageError(f"{path}: tensor {name} is of type {info.dtype}, which is not read here")
        return path, info, dtype


def _numbered_files(folder: Path, prefix: str) -> list[Path]:
    pattern = re.compile(re.escape(prefix) + r"-[0-9]{5}\.safetensors")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
