"""Scratch memory that is reused from tile to tile and from layer to layer.

Fresh memory of this size comes from the operating system page by page, and tiles that move through memory leave the
cache; both cost more than the arithmetic on them.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class Workspace:
    """Named buffers that only grow. A buffer's content is lost at the next `take` of its name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """What all buffers hold."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of this shape with any content."""
        key, size = (name, dtype, device), prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            self._buffers.pop(key, None)
            with torch.inference_mode(False):  # what is made under it could not be written to outside of it
                buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(tuple(shape))

    def zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `take`, filled with zeros."""
        return self.take(name, shape, dtype, device).zero_()
