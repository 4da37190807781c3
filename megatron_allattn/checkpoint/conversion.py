"""Run folders made of tensors from elsewhere, and their way back: what every converted format has in common.

A converted checkpoint holds what one of ours does, with `"data": null` in its state.json: it has no place in our data,
and no caches. Training goes on from it with its optimizer's state at its step; a format that keeps that state keeps the
run's `Progress` too, so far as it can say it.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatron_allattn import __version__
from megatron_allattn.checkpoint import folder
from megatron_allattn.checkpoint.files import made_whole, write_json_atomic
from megatron_allattn.checkpoint.header import TensorInfo
from megatron_allattn.checkpoint.progress import Progress
from megatron_allattn.checkpoint.run_folder import CONFIG
from megatron_allattn.checkpoint.save import MODEL_FIELDS, check_plausible, read_config, read_state
from megatron_allattn.checkpoint.tensors import DTYPE_NAMES, TensorReader, info_of, write_files
from megatron_allattn.config import RunConfig, UsageError


@dataclass(frozen=True)
class Tensors:
    """What tensors there are, in their order, and how one is read."""

    infos: list[TensorInfo]
    read: Callable[[str], Tensor]

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Self:
        """Tensors that are in memory."""
        return cls([info_of(name, tensor) for name, tensor in tensors.items()], tensors.__getitem__)


@dataclass(frozen=True)
class SavedRun:
    """A step folder that is intact. skipped: entries passed over on the way to it, with the reasons."""

    step_folder: Path
    run: RunConfig
    state: dict[str, Any]
    weights: TensorReader
    optimizer: TensorReader
    skipped: list[str]

    @property
    def progress(self) -> Progress:
        """Where its training stands. Raises UsageError."""
        return Progress.of(self.step_folder / "state.json", self.state, self.state["step"], self.run)


def read_run(path: Path) -> SavedRun:
    """Open a run folder's newest step, or one step folder, whose every byte is right. Raises UsageError."""
    step_folder, skipped = folder.find(path)
    with folder.told_if_gone(step_folder):
        state = read_state(step_folder, MODEL_FIELDS)
        run = read_config(step_folder, state)
        weights, optimizer = (TensorReader(step_folder, prefix, finite=True) for prefix in ("weights", "optimizer"))
        check_plausible(step_folder / "state.json", run.model, len(weights.infos), weights.num_bytes)
    return SavedRun(step_folder, run, state, weights, optimizer, skipped)


def converted_state(
    run: RunConfig,
    progress: Progress,
    vocab_size: int,
    tokenizer: dict[str, Any],
    fingerprint: str,
    source: dict[str, Any],
) -> dict[str, Any]:
    """state.json of a converted checkpoint, but for its step.

    tokenizer, fingerprint: as JSON, and its SHA-256 · source: where it comes from, in its format's own terms.
    """
    return {
        **progress.to_dict(),
        "config": run.to_dict(),
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "tokenizer_sha256": fingerprint,
        "data_sha256": None,
        "data": None,
        "cached_length": 0,
        "versions": {
            "megatron_allattn": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "source": source,
    }


def write_run(
    source: Path, output: Path, run: RunConfig, step: int, state: dict[str, Any], weights: Tensors, optimizer: Tensors
) -> None:
    """Make the run folder `output` with one checkpoint. It has its name only once it is complete and on the disk.

    source: where the tensors are from, for errors; those in half precision become float32.

    Raises UsageError: `output` exists, or a tensor has something other than finite numbers in floating point, which no
    run saves; StorageError: it cannot be written, and then nothing is left of it.
    """
    with made_whole(output) as temporary:
        step_folder = folder.begin(temporary, step)
        hashes: dict[str, str] = {}
        for prefix, tensors in (("weights", weights), ("optimizer", optimizer)):
            infos = [_as_master(info) for info in tensors.infos]
            hashes |= write_files(step_folder, prefix, infos, partial(_read_finite, source, tensors))
        write_json_atomic(step_folder / "state.json", {"step": step, **state})
        folder.commit(step_folder, step, hashes=hashes)
        write_json_atomic(temporary / CONFIG, run.to_dict())


_HALF = ("BF16", "F16")


def _as_master(info: TensorInfo) -> TensorInfo:
    """What a run has of a tensor: half precision becomes float32, which holds every number of it."""
    return TensorInfo.of(info.name, "F32", info.shape) if info.dtype in _HALF else info


def _read_finite(source: Path, tensors: Tensors, name: str) -> Tensor:
    tensor = tensors.read(name)
    fix = "convert what has finite numbers in floating point alone"
    if not tensor.is_floating_point():
        raise UsageError(f"{source}: tensor {name} is of type {tensor.dtype}, which no run has; {fix}")
    if count := int((~tensor.isfinite()).sum()):
        raise UsageError(f"{source}: tensor {name}: {count:,} numbers are not finite; {fix}")
    return tensor.float() if DTYPE_NAMES[tensor.dtype] in _HALF else tensor
