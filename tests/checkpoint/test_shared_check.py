"""Hashes that all ranks share: each file once, none waits for all of them, and what only one host sees is no damage."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_allattn.checkpoint import folder, manifest, shared_check
from megatron_allattn.checkpoint.shared_check import with_shared_check
from megatron_allattn.config.disk import sha256_of
from megatron_allattn.config.errors import Unreadable, UsageError
from megatron_allattn.parallel.groups import Group
from tests.support.checkpoints import write_tensors_to
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of

NUM_FILES = 7  # three turns of three ranks, the last one of one file
Found = tuple[str | None, type[Exception] | None, list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        temporary = folder.begin(tmp_path, step)
        write_tensors_to(temporary, "weights", {f"w{index}": torch.ones(8) for index in range(NUM_FILES)}, max_bytes=32)
        folder.commit(temporary, step)
    assert len(list((tmp_path / "checkpoints/step_00000002").glob("*.safetensors"))) == NUM_FILES
    return tmp_path


def looked(rank: int, world_size: int, run: Path, fallback: bool, blind: int | None) -> Found:
    """The step found or the error, and which files this rank has hashed. blind: a rank that sees no file."""
    hashed: list[str] = []
    group = groups_of(world_size, 1).world

    def check(path: Path, expected: str) -> None:
        hashed.append(path.name)
        if rank == blind:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        original(path, expected)

    def find(check: manifest.Check) -> Path:
        return folder.find_latest(run, check=check, way_out=None if fallback else "ask")[0]

    original, shared_check.check_sha256 = shared_check.check_sha256, check
    try:
        found = with_shared_check(find, group)
        return (None if found is None else found.name), None, hashed
    except UsageError as error:
        return str(error), type(error), hashed
    finally:
        shared_check.check_sha256 = original


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_file_is_hashed_once(pools: WorkerPools, run: Path, world_size: int) -> None:
    found = pools(world_size).run(looked, run, False, None)
    assert [step for step, _, _ in found] == ["step_00000002", *[None] * (world_size - 1)]
    hashed = [names for _, _, names in found]
    every = sorted(path.name for path in (run / "checkpoints/step_00000002").glob("*.safetensors"))
    assert sorted(name for names in hashed for name in names) == every
    assert max(map(len, hashed)) - min(map(len, hashed)) <= 1


@pytest.mark.parametrize("number", range(1, NUM_FILES + 1))
def test_damage_is_told_by_the_first_rank_whoever_finds_it(pools: WorkerPools, run: Path, number: int) -> None:
    path = run / f"checkpoints/step_00000002/weights-{number:05d}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    expected = sha256_of(path)
    path.write_bytes(content)
    (told, kind, _), *others = pools(3).run(looked, run, False, None)
    assert kind is folder.Damaged and told is not None
    assert f"{path.name}: damaged: expected SHA-256 {expected}, found {sha256_of(path)}; ask" in told
    assert [(step, error) for step, error, _ in others] == [(None, None)] * 2
    assert pools(3).run(looked, run, True, None)[0][:2] == ("step_00000001", None)


def test_what_only_another_host_cannot_read_is_no_damage(pools: WorkerPools, run: Path) -> None:
    """Else a node without the file system would have a run fall back to an older step."""
    (told, kind, _), *_ = pools(3).run(looked, run, True, 2)
    assert kind is Unreadable and told is not None
    assert "weights-00003.safetensors: it is intact here, but rank 2 finds: " in told


def slow(rank: int, world_size: int, run: Path) -> str | None:
    """Files that take 1 s each, in a group whose ranks wait for each other for 2.5 s."""
    handle = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=2.5), backend="gloo")
    group = Group(tuple(range(world_size)), rank, handle)
    original = shared_check.check_sha256

    def check(path: Path, expected: str) -> None:
        time.sleep(1.0)
        original(path, expected)

    def find(check: manifest.Check) -> Path:
        return folder.find_latest(run, check=check)[0]

    shared_check.check_sha256 = check
    try:
        found = with_shared_check(find, group)
    finally:
        shared_check.check_sha256 = original
    return None if found is None else found.name


def test_nobody_waits_longer_than_a_file_takes(pools: WorkerPools, run: Path) -> None:
    assert pools(2).run(slow, run) == ["step_00000002", None]
