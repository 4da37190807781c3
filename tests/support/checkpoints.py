"""What tests read back from a checkpoint's files."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_allattn.checkpoint.tensors import DEFAULT_MAX_BYTES, TensorReader, info_of, write_files


def read_tensors(folder: Path, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor) of FOLDER/PREFIX-*.safetensors, in the order they lie on the disk."""
    reader = TensorReader(folder, prefix)
    for name in reader.names:
        yield name, reader.read(name)


def write_tensors_to(
    folder: Path, prefix: str, tensors: dict[str, Tensor], max_bytes: int = DEFAULT_MAX_BYTES
) -> dict[str, str]:
    """Write these tensors as a checkpoint has them; as `write_files`."""
    infos = [info_of(name, tensor) for name, tensor in tensors.items()]
    return write_files(folder, prefix, infos, tensors.__getitem__, max_bytes)
