"""Which attention backend a model gets: kernels/registry.py chooses, and knows no configuration."""

import torch

from megatron_allattn.config import ModelConfig, UsageError
from megatron_allattn.kernels.registry import AttentionBackend, choose_backend


def backend_of(model: ModelConfig, choice: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """`choose_backend` for `--attention-backend CHOICE`. Raises UsageError where it does not exist or cannot run."""
    try:
        return choose_backend(choice, device, dtype, model.head_size, model.span_normalization)
    except ValueError as error:
        raise UsageError(str(error)) from error
