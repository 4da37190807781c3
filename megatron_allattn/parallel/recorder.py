"""Counts every message of a process, ours and DeepSpeed's, forward and backward.

    with Recorder(layout, rank) as recorder:
        ...
    recorder.ledger

Whoever sends them, they are operators of the library c10d, and a dispatch mode sees every operator. Autograd takes the
mode along to the threads on which backward runs on a GPU. Not seen are threads that a program starts itself, and the
few bytes that ranks leave in the store at which they have met (failures.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger

_OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "recv",
}


class Recorder(TorchDispatchMode):
    """Enters what happens inside its `with` into `ledger`. Raises NotImplementedError at an operator it cannot tell."""

    def __init__(self, layout: Layout, rank: int) -> None:
        super().__init__()
        self.ledger = Ledger(layout, rank)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._enter(func._schema.name.partition("::")[2], args)
        elif func.namespace.startswith("_c10d"):
            raise NotImplementedError(f"{func}: functional collectives are not counted")
        return func(*args, **(kwargs or {}))

    def _enter(self, name: str, args: Sequence[Any]) -> None:
        if name not in _OPERATIONS:
            raise NotImplementedError(f"c10d::{name} is not counted")
        operation = _OPERATIONS[name]
        # First come the tensors (what comes out before what goes in), then the group, then, of one message, its peer.
        place = next(index for index, arg in enumerate(args) if isinstance(arg, torch.ScriptObject))
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[place]))
        num_bytes = 0 if operation == "barrier" else max(_num_bytes(arg) for arg in args[:place])
        if operation in ("send", "recv"):
            self.ledger.add_between(ranks[args[place + 1]], operation, num_bytes)
        else:
            self.ledger.add_among(ranks, operation, num_bytes)


def _num_bytes(tensors: Any) -> int:
    """Of a tensor, or of lists of them."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_num_bytes(one) for one in tensors)
