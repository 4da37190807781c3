"""The end of a run whose gradient is not finite: which rank had it first, and in which tensors.

Asked only once the norm of all gradients, which every rank knows, is not finite; a normal step pays nothing for it.
"""

from collections.abc import Iterable

from torch import Tensor

from megatron_allattn.parallel.collectives import agree, gather_objects
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.verdict import name_ranks, place

SHOWN = 3  # tensors in a message


class NotFinite(RuntimeError):
    """A gradient is not finite; the message says where."""

    exit_code = 4


def refuse_not_finite(groups: Groups, step: int, gradients: Iterable[tuple[str, Tensor]], own_loss: Tensor) -> None:
    """Raise NotFinite on the rank with the first gradient that is not finite (PeerFailed on the others). Collective.

    gradients: those that this rank holds, by the weights' names; own_loss: of this rank's micro-batches alone.
    """
    own = [name for name, gradient in gradients if not gradient.isfinite().all()]
    found = gather_objects((own, bool(own_loss.isfinite())), groups.world)
    holders = {rank: names for rank, (names, _) in enumerate(found) if names}
    lost = [rank for rank, (_, finite) in enumerate(found) if not finite]
    first = _first(groups.layout, list(holders), lost)
    if not first:  # every gradient is finite, and the sum of their squares is not
        first, what = list(range(groups.world.size)), "its squares overflow"
    else:
        stage = groups.layout.pipeline_rank(first[0])
        names = [n for rank in holders if groups.layout.pipeline_rank(rank) == stage for n in holders[rank]]
        what = _some(list(dict.fromkeys(names)))
    where = f" ({place(groups, first[0])})" if groups.world.size > 1 else ""
    loss = ", where the loss is not finite either" if set(lost) & set(first) else ""
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


def _first(layout: Layout, holders: list[int], lost: list[int]) -> list[int]:
    """The ranks on one of which it began: of the last stage, since backward begins there.

    Gradients are averaged over the replicas before anybody looks at them, so that only a loss that is not finite tells
    which replica it was. holders: ranks with such a gradient; lost: those with such a loss.
    """
    last = max((layout.pipeline_rank(rank) for rank in holders), default=0)
    shards = {layout.tensor_rank(rank) for rank in holders if layout.pipeline_rank(rank) == last}
    replicas = {layout.data_rank(rank) for rank in lost} or set(range(layout.data_size))
    return sorted(layout.rank(tensor=tensor, data=data, pipeline=last) for tensor in shards for data in replicas)


def _refuse(message: str, mine: bool) -> None:
    if mine:
        raise NotFinite(message)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more tensors" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
