"""Files that many ranks write: the same bytes from every layout, each written once, whatever fails on the way."""

import hashlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_allattn.checkpoint import save
from megatron_allattn.checkpoint.assembly import plan, write
from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.checkpoint.tensors import TensorReader
from megatron_allattn.engine.finite import NotFinite
from megatron_allattn.model.placement import balance
from megatron_allattn.parallel.collectives import PeerFailed
from tests.support.pool import WorkerPools
from tests.support.trajectories import Case, build

VOCAB = 101
FILES = 20_000  # bytes: several files of each kind
ALONE = Case(1, 1, 0, 1, "adam", "float32", "deepspeed")
LAYOUTS = [
    Case(2, 2, 1, 1, "adam", "float32", "deepspeed"),
    Case(1, 4, 3, 1, "adam", "float32", "deepspeed"),
    Case(4, 1, 2, 2, "adam", "float32", "deepspeed"),
    Case(2, 1, 0, 1, "adam", "float32", "plain"),
    Case(2, 1, 1, 2, "adam", "float32", "deepspeed", pipeline=2),
    Case(2, 2, 1, 1, "adam", "bfloat16", "deepspeed", shard_caches=True),
]


def _write(
    rank: int, world_size: int, case: Case, source: Path, target: Path, max_bytes: int, move: bool
) -> tuple[dict[str, str], Counter]:
    """Load a checkpoint at a layout and write its tensors; what this rank has written, and how often each tensor."""
    engine = build(case, VOCAB)
    save.load(source, engine, save.read_state(source)["cached_length"])
    if move:
        heads = engine.network.config.num_attention_heads
        costs = np.random.default_rng(3).random((engine.network.config.num_layers, heads)).tolist()
        engine.place_heads(tuple(balance(layer, engine.groups.tensor.size) for layer in costs))
    fragments = list(engine.fragments())
    turns = plan(fragments, engine.groups.saving, max_bytes)
    written = write(target, turns, fragments, engine.network.join, engine.groups.saving)
    return written.hashes, Counter(stored.name for turn in turns for file in turn for stored, _ in file.tensors)


class Elsewhere(torch.Tensor):
    """Stands in for a tensor on a GPU: who takes its memory for the host's gets an error."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.Tensor.cpu:
            return arguments[0].as_subclass(torch.Tensor)
        if function is torch.Tensor.numpy:
            raise TypeError("its memory is not the host's")
        return super().__torch_function__(function, types, arguments, options or {})


def _write_from_elsewhere(rank: int, world_size: int, case: Case, target: Path) -> dict[str, str]:
    engine, send = build(case, VOCAB), dist.isend

    def from_host(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        assert type(tensor) is torch.Tensor
        return send(tensor, *arguments, **options)

    fragments = [replace(one, values=one.values.as_subclass(Elsewhere)) for one in engine.fragments()]
    group = engine.groups.saving
    with patch.object(dist, "isend", from_host):
        return write(target, plan(fragments, group, FILES), fragments, engine.network.join, group).hashes


def _write_as_it_is(rank: int, world_size: int, case: Case, target: Path) -> dict[str, str]:
    engine = build(case, VOCAB)
    fragments, group = list(engine.fragments()), engine.groups.saving
    return write(target, plan(fragments, group, FILES), fragments, engine.network.join, group).hashes


def test_tensors_of_a_device_are_written_from_host_memory(pools: WorkerPools, tmp_path: Path) -> None:
    case, folders = Case(2, 2, 1, 1, "adam", "float32", "deepspeed"), (tmp_path / "a", tmp_path / "b")
    for path in folders:
        path.mkdir()
    assert pools(4).run(_write_from_elsewhere, case, folders[0]) == pools(4).run(_write_as_it_is, case, folders[1])
    assert content(folders[0]) == content(folders[1]) and len(content(folders[0])) > 12


def _saved(rank: int, world_size: int, run: Path) -> None:
    """A checkpoint in which no two elements are alike."""
    engine = build(ALONE, VOCAB)
    generator = torch.Generator().manual_seed(1)

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    shapes = {logical.name: logical.shape for logical, _ in engine.weights()}
    engine.load(lambda name: drawn(name, shapes[name]), lambda name: drawn(name, shapes[name.rpartition("/")[0]]))
    width = engine.network.config.hidden_size
    engine.load_caches(lambda name: drawn(name, (8, 40, width)), 40)
    save.save(run, 1, engine, {"cached_length": 40})


@pytest.fixture(scope="module")
def source(pools: WorkerPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    pools(1).run(_saved, run)
    return run / "checkpoints/step_00000001"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("move", [False, True], ids=["", "heads-moved"])
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_the_bytes_are_those_of_one_process(
    pools: WorkerPools, source: Path, tmp_path: Path, case: Case, move: bool
) -> None:
    alone, many = tmp_path / "alone", tmp_path / "many"
    alone.mkdir()
    many.mkdir()
    half = case.dtype == "bfloat16"
    one = Case(1, 1, 0, 1, "adam", case.dtype, "deepspeed") if half else ALONE
    pools(1).run(_write, one, source, alone, FILES, False)
    found = pools(case.world_size).run(_write, case, source, many, FILES, move)
    assert content(many) == content(alone)
    assert len(content(many)) > 12
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in content(many).items()}
    written = [name for hashed, _ in found for name in hashed]
    assert sorted(written) == sorted(hashes)  # every file by one rank
    assert {name: digest for hashed, _ in found for name, digest in hashed.items()} == hashes
    assert all(hashed for hashed, _ in found)  # and every rank has a file
    assert set(found[0][1].values()) == {1}


def test_files_are_full_and_read_back(pools: WorkerPools, source: Path, tmp_path: Path) -> None:
    pools(2).run(_write, Case(2, 1, 0, 1, "adam", "float32", "deepspeed"), source, tmp_path, FILES, False)
    for kind in ("weights", "optimizer", "caches"):
        before, after = TensorReader(source, kind), TensorReader(tmp_path, kind)
        assert before.names and sorted(before.names) == sorted(after.names)
        assert all(torch.equal(before.read(name), after.read(name)) for name in before.names)
    for path in tmp_path.glob("*.safetensors"):
        kind, number = path.stem.split("-")
        following = path.with_name(f"{kind}-{int(number) + 1:05d}.safetensors")
        tensors = TensorReader(tmp_path, kind)
        sizes = {name: info.num_bytes for name, info in tensors.infos.items()}
        own = [name for name in tensors.names if tensors._path_of[name] == path]
        assert sum(sizes[name] for name in own) <= FILES or len(own) == 1
        if following.exists():
            first = next(name for name in tensors.names if tensors._path_of[name] == following)
            assert sum(sizes[name] for name in own) + sizes[first] > FILES


def _write_with_no_number(rank: int, world_size: int, case: Case, target: Path, kind: str) -> tuple[str, str]:
    """With one element of what the last rank gives; what is found, and what a save says of it."""
    engine = build(case, VOCAB)
    fragments, group = list(engine.fragments()), engine.groups.saving
    if rank == world_size - 1:
        values = next(one.values for one in fragments if one.stored.kind == kind and one.values.numel())
        values.detach()[-1] = float("nan")
    with pytest.raises(NotFinite) as caught:
        save.write_step(target, 7, fragments, engine.network.join, {}, group)
    return str(caught.value), "".join(str(one) for one in sorted(target.rglob("*")))


@pytest.mark.parametrize("kind", ["weights", "optimizer"])
@pytest.mark.parametrize("case", LAYOUTS[:2], ids=str)
def test_what_is_not_finite_is_not_kept(pools: WorkerPools, tmp_path: Path, case: Case, kind: str) -> None:
    found = pools(case.world_size).run(_write_with_no_number, case, tmp_path, kind)
    assert len(set(found)) == 1  # on all ranks alike
    assert re.fullmatch(r"not finite: [^ ,]+\. Nothing was saved: .*", found[0][0])
    assert found[0][1] == str(tmp_path / "checkpoints")  # and is gone before any rank goes on


def _fail(rank: int, world_size: int, source: Path, target: Path) -> str:
    """The first file of the last rank is there already."""
    engine = build(Case(2, 1, 0, 1, "adam", "float32", "deepspeed"), VOCAB)
    save.load(source, engine, save.read_state(source)["cached_length"])
    fragments, group = list(engine.fragments()), engine.groups.saving
    turns = plan(fragments, group, FILES)
    (name,) = [file.name for file in turns[0] if file.writer == 1]
    if rank == 1:
        (target / name).touch()
    with pytest.raises((StorageError, PeerFailed)) as caught:
        write(target, turns, fragments, engine.network.join, group)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_file_that_cannot_be_written_ends_it_on_all_ranks(pools: WorkerPools, source: Path, tmp_path: Path) -> None:
    first, last = pools(2).run(_fail, source, tmp_path)
    assert first == "PeerFailed: rank 1 failed"
    assert last.startswith("StorageError: ") and "File exists" in last
