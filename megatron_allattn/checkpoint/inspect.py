"""What a checkpoint holds and whether it is intact, without loading a tensor (and without torch)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_allattn.checkpoint.compare import differences, not_finite, places, state_differences
from megatron_allattn.checkpoint.folder import Damaged, Gone, find_latest, told_if_gone
from megatron_allattn.checkpoint.header import TensorInfo, read_header
from megatron_allattn.checkpoint.manifest import MANIFEST, check_hashes, verify
from megatron_allattn.checkpoint.run_folder import FOLDER, MARKER, STEP_NAME, run_around
from megatron_allattn.config.errors import Unreadable, UsageError
from megatron_allattn.config.json_files import MAX_STATE_BYTES, read_json_object

STATE = "state.json"


@dataclass(frozen=True)
class Inspection:
    """A step folder: its state.json (empty when unreadable), the tensors of every file, and what is wrong with it."""

    folder: Path
    skipped: list[str]  # entries passed over on the way from the run folder to this step folder, with reasons
    state: dict[str, Any]
    tensors: dict[str, list[TensorInfo]]  # by file name
    problems: list[str]
    verified: bool  # whether every byte was looked at, or sizes alone

    @property
    def intact(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able values."""
        return {
            "folder": str(self.folder),
            "intact": self.intact,
            "verified": self.verified,
            "problems": self.problems,
            "skipped": self.skipped,
            "state": self.state,
            "tensors": [
                {
                    "file": file,
                    "name": info.name,
                    "dtype": info.dtype,
                    "shape": list(info.shape),
                    "bytes": info.num_bytes,
                }
                for file, infos in self.tensors.items()
                for info in infos
            ],
        }

    def to_text(self) -> str:
        """A page for a terminal: the state, a table of the tensors per file, totals, and the verdict last."""
        lines = [f"checkpoint {self.folder}", *(f"passed over {line}" for line in self.skipped)]
        for key, value in self.state.items():
            lines += _describe(key, value, indent="")
        for file, infos in self.tensors.items():
            lines.append(f"{file}: {len(infos)} tensors, {sum(info.num_bytes for info in infos):,} bytes")
            for info in infos:
                lines.append(f"  {info.name:<48} {info.dtype:<5} {list(info.shape)!s:<20} {info.num_bytes:>15,}")
        every = [info for infos in self.tensors.values() for info in infos]
        lines.append(f"total: {len(every)} tensors, {sum(info.num_bytes for info in every):,} bytes")
        sound = "intact: every file matches the manifest, every number is finite"
        sizes = "intact as far as sizes tell; --verify compares every byte and looks at every number"
        lines += [f"damaged: {problem}" for problem in self.problems] or [sound if self.verified else sizes]
        return "\n".join(lines)


def inspect(path: Path, *, every_byte: bool = False) -> Inspection:
    """Inspect a step folder, or the newest complete step of a run folder.

    every_byte: compare hashes, and look for numbers that are not finite; else sizes alone. Raises UsageError when
    `path` is neither, and Gone when its run deletes the step folder meanwhile; damage is not an error but part of what
    is returned.
    """
    if (path / FOLDER).is_dir():
        skipped: list[str] = []
        try:
            newest, skipped = find_latest(path, way_out="name a step folder to look at an older one")
        except Damaged as damage:
            if damage.folder.is_symlink() or not damage.folder.is_dir():
                raise
            newest = damage.folder
        try:
            return _look(newest, skipped, every_byte=every_byte)
        except Gone:  # then there is a newer one
            return inspect(path, every_byte=every_byte)
    own = (MANIFEST, MARKER, STATE)  # of what is left of a step folder
    if not path.is_dir() or not (STEP_NAME.fullmatch(path.name) or any((path / name).exists() for name in own)):
        run = run_around(path)
        fix = "name one, e.g. RUN/checkpoints/step_00000100" if run is None else f"name the run folder {run}"
        raise UsageError(f"{path}: neither a run folder nor a step folder; {fix}")
    return _look(path, [], every_byte=every_byte)


def _look(path: Path, skipped: list[str], *, every_byte: bool) -> Inspection:
    """Inspect a step folder that was there. Raises Gone."""
    with told_if_gone(path):
        found = _inspect_step(path, skipped, every_byte=every_byte)
        if found.problems and not path.is_dir():
            raise UsageError(found.problems[0])
        return found


def _inspect_step(path: Path, skipped: list[str], *, every_byte: bool) -> Inspection:
    problems: list[str] = []
    try:
        verify(path, check_hashes if every_byte else None)
    except Unreadable:
        raise
    except UsageError as error:
        problems.append(str(error))
    tensors: dict[str, list[TensorInfo]] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            tensors[file.name] = read_header(file)
        except UsageError as error:
            problems.append(str(error))
    if every_byte and not problems:
        for name, place in places(tensors, path).items():
            if count := not_finite(place):
                problems.append(f"{place.path}: {name}: {count:,} numbers are not finite")
    state = _read_state(path, problems)
    return Inspection(
        folder=path, skipped=skipped, state=state, tensors=tensors, problems=problems, verified=every_byte
    )


def difference(one: Inspection, other: Inspection) -> list[str]:
    """What differs between two checkpoints, a line each; tensors first. Raises Gone: a step folder was deleted."""
    with told_if_gone(one.folder), told_if_gone(other.folder):
        tensors = differences(places(one.tensors, one.folder), places(other.tensors, other.folder))
    return tensors + [f"state: {line}" for line in state_differences(one.state, other.state)]


def _read_state(folder: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_json_object("file", folder / STATE, "look at an older step", MAX_STATE_BYTES)
    except UsageError as error:
        problems.append(str(error).removeprefix("file "))
    return {}


def _describe(key: str, value: Any, indent: str) -> list[str]:
    """`key: value` lines; a dictionary becomes an indented block, a long list its length."""
    if isinstance(value, dict) and value:
        inner = [line for name, entry in value.items() for line in _describe(name, entry, indent + "  ")]
        return [f"{indent}{key}:", *inner]
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list) and len(text) > 80:
        text = f"a list of {len(value)}"
    return [f"{indent}{key}: {text}"]
