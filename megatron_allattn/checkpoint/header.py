"""The header of a safetensors file: what tensors it holds and where, without reading them (and without torch).

    8 bytes little-endian length n | n bytes JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}} | raw values

The values follow each other without gaps, in the order of their offsets.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

from megatron_allattn.config.checks import check_regular
from megatron_allattn.config.errors import UsageError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 64  # torch's own limit
ITEM_BYTES = {
    name: num_bytes
    for num_bytes, names in (
        (1, ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2")),
        (2, ("U16", "I16", "F16", "BF16")),
        (4, ("U32", "I32", "F32")),
        (8, ("U64", "I64", "F64", "C64")),
    )
    for name in names
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: safetensors' name of its type (F32, BF16, …), its shape, and its size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...]) -> Self:
        """A tensor of this type and shape."""
        return cls(name, dtype, shape, prod(shape) * ITEM_BYTES[dtype])


def pack_header(tensors: list[TensorInfo], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file that holds these tensors' values one after the other, in this order. metadata: any texts."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the values start at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of a file, in the order of their values. Raises UsageError: not a whole safetensors file."""
    return _read(path)[0]


def read_metadata(path: Path) -> dict[str, str]:
    """The texts that a file's header has beside its tensors. Raises UsageError: not a whole safetensors file."""
    return _read(path)[1]


def values_start(path: Path) -> int:
    """The byte of a whole safetensors file at which its values begin."""
    with open(path, "rb") as handle:
        return 8 + int(struct.unpack("<Q", handle.read(8))[0])


def _read(path: Path) -> tuple[list[TensorInfo], dict[str, str]]:
    try:
        check_regular("file", path, "give a safetensors file")
        size = path.stat().st_size
        with open(path, "rb") as handle:
            start = handle.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise UsageError(f"{path}: not a whole safetensors file ({size:,} bytes hold no complete header)")
            entries = json.loads(handle.read(length))
        metadata = entries.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata are not texts")
        tensors = _tensor_infos(entries)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path}: the safetensors header is damaged ({error})") from error
    expected = 8 + length + sum(tensor.num_bytes for tensor in tensors)
    if size != expected:
        raise UsageError(f"{path}: its header describes {expected:,} bytes, found {size:,}")
    return tensors, metadata


def _tensor_infos(entries: dict[str, Any]) -> list[TensorInfo]:
    """In the order of their values. Raises ValueError, KeyError or TypeError: they are not what a header says."""
    ranges = {name: _naturals(name, entry["data_offsets"]) for name, entry in entries.items()}
    infos, position = [], 0
    for name in sorted(entries, key=lambda name: ranges[name]):
        (begin, end), dtype, shape = ranges[name], entries[name]["dtype"], _naturals(name, entries[name]["shape"])
        if begin != position:
            raise ValueError(f"tensor {name}: begins at {begin}, the one before it ends at {position}")
        if end - begin != prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"tensor {name}: {dtype} of shape {shape} does not take {end - begin} bytes")
        infos.append(TensorInfo(name, dtype, shape, end - begin))
        position = end
    return infos


def _naturals(name: str, numbers: list[Any]) -> tuple[int, ...]:
    """Checked before anything is computed with them: `*` of a list, or of many long numbers, takes all memory."""
    if len(numbers) > MAX_DIMENSIONS or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"tensor {name}: sizes and offsets must be lists of whole numbers of at most 63 bits")
    return tuple(numbers)
