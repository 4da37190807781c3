"""The manifest of a step folder: of every file its size and SHA-256. The marker holds the manifest's own.

It makes a checkpoint one thing: what it lists is there with the same bytes, or the checkpoint is damaged.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_allattn.checkpoint.files import check_sha256, check_size, describes_file, write_json_atomic
from megatron_allattn.checkpoint.run_folder import MARKER, step_of
from megatron_allattn.config.disk import sha256_of, sync_file
from megatron_allattn.config.errors import UsageError
from megatron_allattn.config.json_files import parse_json, read_bytes

FORMAT, VERSION = "megatron-allattn-checkpoint", 1
MANIFEST = "manifest.json"
Hashed = tuple[Path, str]
"""A file, and the SHA-256 that it is to have."""
Check = Callable[[Sequence[Hashed]], None]
_OTHER = "name another step"
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


def write_manifest(temporary: Path, step: int, hashes: Mapping[str, str]) -> str:
    """Write the manifest of a folder whose files are on the disk from then on; returns the manifest's SHA-256."""
    files = {}
    for name in sorted(hashes.keys() | {path.name for path in temporary.iterdir()}):
        path = temporary / name  # which another host may have written: a listing here may lack it, a look does not
        if name not in hashes:
            sync_file(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": hashes.get(name) or sha256_of(path)}
    write_json_atomic(temporary / MANIFEST, {"format": FORMAT, "version": VERSION, "step": step, "files": files})
    return sha256_of(temporary / MANIFEST)


def check_hashes(files: Sequence[Hashed]) -> None:
    """UsageError naming the first of these files that has another SHA-256, or cannot be read."""
    for path, expected in files:
        check_sha256(path, expected)


def check_sizes(folder: Path) -> dict[str, Any]:
    """The manifest of a step folder. Raises UsageError: a file is missing or has another size than it says."""
    manifest = _read_manifest(folder)
    for name, entry in manifest["files"].items():
        check_size(folder / name, entry["bytes"])
    return manifest


def verify(folder: Path, check: Check | None = check_hashes) -> dict[str, Any]:
    """Check every byte of a step folder against its manifest, which is returned; sizes alone without a `check`.

    Raises UsageError that names the file, what was expected and what was found: no or another marker, a file that is
    missing, has another size or SHA-256, or a tensor file that the manifest does not list.
    """
    manifest = check_sizes(folder)
    if check is not None:
        check([(folder / name, entry["sha256"]) for name, entry in manifest["files"].items()])
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest["files"]:
            raise UsageError(f"{path}: expected no such file (the manifest does not list it), found one")
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, whose own SHA-256 the marker holds. Raises UsageError."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such checkpoint folder")
    for name, why in ((MARKER, "its save did not end"), (MANIFEST, "it is not a whole checkpoint")):
        if not (folder / name).is_file():
            raise UsageError(f"{folder}: expected a file {name}, found none ({why})")
    content = read_bytes("file", folder / MANIFEST, _OTHER)
    marker = read_bytes("file", folder / MARKER, _OTHER, limit=1000)
    expected, found = marker.decode(errors="replace").strip(), hashlib.sha256(content).hexdigest()
    if expected != found:
        raise UsageError(f"{folder / MANIFEST}: damaged: expected SHA-256 {expected} (from {MARKER}), found {found}")
    manifest = parse_json("file", folder / MANIFEST, content, _OTHER)
    if not isinstance(manifest, dict) or (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        found = (
            f"{manifest.get('format')} version {manifest.get('version')}" if isinstance(manifest, dict) else "no object"
        )
        raise UsageError(f"{folder / MANIFEST}: expected {FORMAT} version {VERSION}, found {found}")
    if (step := step_of(folder)) >= 0 and manifest.get("step") != step:
        raise UsageError(
            f"{folder / MANIFEST}: expected step {step} (from the folder's name), found {manifest.get('step')}"
        )
    _check_entries(folder, manifest.get("files"))
    return manifest


def _check_entries(folder: Path, files: Any) -> None:
    """Plain names, each with a size and a hash: whoever wrote the manifest, nothing outside the folder is looked at."""
    if not isinstance(files, dict):
        raise UsageError(f"{folder / MANIFEST}: expected an object of files, found {type(files).__name__}")
    for name, entry in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise UsageError(f"{folder / MANIFEST}: expected names of files in this folder, found {name!r}")
        entry = entry if isinstance(entry, dict) else {}
        if not describes_file(entry):
            raise UsageError(f"{folder / MANIFEST}: expected bytes and sha256 of {name}, found {entry!r}")
