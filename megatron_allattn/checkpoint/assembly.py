"""Tensor files of a checkpoint from what all ranks hold, written by many ranks at a time, every byte once.

Which tensors go into which file follows from the tensors alone: in their order, up to `max_bytes` a file. So the files
of a state are the same, to the byte, whatever layout it is saved from. Who writes a file does depend on it: files are
dealt to the ranks in order, and as ranks are numbered along the pipeline, a file's writer is often among the ranks that
hold its tensors. A writer takes its tensors one at a time: it receives the ranges that others hold, joins the shards,
writes, and goes on. All of that happens in host memory, whatever device the fragments are on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_allattn.checkpoint.header import TensorInfo
from megatron_allattn.checkpoint.tensors import DEFAULT_MAX_BYTES, DTYPE_NAMES, TensorWriter, cut, file_name
from megatron_allattn.engine.finite import is_finite
from megatron_allattn.engine.fragments import KINDS, Fragment, Join, Stored
from megatron_allattn.parallel.collectives import agree, gather_objects
from megatron_allattn.parallel.groups import Group


@dataclass(frozen=True)
class Range:
    """Elements [start, start + count) of a shard, which `rank`, a position in the group, holds."""

    rank: int
    shard: int
    start: int
    count: int


@dataclass(frozen=True)
class PlannedFile:
    """A file's tensors in their order, each with where its elements are. writer: a position in the group."""

    name: str
    tensors: list[tuple[Stored, list[Range]]]
    writer: int


@dataclass(frozen=True)
class Written:
    """What a rank has written: the SHA-256 of its files, by name, and the tensors in them that are not finite."""

    hashes: dict[str, str]
    not_finite: list[str]


def plan(fragments: Sequence[Fragment], group: Group, max_bytes: int = DEFAULT_MAX_BYTES) -> list[list[PlannedFile]]:
    """All files, in turns in which every rank writes one at most. Collective."""
    own = [(one.stored, one.shard, one.start, len(one.values)) for one in fragments]
    ranges: dict[Stored, list[Range]] = {}
    for rank, held in enumerate(gather_objects(own, group)):
        for stored, *where in held:
            ranges.setdefault(stored, []).append(Range(rank, *where))
    by_writer: list[list[PlannedFile]] = [[] for _ in range(group.size)]
    for kind in KINDS:
        tensors = sorted((stored for stored in ranges if stored.kind == kind), key=lambda stored: stored.order)
        parts = cut(tensors, lambda stored: describe(stored).num_bytes, max_bytes)
        for number, part in enumerate(parts):
            writer = number * group.size // len(parts)
            planned = [(stored, ranges[stored]) for stored in part]
            by_writer[writer].append(PlannedFile(file_name(kind, number + 1), planned, writer))
    return [[file for file in turn if file is not None] for turn in zip_longest(*by_writer)]


def describe(stored: Stored) -> TensorInfo:
    """What a file's header says of it."""
    return TensorInfo.of(stored.name, DTYPE_NAMES[stored.dtype], stored.logical.shape)


def write(
    folder: Path, turns: list[list[PlannedFile]], fragments: Sequence[Fragment], join: Join, group: Group
) -> Written:
    """Write the planned files into a folder that exists. Collective.

    join: of the placement of heads that the fragments have. Raises StorageError on the rank whose file cannot be
    written and PeerFailed on the others, at the end of the turn, in which nobody is left waiting.
    """
    own = {one.stored: one for one in fragments}
    not_finite: list[str] = []
    with TensorWriter() as writer:
        for turn in turns:
            not_finite += agree(partial(_write_turn, writer, folder, turn, own, join, group), group)
        return Written(agree(writer.finish, group), not_finite)


def _write_turn(
    writer: TensorWriter,
    folder: Path,
    turn: list[PlannedFile],
    own: dict[Stored, Fragment],
    join: Join,
    group: Group,
) -> list[str]:
    """One turn of `write`; the tensors written that are not finite."""
    sending = [
        dist.isend(own[stored].values.cpu(), dst=group.ranks[file.writer], group=group.handle)
        for file in turn
        if file.writer != group.rank
        for stored, ranges in file.tensors
        if any(one.rank == group.rank and one.count for one in ranges)
    ]
    try:
        mine = [_Tensors(file, own, join, group) for file in turn if file.writer == group.rank]
        for tensors in mine:
            _write_file(writer, folder / tensors.file.name, tensors)
        return [name for tensors in mine for name in tensors.not_finite]
    finally:
        _wait(sending)


def _write_file(writer: TensorWriter, path: Path, tensors: "_Tensors") -> None:
    try:
        writer.write(path, [describe(stored) for stored, _ in tensors.file.tensors], tensors, look=tensors.look)
    finally:
        tensors.exhaust()


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "a rank that is not in the group"
        work.wait()


class _Tensors:
    """A file's tensors, whole and in order, each made when it is asked for; `not_finite` names those that are not."""

    def __init__(self, file: PlannedFile, own: dict[Stored, Fragment], join: Join, group: Group) -> None:
        self.file, self._rest = file, iter(file.tensors)
        self._own, self._join, self._group = own, join, group
        self.not_finite: list[str] = []

    def __iter__(self) -> "_Tensors":
        return self

    def __next__(self) -> Tensor:
        stored, ranges = next(self._rest)
        shards = self._receive(stored, ranges)
        return shards[0] if len(shards) == 1 else self._join(stored.logical, shards).contiguous()

    def look(self, name: str, piece: Tensor) -> None:
        """At a piece of a tensor that is being written."""
        if name not in self.not_finite and not is_finite(piece):
            self.not_finite.append(name)

    def exhaust(self) -> None:
        """Receive what nobody wants any more, so that those who send it can go on."""
        for stored, ranges in self._rest:
            self._receive(stored, ranges)

    def _receive(self, stored: Stored, ranges: list[Range]) -> list[Tensor]:
        count = 1 + max(one.shard for one in ranges)
        shape = stored.logical.local_shape(count)
        size = prod(shape)
        assert sum(one.count for one in ranges) == size * count, f"{stored.name}: {ranges} of {shape}"
        own = {
            one.shard: self._own[stored].values.cpu()
            for one in ranges
            if one.count == size and one.rank == self._group.rank
        }
        shards = [own.get(shard, torch.empty(0, dtype=stored.dtype)) for shard in range(count)]
        waiting: list[dist.Work | None] = []
        for one in ranges:
            if one.shard in own:  # it is all here: no need to copy it
                continue
            if shards[one.shard].numel() == 0:
                shards[one.shard] = torch.empty(size, dtype=stored.dtype)
            into = shards[one.shard].narrow(0, one.start, one.count)
            if one.rank == self._group.rank:
                into.copy_(self._own[stored].values)
            elif one.count:
                waiting.append(dist.irecv(into, src=self._group.ranks[one.rank], group=self._group.handle))
        _wait(waiting)
        return [shard.view(shape) for shard in shards]
