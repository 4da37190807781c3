"""A model's weights in one safetensors file, with what is needed to use them in its header.

Everything that reads safetensors reads the tensors, by our logical names; `__metadata__` has two texts more:
`megatron_allattn`, the `Description` as JSON, and `megatron_allattn_sha256`, of that text and the values after it. The
optimizer's state is not in it: a run that begins from such a file begins at step 0.
"""

import hashlib
import json
from pathlib import Path

import torch

from megatron_allattn.checkpoint.conversion import SavedRun, Tensors, write_run
from megatron_allattn.checkpoint.described import Description
from megatron_allattn.checkpoint.files import made_whole
from megatron_allattn.checkpoint.header import read_metadata
from megatron_allattn.checkpoint.progress import Progress
from megatron_allattn.checkpoint.save import check_weights
from megatron_allattn.checkpoint.tensors import TensorReader, same_bits, write_tensors
from megatron_allattn.config import UsageError, usage_error

FORMAT = "safetensors"
KEY = "megatron_allattn"
KEY_SHA256 = f"{KEY}_sha256"


def write(saved: SavedRun, output: Path) -> str:
    """Make the file, one tensor in memory at a time; its SHA-256. Raises UsageError, StorageError."""
    infos = list(saved.weights.infos.values())
    text = json.dumps(Description.of(saved).to_dict())
    metadata = {"format": "pt", KEY: text, KEY_SHA256: _sha256(text, saved.weights)}
    with made_whole(output) as temporary:
        digest = write_tensors(temporary, infos, (saved.weights.read(info.name) for info in infos), metadata)
        check_copy(saved.weights, TensorReader.of_files(temporary))
    return digest


def read(source: Path, output: Path) -> Description:
    """Make the run folder `output` of such a file. Raises UsageError, StorageError."""
    weights = TensorReader.of_files(source)
    metadata = read_metadata(source)
    found = Description.from_text(source, text := metadata.get(KEY))
    check_weights(source, weights, found.run.model, found.vocab_size)
    _check_sha256(source, metadata.get(KEY_SHA256), _sha256(text or "", weights))
    state = found.state(Progress(), {"format": FORMAT, "step": found.step})
    write_run(source, output, found.run, 0, state, Tensors(list(weights.infos.values()), weights.read), Tensors.of({}))
    return found


def _sha256(text: str, weights: TensorReader) -> str:
    """Of a description and, in the order of the file, of all values."""
    digest = hashlib.sha256(text.encode())
    for name in weights.names:
        digest.update(weights.read(name).reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_sha256(source: Path, expected: str | None, found: str) -> None:
    if expected is None:
        rule = "has no hash of its values: an earlier version made it"
        raise usage_error("file", source, rule, "convert the run once more, with this version")
    if found != expected:
        raise UsageError(f"{source}: damaged: expected SHA-256 {expected} of description and values, found {found}")


def check_copy(original: TensorReader, copy: TensorReader) -> None:
    """Read back what was written: the same tensors, with the same bits. Raises UsageError, which names the first."""
    if (missing := sorted(original.infos.keys() ^ copy.infos.keys())) != []:
        raise UsageError(f"tensor {missing[0]}: is in one of original and copy alone; the copy is not kept")
    for name in original.names:
        if not same_bits(original.read(name), copy.read(name)):
            raise UsageError(f"tensor {name}: is not what was written; look at the disk, the copy is not kept")
