"""Whether replicas still hold the same weights.

A weight that several ranks hold is the same on all of them as long as every update is: over the replicas, over the
tensor group where it is not cut, over the stages of a pipeline that share it. A wrong collective, a defective memory or
processor, or a library that differs between hosts ends that in silence, and days later the run. So it is looked at
before a checkpoint is written.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_allattn.engine.interface import Engine
from megatron_allattn.parallel.collectives import agree, gather_objects

SHOWN = 5  # names and ranks in a message


class Drift(RuntimeError):
    """Replicas differ."""


def check_replicas(engine: Engine) -> None:
    """Compare every weight's hash over the ranks that hold the same. Collective.

    Raises Drift on the first rank (PeerFailed on the others): it names weights, the ranks that differ from most of
    those that hold them, and how many do.
    """
    own = {key: _digest(tensor) for key, tensor in engine.held()}
    held: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    for rank, digests in enumerate(gather_objects(own, engine.groups.world)):
        for key, digest in digests.items():
            held.setdefault(key, []).append((rank, digest))
    found = []
    for (name, part), copies in sorted(held.items()):
        (common, _), *others = Counter(digest for _, digest in copies).most_common()
        if others:
            ranks = _some(rank for rank, digest in copies if digest != common)
            found.append(f"{name}{part} on rank {ranks} of {len(copies)} that hold it")
    agree(lambda: _refuse(found), engine.groups.world, lambda _: 1)


def _refuse(found: list[str]) -> None:
    if found:
        raise Drift(
            f"{len(found)} of the weights are no longer the same on all ranks that hold them: {_some(found, '; ')}. "
            "Nothing was saved: go on from the last checkpoint, after a look at those ranks' hosts"
        )


def _digest(tensor: Tensor) -> bytes:
    """Of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data).digest()[:16]


def _some(things: Iterable[object], separator: str = ", ") -> str:
    every = [str(thing) for thing in things]
    more = f"{separator}and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return separator.join(every[:SHOWN]) + more
