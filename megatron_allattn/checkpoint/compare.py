"""What two checkpoints have in common, and whether numbers are sound: tensor by tensor, in pieces, without torch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_allattn.checkpoint.header import TensorInfo, values_start

PIECE = 2**22  # elements in memory at a time
TYPES = {
    "C64": "<c8",
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",  # this and the next two: numpy has no such type, their bits are widened when read
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "u1",
}
Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: its file, and the byte at which its values begin."""

    path: Path
    start: int
    info: TensorInfo


def places(files: dict[str, list[TensorInfo]], folder: Path) -> dict[str, Place]:
    """Every tensor of a step folder by its file's kind and its name; files: what `Inspection.tensors` has."""
    found = {}
    for name, infos in files.items():
        start = values_start(folder / name)
        for info in infos:
            found[f"{name.partition('-')[0]} {info.name}"] = Place(folder / name, start, info)
            start += info.num_bytes
    return found


def pieces(place: Place) -> Iterator[Values]:
    """A tensor's values, flat, a piece at a time: floats as float64 or complex128, everything else as it is."""
    return (_widened(place.info.dtype, raw) for raw in _raw(place))


def _raw(place: Place) -> Iterator[Values]:
    """The same as they lie in the file."""
    kind = np.dtype(TYPES[place.info.dtype])
    count = place.info.num_bytes // kind.itemsize
    for first in range(0, count, PIECE):
        size = min(PIECE, count - first)
        yield np.fromfile(place.path, kind, size, offset=place.start + first * kind.itemsize)


def _widened(dtype: str, raw: Values) -> Values:
    if dtype == "BF16":
        return (raw.astype("<u4") << 16).view("<f4").astype("f8")
    if dtype == "F8_E5M2":
        return (raw.astype("<u2") << 8).view("<f2").astype("f8")
    if dtype == "F8_E4M3":
        return _e4m3(raw)
    return raw.astype({"f": "f8", "c": "c16"}.get(raw.dtype.kind, raw.dtype))


def _e4m3(raw: Values) -> Values:
    """Bits → values: a sign, 4 bits of exponent with bias 7, 3 of mantissa; NaN where all 7 are set, no infinity."""
    exponent, mantissa = (raw >> 3 & 15).astype("i4"), (raw & 7).astype("f8")
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    return np.where(raw & 127 == 127, np.nan, np.where(raw & 128, -size, size))


def not_finite(place: Place) -> int:
    """How many of a tensor's numbers are infinite or none."""
    return sum(int((~np.isfinite(piece)).sum()) for piece in pieces(place))


def differences(one: dict[str, Place], other: dict[str, Place]) -> list[str]:
    """A line for each tensor that does not have the same bits in both: -0.0 is not 0.0."""
    lines = []
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            lines.append(f"{name}: only in {'A' if name in one else 'B'}")
            continue
        a, b = one[name].info, other[name].info
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            lines.append(f"{name}: {a.dtype} {list(a.shape)} in A, {b.dtype} {list(b.shape)} in B")
            continue
        count, largest = 0, 0.0
        for bits, other_bits in zip(_raw(one[name]), _raw(other[name]), strict=True):
            whole = f"u{bits.itemsize}"
            apart = bits.view(whole) != other_bits.view(whole)
            count += int(apart.sum())
            left, right = _widened(a.dtype, bits), _widened(b.dtype, other_bits)
            with np.errstate(invalid="ignore"):
                distance = np.abs(_signed(left) - _signed(right))  # whole numbers would wrap around
                largest = max(largest, float(np.nanmax(distance[apart], initial=0.0)))
        if count:
            total = a.num_bytes // np.dtype(TYPES[a.dtype]).itemsize
            lines.append(f"{name}: {count:,} of {total:,} elements differ, by at most {largest:.3g}")
    return lines


def _signed(values: Values) -> Values:
    return values if values.dtype.kind == "c" else values.astype("f8")


def state_differences(one: Any, other: Any, where: str = "") -> list[str]:
    """A line for each value of two states that is not the same, as JSON writes it: 1 is neither true nor 1.0."""
    if isinstance(one, dict) and isinstance(other, dict):
        lines = []
        for key in sorted(one.keys() | other.keys()):
            name = f"{where}.{key}" if where else str(key)
            if key in one and key in other:
                lines += state_differences(one[key], other[key], name)
            else:
                lines.append(f"{name}: only in {'A' if key in one else 'B'}")
        return lines
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    return [] if same else [f"{where}: {_short(one)} in A, {_short(other)} in B"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
