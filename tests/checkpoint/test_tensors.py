"""Tensors survive the files bit for bit; the safetensors library itself is the independent reader and writer."""

import errno
import json
import math
import os
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.checkpoint.header import TensorInfo, pack_header, read_header
from megatron_allattn.checkpoint.tensors import TensorReader, TensorWriter, info_of, same_bits, write_files
from megatron_allattn.config.errors import UsageError
from tests.support.checkpoints import read_tensors, write_tensors_to
from tests.support.template import ROOT


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randint(-(2**62), 2**62, (6, 5), generator=generator)
    quiet_nan_with_payload = torch.tensor([0x7FC01234, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    return {
        "bfloat16": noise.view(torch.bfloat16)[:, 1:],
        "float32": torch.cat([quiet_nan_with_payload, torch.tensor([-0.0, 1e-45, math.inf])]),
        "float64": torch.tensor([[0.1, -5e-324], [math.nan, 1.7976931348623157e308]], dtype=torch.float64).t(),
        "int64": noise,
        "float16": noise.view(torch.float16)[0],
        "odd": torch.tensor([1, 2, 255], dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "näme/with.dots": torch.ones(2, 1, dtype=torch.int32).expand(2, 3),
    }


def header_of(entries: dict[str, dict[str, object]]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path: Path):
    tensors = _sample()
    (name,) = hashes = write_tensors_to(tmp_path, "weights", tensors)
    assert hashes == {"weights-00001.safetensors": sha256((tmp_path / name).read_bytes()).hexdigest()}
    found = dict(read_tensors(tmp_path, "weights"))
    by_library = safetensors.torch.load_file(tmp_path / "weights-00001.safetensors")
    assert found.keys() == by_library.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert _bits(found[name]) == _bits(by_library[name]) == _bits(tensor), name


def test_files_of_the_library_are_read(tmp_path: Path):
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in _sample().items()}
    safetensors.torch.save_file(tensors, tmp_path / "weights-00001.safetensors", metadata={"format": "pt"})
    reader = TensorReader(tmp_path, "weights")
    assert sorted(reader.names) == sorted(tensors)
    assert all(_bits(reader.read(name)) == _bits(tensor) for name, tensor in tensors.items())
    assert reader.infos["float64"] == TensorInfo("float64", "F64", (2, 2), 32)


def test_header_bytes():
    header = pack_header([TensorInfo("a", "F32", (2, 1), 8), TensorInfo("b", "U8", (), 1)])
    text = (
        b'{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}'
    )
    assert header[:8] == (112).to_bytes(8, "little")
    assert header[8:] == text.ljust(112)


def test_files_are_bounded_and_a_large_tensor_is_alone(tmp_path: Path):
    sizes = {"a": 40, "b": 40, "c": 40, "large": 300, "d": 60, "e": 40}
    tensors = {name: torch.full((size // 4,), float(size)) for name, size in sizes.items()}
    files = write_tensors_to(tmp_path, "weights", tensors, max_bytes=100)
    assert [[info.name for info in read_header(tmp_path / name)] for name in files] == [
        ["a", "b"],
        ["c"],
        ["large"],
        ["d", "e"],
    ]
    assert [name for name, _tensor in read_tensors(tmp_path, "weights")] == list(sizes)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_tensors(tmp_path, "weights"))


def test_prefixes_do_not_mix(tmp_path: Path):
    for prefix in ("caches", "caches_old"):
        write_tensors_to(tmp_path, prefix, {"x": torch.tensor([float(len(prefix))])})
    (tmp_path / "caches-1.safetensors").write_bytes(b"")
    assert [(name, tensor.item()) for name, tensor in read_tensors(tmp_path, "caches")] == [("x", 6.0)]


def test_memory_is_bounded_by_one_tensor(tmp_path: Path):
    """Beside what waits for its hash, here at most one tensor of 4 MiB more."""
    script = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from megatron_allattn.checkpoint import tensors; from megatron_allattn.checkpoint.tensors import *\n"
        "tensors.HELD_BYTES = 4 * 2**20\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "infos = [info_of(str(index), torch.empty(2**20, device='meta')) for index in range(40)]\n"
        "write_files(Path(sys.argv[1]), 'weights', infos[:2], lambda name: torch.full((2**20,), float(name)))\n"
        "before = peak()\n"
        "write_files(Path(sys.argv[1]), 'more', infos, lambda name: torch.full((2**20,), float(name)), 8 * 2**20)\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    grown = int(subprocess.check_output(command, cwd=ROOT, text=True, timeout=60))
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert total > 160 * 2**20 and len(list(tmp_path.iterdir())) == 21
    assert grown < 14 * 2**20, f"{grown:,} bytes for tensors of 4 MiB"


def test_tensors_that_are_not_hashed_yet_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However slowly a processor hashes: what is held of written tensors stays bounded, and all of it is hashed."""
    asked, most = 0, 0
    lock = threading.Lock()

    class Slow:
        def __init__(self, header: bytes) -> None:
            self.hashed, self._digest = 0, sha256(header)

        def update(self, content: memoryview) -> None:
            nonlocal most
            time.sleep(0.001)
            with lock:
                most = max(most, asked - self.hashed)
                self.hashed += 1
            self._digest.update(content)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    monkeypatch.setattr("megatron_allattn.checkpoint.tensors.HELD_BYTES", 1000)
    monkeypatch.setattr("megatron_allattn.checkpoint.tensors.hashlib.sha256", Slow)

    def read(name: str) -> torch.Tensor:
        nonlocal asked
        with lock:
            asked += 1
        return torch.full((100,), float(name))

    infos = [info_of(str(index), torch.empty(100)) for index in range(50)]
    found = write_files(tmp_path, "weights", infos, read)
    content = (tmp_path / "weights-00001.safetensors").read_bytes()
    assert found == {"weights-00001.safetensors": sha256(content).hexdigest()}
    assert 2 <= most <= 4, "400 bytes each: two held and the one that is written, beside the one that is being hashed"


def test_every_element_is_shown_to_who_looks_and_written_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megatron_allattn.checkpoint.tensors.PIECE_BYTES", 16)
    tensors = {
        "a": torch.arange(10.0),
        "none": torch.empty(0, 3),
        "b": torch.arange(9, dtype=torch.bfloat16).view(3, 3),
    }
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    infos = [info_of(name, tensor) for name, tensor in tensors.items()]
    path = tmp_path / "a-00001.safetensors"
    with TensorWriter() as writer:
        writer.write(path, infos, tensors.values(), look=lambda name, piece: seen[name].append(piece))
        hashes = writer.finish()
    assert {name: [len(piece) for piece in pieces] for name, pieces in seen.items()} == {
        "a": [4, 4, 2],
        "none": [0],
        "b": [8, 1],
    }
    assert all(torch.cat(seen[name]).equal(tensor.view(-1)) for name, tensor in tensors.items())
    assert hashes == {path.name: sha256(path.read_bytes()).hexdigest()}
    assert all(found.equal(tensors[name]) for name, found in read_tensors(tmp_path, "a"))


@pytest.mark.parametrize("name", ["fsync", "fdatasync"])
def test_a_disk_that_fails_while_it_is_flushed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("megatron_allattn.checkpoint.tensors.PIECE_BYTES", 256)
    monkeypatch.setattr(os, name, fail)
    tensors = {str(index): torch.ones(100) for index in range(8)}
    with pytest.raises(StorageError, match=r"weights-0000[1-4]\.safetensors: cannot be written .*bytes needed"):
        write_tensors_to(tmp_path, "weights", tensors, max_bytes=800)


def _two_files(folder: Path) -> list[Path]:
    write_tensors_to(folder, "weights", {"a": torch.ones(30), "b": torch.ones(30)}, max_bytes=120)
    return sorted(folder.iterdir())


def test_a_gap_in_the_numbering_is_named(tmp_path: Path):
    first, _second = _two_files(tmp_path)
    first.unlink()
    with pytest.raises(UsageError, match=r"weights-00001\.safetensors is missing, found weights-00002"):
        TensorReader(tmp_path, "weights")


def test_a_name_in_two_files_is_an_error(tmp_path: Path):
    first, second = _two_files(tmp_path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(UsageError, match=r"weights-00002\.safetensors: tensor a is also in weights-00001"):
        TensorReader(tmp_path, "weights")


def test_an_unknown_tensor_is_named(tmp_path: Path):
    _two_files(tmp_path)
    with pytest.raises(UsageError, match=r"tensor c: not in this checkpoint \(2 tensors\)"):
        TensorReader(tmp_path, "weights").read("c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"0 bytes hold no complete header"),
        (b"\x80\x05pickle", r"8 bytes hold no complete header"),
        ((1000).to_bytes(8, "little") + b"{}", r"10 bytes hold no complete header"),
        ((4).to_bytes(8, "little") + b"[1] ", r"header is damaged"),
        ((4).to_bytes(8, "little") + b"nope", r"header is damaged"),
        (pack_header([TensorInfo("a", "F32", (2,), 9)]) + b"123456789", r"F32 of shape \(2,\) does not take 9 bytes"),
        (pack_header([TensorInfo("a", "F32", (2,), 8)]) + b"1234", r"describes 72 bytes, found 68"),
        *(
            (header_of({"a": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}) + bytes(6), reason)
            for shape, offsets, reason in (
                ([8691019, [None]], [0, 6], "must be lists of whole numbers"),
                ([-2, -3], [0, 6], "must be lists of whole numbers"),
                ([2, 3.0], [0, 6], "must be lists of whole numbers"),
                ([True, 6], [0, 6], "must be lists of whole numbers"),
                ([2**62] * 65, [0, 6], "must be lists of whole numbers"),
                ([2, 3], ["0", "6"], "must be lists of whole numbers"),
                ([2, 3], [6, 12], "begins at 6, the one before it ends at 0"),
            )
        ),
        (
            header_of({name: {"dtype": "U8", "shape": [6], "data_offsets": [0, 6]} for name in "ab"}) + bytes(6),
            "tensor b: begins at 0, the one before it ends at 6",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "weights-00001.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_tensor_that_is_mapped_is_the_one_that_is_read(tmp_path: Path):
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),  # what follows it begins at an odd byte of the file
        "a": torch.randn(5, 7),
        "none": torch.empty(0, 3),
        "half": torch.randn(9).bfloat16(),
        "number": torch.tensor(2.5, dtype=torch.float64),
    }
    write_tensors_to(tmp_path, "weights", tensors)
    reader = TensorReader(tmp_path, "weights")
    for name, tensor in tensors.items():
        assert same_bits(reader.map(name), tensor) and same_bits(reader.read(name), tensor)
        assert reader.map(name).untyped_storage().nbytes() == tensor.nbytes
    with pytest.raises(UsageError, match="tensor c: not in this checkpoint"):
        reader.map("c")
