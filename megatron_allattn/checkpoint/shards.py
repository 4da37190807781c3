"""A run's checkpoint as one folder for every rank of a TP × PP grid, as Megatron-LM lays them out.

    OUT/layout.json                        the `Description`, the grid, and of every tensor: its shape, the dimension
                                           that tensor parallelism cuts (null: every rank has all of it), its stages;
                                           size and SHA-256 of every other file
    OUT/mp_rank_00_001/model.safetensors   what the first shard's second stage holds; mp_rank_00/ without a pipeline
    OUT/mp_rank_00_001/optimizer.safetensors   and, by WEIGHT/STATE, of the optimizer's state

A cut dimension that the grid does not divide (a vocabulary) is padded with zeros; heads are in their order. What is on
several ranks must be the same on all of them to be read, and every byte of a file what was written.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_allattn.checkpoint.conversion import SavedRun, Tensors, write_run
from megatron_allattn.checkpoint.described import Description
from megatron_allattn.checkpoint.files import (
    check_sha256,
    check_size,
    describes_file,
    made_whole,
    num_bytes_under,
    storage_errors,
    write_json_atomic,
)
from megatron_allattn.checkpoint.header import TensorInfo
from megatron_allattn.checkpoint.progress import Progress
from megatron_allattn.checkpoint.save import check_plausible
from megatron_allattn.checkpoint.tensors import TensorReader, same_bits, write_tensors
from megatron_allattn.config import ParallelConfig, UsageError, usage_error
from megatron_allattn.config.json_files import MAX_STATE_BYTES, read_json_object
from megatron_allattn.config.rules import check_shards
from megatron_allattn.model.network import logical_tensors
from megatron_allattn.model.partition import first_reach, stage_parts
from megatron_allattn.parallel.logical import LogicalTensor

FORMAT, LAYOUT = "shards", "layout.json"
FILES = ("model", "optimizer")
_GIVE = "give a folder that was made here"


@dataclass(frozen=True)
class Grid:
    """tensor: ranks that share heads; stages_of: by a tensor's name, the stages that hold it."""

    tensor: int
    pipeline: int
    stages_of: dict[str, tuple[int, ...]]

    def folder(self, rank: int, stage: int) -> str:
        """A rank's folder, by Megatron-LM's name for it."""
        return f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if self.pipeline > 1 else "")


def write(saved: SavedRun, output: Path, parallel: ParallelConfig) -> Grid:
    """Make the folder, one tensor in memory at a time. Raises UsageError, StorageError.

    parallel: the grid, and how layers are dealt to stages.
    """
    check_shards(saved.run.model, parallel.tensor_model_parallel_size)
    vocab_size = saved.state["vocab_size"]
    logical = {one.name: one for one in logical_tensors(saved.run.model, vocab_size)}
    grid, files = _grid(saved, parallel, list(logical)), dict[str, dict[str, Any]]()
    with made_whole(output) as temporary:
        for rank in range(grid.tensor):
            for stage in range(grid.pipeline):
                folder = temporary / grid.folder(rank, stage)
                with storage_errors(folder, 0):
                    folder.mkdir(parents=True, exist_ok=True)
                own = [one for one in logical.values() if stage in grid.stages_of[one.name]]
                for path, digest in _write_rank(folder, saved, own, rank, grid.tensor):
                    files[f"{folder.name}/{path.name}"] = {"bytes": path.stat().st_size, "sha256": digest}
        described = {
            name: {"shape": one.shape, "cut": one.shard_dim, "stages": grid.stages_of[name]}
            for name, one in logical.items()
        }
        sizes = {"tensor_model_parallel_size": grid.tensor, "pipeline_model_parallel_size": grid.pipeline}
        content = {"description": Description.of(saved).to_dict(), **sizes, "tensors": described, "files": files}
        write_json_atomic(temporary / LAYOUT, content)
        _compare(saved, _Shards(temporary))
    return grid


def _grid(saved: SavedRun, parallel: ParallelConfig, names: list[str]) -> Grid:
    """Which stages hold what: layers as they are dealt, the embedding with the first, the output with the last, the
    position table with all, and a table that embedding and output share with both ends."""
    model = saved.run.model
    try:
        parts = stage_parts(
            parallel, model, saved.state["vocab_size"], first_reach(model), saved.run.training.seq_length
        )
    except ValueError as error:
        rule = str(error)
        size = parallel.pipeline_model_parallel_size
        raise usage_error("--pipeline-model-parallel-size", size, rule, "lower it") from error
    last, tied = len(parts) - 1, not model.untie_embeddings_and_output_weights

    def stages(name: str) -> tuple[int, ...]:
        kind, _, rest = name.partition(".")
        if kind == "layers":
            layer = int(rest.partition(".")[0])
            return (next(stage for stage, part in enumerate(parts) if layer in part.layers),)
        if kind == "position":
            return tuple(range(len(parts)))
        if kind == "embedding":
            return tuple(sorted({0, last})) if tied else (0,)
        return (last,)

    return Grid(parallel.tensor_model_parallel_size, len(parts), {name: stages(name) for name in names})


def _write_rank(
    folder: Path, saved: SavedRun, own: list[LogicalTensor], rank: int, parts: int
) -> Iterator[tuple[Path, str]]:
    """The two files of a rank, each with its SHA-256."""
    by_weight: dict[str, list[str]] = {}
    for name in saved.optimizer.names:
        by_weight.setdefault(name.rpartition("/")[0], []).append(name)
    for file, reader, names in (
        ("model", saved.weights, {one.name: one for one in own}),
        ("optimizer", saved.optimizer, {name: one for one in own for name in by_weight.get(one.name, [])}),
    ):
        if not names:
            continue
        infos = [TensorInfo.of(name, reader.infos[name].dtype, one.local_shape(parts)) for name, one in names.items()]
        shards = (one.shard(reader.read(name), rank, parts).contiguous() for name, one in names.items())
        path = folder / f"{file}.safetensors"
        yield path, write_tensors(path, infos, shards)


class _Shards:
    """A folder's tensors, whole. Raises UsageError: it is not what `write` makes."""

    def __init__(self, folder: Path) -> None:
        self._folder, path = folder, folder / LAYOUT
        content = read_json_object("file", path, _GIVE, MAX_STATE_BYTES)
        self.description = Description.from_dict(path, content.get("description"))
        tensors = content.get("tensors")
        num_tensors = len(tensors) if isinstance(tensors, dict) else 0
        check_plausible(path, self.description.run.model, num_tensors, num_bytes_under(folder))
        self.logical = {
            one.name: one for one in logical_tensors(self.description.run.model, self.description.vocab_size)
        }
        self.grid = self._read_grid(path, content)
        self._files = self._read_files(path, content)
        self._readers: dict[tuple[str, int, int], TensorReader] = {}

    def _read_grid(self, path: Path, content: dict[str, Any]) -> Grid:
        sizes: list[Any] = [content.get(f"{name}_model_parallel_size") for name in ("tensor", "pipeline")]
        tensors = content.get("tensors")
        if not all(type(size) is int and 1 <= size <= 4096 for size in sizes) or not isinstance(tensors, dict):
            raise usage_error("file", path, "has no grid or no tensors", _GIVE)
        for name in sorted(self.logical.keys() ^ tensors.keys()):
            raise usage_error("file", path, f"tensor {name} is in one of the list and the model alone", _GIVE)
        stages = {}
        for name, entry in tensors.items():
            held = entry.get("stages") if isinstance(entry, dict) else None
            if not isinstance(held, list) or not held or not all(type(s) is int and 0 <= s < sizes[1] for s in held):
                raise usage_error("file", path, f"tensor {name} has stages {held!r}", _GIVE)
            stages[name] = tuple(held)
        return Grid(sizes[0], sizes[1], stages)

    def _read_files(self, path: Path, content: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of every file of a rank, by FOLDER/FILE; of no other file, whoever wrote the list."""
        files = content.get("files")
        if not isinstance(files, dict):
            rule = "has no hashes of its files: an earlier version made it"
            raise usage_error("file", path, rule, "convert the run once more, with this version")
        folders = [
            self.grid.folder(rank, stage) for rank in range(self.grid.tensor) for stage in range(self.grid.pipeline)
        ]
        for name in sorted(files.keys() - {f"{one}/{file}.safetensors" for one in folders for file in FILES}):
            raise usage_error("file", path, f"lists {name!r:.80}, which is no file of a rank", _GIVE)
        for name, entry in files.items():
            if not isinstance(entry, dict) or not describes_file(entry):
                raise usage_error("file", path, f"has {entry!r:.80} for {name}, expected bytes and sha256", _GIVE)
        return files

    @property
    def states(self) -> list[str]:
        """Names of the optimizer's states, as WEIGHT/STATE, in the order of the weights; empty where there are none."""
        first = next(iter(self.logical))
        reader = self._reader("optimizer", 0, self.grid.stages_of[first][0])
        kinds = sorted(
            name.rpartition("/")[2] for name in (reader.names if reader else []) if name.startswith(f"{first}/")
        )
        return [f"{weight}/{kind}" for weight in self.logical for kind in kinds]

    def _reader(self, file: str, rank: int, stage: int) -> TensorReader | None:
        name = f"{self.grid.folder(rank, stage)}/{file}.safetensors"
        if name not in self._files:
            return None
        key = (file, rank, stage)
        if key not in self._readers:
            path, expected = self._folder / name, self._files[name]
            check_size(path, expected["bytes"])
            check_sha256(path, expected["sha256"])
            self._readers[key] = TensorReader.of_files(path)
        return self._readers[key]

    def weight(self, name: str) -> Tensor:
        """A weight, whole."""
        return self._whole("model", name, self.logical[name])

    def state(self, name: str) -> Tensor:
        """A piece of the optimizer's state, whole."""
        return self._whole("optimizer", name, self.logical[name.rpartition("/")[0]])

    def info(self, name: str, state: str | None = None) -> TensorInfo:
        """What `weight`, or `state`, gives."""
        file, full = ("model", name) if state is None else ("optimizer", f"{name}/{state}")
        reader = self._checked(file, full, 0, self.grid.stages_of[name][0], self.logical[name])
        return TensorInfo.of(full, reader.infos[full].dtype, self.logical[name].shape)

    def _whole(self, file: str, name: str, logical: LogicalTensor) -> Tensor:
        first, *others = (
            [self._checked(file, name, rank, stage, logical).read(name) for rank in range(self.grid.tensor)]
            for stage in self.grid.stages_of[logical.name]
        )
        same = [*others, *([[one] for one in first[1:]] if logical.shard_dim is None else [])]
        for copy in same:
            if not all(same_bits(one, other) for one, other in zip(first, copy, strict=False)):
                raise UsageError(f"{self._folder}: tensor {name} is not the same on all ranks that hold it; {_GIVE}")
        return logical.join(first).contiguous()

    def _checked(self, file: str, name: str, rank: int, stage: int, logical: LogicalTensor) -> TensorReader:
        """The reader of a rank's file, in which there is such a tensor of the right shape."""
        folder = self._folder / self.grid.folder(rank, stage)
        reader = self._reader(file, rank, stage)
        if reader is None:
            raise usage_error("file", self._folder / LAYOUT, f"lists no {folder.name}/{file}.safetensors", _GIVE)
        found, expected = reader.infos.get(name), logical.local_shape(self.grid.tensor)
        if found is None or found.shape != expected:
            shape = "none" if found is None else found.shape
            raise UsageError(
                f"{folder / file}.safetensors: tensor {name} has shape {shape}, expected {expected}; {_GIVE}"
            )
        return reader


def describe(source: Path) -> Description:
    """What such a folder says of itself; of its tensors nothing is read. Raises UsageError: it is none."""
    return _Shards(source).description


def read(source: Path, output: Path) -> Description:
    """Make the run folder `output` of such a folder. Raises UsageError, StorageError."""
    shards = _Shards(source)
    found, states = shards.description, shards.states
    step, progress = (found.step, found.progress) if states else (0, Progress())
    weights = Tensors([shards.info(name) for name in shards.logical], shards.weight)
    optimizer = Tensors([shards.info(*name.rsplit("/", 1)) for name in states], shards.state)
    state = found.state(progress, {"format": FORMAT, "step": found.step})
    write_run(source, output, found.run, step, state, weights, optimizer)
    return found


def _compare(saved: SavedRun, shards: _Shards) -> None:
    """Read back what was written: joined, the same tensors. Raises UsageError, which names the first that is not."""
    pairs: list[tuple[list[str], TensorReader, Callable[[str], Tensor]]] = [
        (list(shards.logical), saved.weights, shards.weight),
        (shards.states, saved.optimizer, shards.state),
    ]
    for names, original, joined in pairs:
        if sorted(names) != sorted(original.names):
            raise UsageError(f"{len(names)} tensors were written, {len(original.names)} are there; nothing is kept")
        for name in names:
            if not same_bits(joined(name), original.read(name)):
                raise UsageError(f"tensor {name}: is not what was written; look at the disk, nothing is kept")
