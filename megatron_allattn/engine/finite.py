"""The end of a run whose gradient is not finite: which rank had it first, and in which tensors.

That it is not, the norm of all gradients says, which every rank knows. By then gradients are sums over the replicas,
which hide whose it was; hence every rank keeps the largest element of what its own backward pass has given.
"""

import math
from functools import partial

import torch
from torch import Tensor

from megatron_allattn.model.network import Network
from megatron_allattn.parallel.collectives import agree, gather_objects
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.verdict import name_ranks, place

SHOWN = 3  # tensors in a message


class NotFinite(RuntimeError):
    """A gradient is not finite; the message says where."""

    exit_code = 4


class GradientWatch:
    """The largest element, by absolute value, of every gradient of this rank's own micro-batches of a step.

    Taken before any sum over ranks, and read by the host only once something is wrong: one more pass over gradients.
    """

    def __init__(self, network: Network) -> None:
        self._largest: dict[str, Tensor] = {}
        for logical, parameter in network.logical_parameters():
            parameter.register_hook(partial(self._see, logical.name))

    def _see(self, name: str, gradient: Tensor) -> None:
        largest = torch.linalg.vector_norm(gradient, math.inf)  # of one that is not a number, not a number
        self._largest[name] = largest.maximum(self._largest.get(name, largest))

    def clear(self) -> None:
        """A step begins."""
        self._largest.clear()

    def not_finite(self) -> list[str]:
        """The weights of this rank, by name, with a gradient that has an infinite element or one that is no number."""
        return [name for name, largest in self._largest.items() if not largest.isfinite()]


def refuse_not_finite(groups: Groups, step: int, own: list[str], own_loss: Tensor) -> None:
    """Raise NotFinite on the rank with the first gradient that is not finite (PeerFailed on the others). Collective.

    own: this rank's weights with such a gradient; own_loss: of this rank's micro-batches alone.
    """
    found = gather_objects((own, bool(own_loss.isfinite())), groups.world)
    holders = {rank: names for rank, (names, _) in enumerate(found) if names}
    lost = {rank for rank, (_, finite) in enumerate(found) if not finite}
    first = _first(groups.layout, list(holders))
    if not first:  # every gradient is finite, and their sum or that of their squares is not
        first, what = list(range(groups.world.size)), "its sums or squares overflow"
    else:
        what = _some(list(dict.fromkeys(name for rank in first for name in holders[rank])))
    where = f" ({place(groups, first[0])})" if groups.world.size > 1 else ""
    loss = ", where the loss is not finite either" if lost & set(first) else ""
    others = sorted(set(holders) - set(first))
    then = f"; also on {name_ranks(others)}" if others else ""
    message = (
        f"step {step}: the gradient is not finite on {name_ranks(first, 'or')}{where}{loss}: {what}{then}. "
        "The update is not made: look at that host and go on from the last checkpoint, or begin anew at a smaller --lr"
    )
    agree(lambda: _refuse(message, groups.rank == first[0]), groups.world, lambda _: NotFinite.exit_code)


def refuse_overflow(groups: Groups, step: int, own_loss: Tensor, *, smallest: bool) -> None:
    """After a float16 gradient that overflows: raise NotFinite (PeerFailed on the others) where no smaller loss scale
    helps, since the loss itself is not finite, or there is none (`smallest`). Collective.
    """
    lost = [rank for rank, fine in enumerate(gather_objects(bool(own_loss.isfinite()), groups.world)) if not fine]
    if not lost and not smallest:
        return
    what = (
        f"the loss is not finite on {name_ranks(lost)}, which no smaller loss scale changes"
        if lost
        else "the gradient overflows float16 at the smallest loss scale too"
    )
    fix = "begin anew with --bf16 or a smaller --lr"
    message = f"step {step}: {what}. The update is not made: {fix}"
    agree(lambda: _refuse(message, groups.rank == (lost or [0])[0]), groups.world, lambda _: NotFinite.exit_code)


def _first(layout: Layout, holders: list[int]) -> list[int]:
    """Of the ranks with such a gradient those where it may have begun: of the last stage, since backward begins there;
    shards of one replica, where it spreads with the gradient of the hidden states, cannot be told apart.
    """
    last = max((layout.pipeline_rank(rank) for rank in holders), default=0)
    return [rank for rank in holders if layout.pipeline_rank(rank) == last]


def _refuse(message: str, mine: bool) -> None:
    if mine:
        raise NotFinite(message)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more tensors" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
