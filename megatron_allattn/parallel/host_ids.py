"""Ids that have values beside tensors that have none: for networks whose shapes follow the data.

An adaptive vocabulary computes only the tokens that hit a cluster, so where tensors have no memory their ids must be on
the host. PyTorch has few operators for tensors of both kinds together; inside this mode each sees those of the host,
which are ids, places and masks, as without memory too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class HostIds(TorchDispatchMode):
    """Operators on tensors without memory (device meta) and of the host together work, without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        devices = {one.device.type for one in tree_leaves(given) if isinstance(one, Tensor)}
        if devices == {"cpu", "meta"}:
            given = tree_map(_without_memory, given)
        return func(*given[0], **given[1])


def _without_memory(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) and value.device.type == "cpu" else value
