"""Whether replicas still hold the same weights.

A weight that several ranks hold is the same on all of them as long as every update is: over the replicas, over the
tensor group where it is not cut, over the stages of a pipeline that share it. A wrong collective, a defective memory or
processor, or a library that differs between hosts ends that in silence, and days later the run. So it is looked at
before a checkpoint is written.
"""

import hashlib

import torch
from torch import Tensor

from megatron_allattn.engine.interface import Engine
from megatron_allattn.parallel.collectives import agree, gather_objects
from megatron_allattn.parallel.verdict import name_ranks

SHOWN = 5  # weights in a message
ROW = 1021
"""Odd, so that a change of the same bit in all elements of a row does not cancel."""


class Drift(RuntimeError):
    """Replicas differ."""


def check_replicas(engine: Engine) -> None:
    """Compare a digest of every weight over the ranks that hold the same. Collective.

    Raises Drift on the first rank (PeerFailed on the others): it names weights, the ranks that differ from most of
    those that hold them, and how many do; where no version is that of most, the ranks of each.
    """
    if engine.groups.world.size == 1:  # nobody to compare with
        return
    own = {key: _digest(tensor) for key, tensor in engine.held()}
    held: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    for rank, digests in enumerate(gather_objects(own, engine.groups.world)):
        for key, digest in digests.items():
            held.setdefault(key, []).append((rank, digest))
    found = []
    for (name, part), copies in sorted(held.items()):
        versions: dict[bytes, list[int]] = {}
        for rank, digest in copies:
            versions.setdefault(digest, []).append(rank)
        if len(versions) > 1:
            found.append(f"{name}{part} {_apart(list(versions.values()))}")
    agree(lambda: _refuse(found), engine.groups.world)


def _apart(versions: list[list[int]]) -> str:
    """Which ranks differ, of lists of those that are the same."""
    most, *others = sorted(versions, key=len, reverse=True)
    differ = [rank for version in others for rank in version]
    if len(most) > len(differ):
        return f"on {name_ranks(differ)} of {len(most) + len(differ)} that hold it"
    return f"on {', another on '.join(map(name_ranks, sorted(versions)))}, and it is not known which is right"


def _refuse(found: list[str]) -> None:
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise Drift(
            f"{len(found)} of the weights are no longer the same on all ranks that hold them: "
            f"{'; '.join(found[:SHOWN])}{more}. "
            "Nothing was saved: go on from the last checkpoint, after a look at those ranks' hosts"
        )


def _digest(tensor: Tensor) -> bytes:
    """Of a tensor's bits: of every ROW elements their exclusive or, found where the tensor is, and of those a hash.

    What leaves the exclusive or of a row as it is, such as two of its elements that have changed places, is not seen.
    """
    flat = tensor.detach().contiguous().view(-1)
    whole = len(flat) // ROW * ROW
    rows = torch.hash_tensor(flat[:whole].view(-1, ROW), dim=1).view(torch.uint8)
    rest = flat[whole:].view(torch.uint8)
    return hashlib.sha256(torch.cat([rows, rest]).cpu().numpy().data).digest()[:16]
