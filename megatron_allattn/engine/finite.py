"""Steps whose loss or gradient is not finite: whose it was, and that none of it reaches a checkpoint.

That it is not, the norm of all gradients says, which every rank knows. By then gradients are sums over the replicas,
which hide whose it was; hence every rank keeps the largest element of what its own backward pass has given.

Such a step is left out on all ranks: weights, optimizer and caches stay as they were, and the data moves on.
"""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from megatron_allattn.parallel.collectives import gather_objects
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.logical import LogicalTensor
from megatron_allattn.parallel.verdict import name_ranks, place

SHOWN = 3  # tensors in a message
PIECE = 2**20  # elements looked at together, on the host
EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
"""Its bits, all of which are set in what is not finite: numpy compares whole numbers fast, half ones slowly or not."""


class NotFinite(RuntimeError):
    """What is not finite ends the run; the message says where it is."""

    exit_code = 4


class GradientWatch:
    """The largest element, by absolute value, of every gradient of this rank's own micro-batches of a step.

    Taken before any sum over ranks, and read by the host only once something is wrong: one more pass over gradients.
    """

    def __init__(self, parameters: Iterable[tuple[LogicalTensor, nn.Parameter]]) -> None:
        self._largest: dict[str, Tensor] = {}
        for logical, parameter in parameters:
            parameter.register_hook(partial(self._see, logical.name))

    def _see(self, name: str, gradient: Tensor) -> None:
        largest = _largest(gradient)
        self._largest[name] = largest.maximum(self._largest.get(name, largest))

    def clear(self) -> None:
        """A step begins."""
        self._largest.clear()

    def not_finite(self) -> list[str]:
        """The weights of this rank, by name, with a gradient that has an infinite element or one that is no number."""
        return [name for name, largest in self._largest.items() if not largest.isfinite()]


def tell_not_finite(groups: Groups, own: list[str], own_loss: Tensor) -> str:
    """What is not finite in a step, and on which rank it was so first; the same on all ranks. Collective.

    own: this rank's weights with such a gradient; own_loss: of this rank's micro-batches alone.
    """
    found = gather_objects((own, bool(own_loss.isfinite())), groups.world)
    holders = {rank: names for rank, (names, _) in enumerate(found) if names}
    lost = {rank for rank, (_, finite) in enumerate(found) if not finite}
    if lost and not holders:
        return f"the loss is not finite on {_ranks(groups, sorted(lost))}"
    first = _first(groups.layout, list(holders))
    if not first:  # every gradient is finite, and their sum or that of their squares is not
        first, what = list(range(groups.world.size)), "its sums or squares overflow"
    else:
        what = _some(list(dict.fromkeys(name for rank in first for name in holders[rank])))
    loss = ", where the loss is not finite either" if lost & set(first) else ""
    others = sorted(set(holders) - set(first))
    then = f"; also on {name_ranks(others)}" if others else ""
    return f"the gradient is not finite on {_ranks(groups, first, 'or')}{loss}: {what}{then}"


def tell_overflow(groups: Groups, own_loss: Tensor, *, smallest: bool) -> str | None:
    """After a float16 gradient that overflows: what a smaller loss scale does not change, if there is anything; the
    same on all ranks. Collective.

    smallest: there is no smaller scale.
    """
    lost = [rank for rank, fine in enumerate(gather_objects(bool(own_loss.isfinite()), groups.world)) if not fine]
    if lost:
        return f"the loss is not finite on {_ranks(groups, lost)}, which no smaller loss scale changes"
    return "the gradient overflows float16 at the smallest loss scale too" if smallest else None


def not_saved(names: list[str]) -> NotFinite:
    """Why a checkpoint with these tensors in it, which are not finite, is not kept."""
    return NotFinite(f"not finite: {_some(names)}. Nothing was saved: go on from the last checkpoint at a smaller --lr")


def is_finite(values: Tensor) -> bool:
    """Whether every element is; values: in host memory, of any shape and type.

    With numpy, on this thread alone: after a loop of torch's its threads spin, and what hashes and flushes has no core.
    """
    pieces = values.detach().reshape(-1).split(PIECE)
    if (exponent := EXPONENTS.get(values.dtype)) is not None:
        bits = (piece.view(torch.int16).numpy() for piece in pieces)
        return all((piece & exponent).max(initial=0) < exponent for piece in bits)
    return all(np.isfinite([piece.min(), piece.max()]).all() for piece in map(Tensor.numpy, pieces) if piece.size)


def _largest(values: Tensor) -> Tensor:
    """By absolute value; not a number if any is not. Ten times as fast as the norm of that name, and without a copy."""
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high)


def _first(layout: Layout, holders: list[int]) -> list[int]:
    """Of the ranks with such a gradient those where it may have begun: of the last stage, since backward begins there;
    shards of one replica, where it spreads with the gradient of the hidden states, cannot be told apart.
    """
    last = max((layout.pipeline_rank(rank) for rank in holders), default=0)
    return [rank for rank in holders if layout.pipeline_rank(rank) == last]


def _ranks(groups: Groups, ranks: list[int], word: str = "and") -> str:
    """Them, and where the first of them stands."""
    return name_ranks(ranks, word) + (f" ({place(groups, ranks[0])})" if groups.world.size > 1 else "")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more tensors" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
