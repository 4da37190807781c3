"""What tests read back from a checkpoint's files."""

from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_allattn.checkpoint.tensors import TensorReader


def read_tensors(folder: Path, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor) of FOLDER/PREFIX-*.safetensors, in the order they lie on the disk."""
    reader = TensorReader(folder, prefix)
    for name in reader.names:
        yield name, reader.read(name)
