"""Collectives, with and without autograd. On a group of one rank each is the identity and sends nothing.

Autograd functions come in conjugate pairs, the forward of one being the backward of the other. The first pair is
Megatron-LM's around a column- and a row-parallel product; the second is what its sequence parallelism uses:

    copy_to_shards    forward identity          backward all-reduce        a replicated input feeds every rank's shard
    sum_over_shards   forward all-reduce        backward identity          every rank holds a partial sum

    gather_shards     forward all-gather        backward reduce-scatter    every rank's work reads the whole
    sum_to_shards     forward reduce-scatter    backward all-gather        partial sums; a rank goes on with its part

`softmax_over_shards` is a softmax over a dimension that is cut: one small all-gather forward, one small all-reduce
backward.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_allattn.parallel.groups import Group


def all_reduce(tensor: Tensor, group: Group, op: Any = None) -> Tensor:
    """Reduce `tensor` in place over `group` (sum unless `op` says otherwise) and return it."""
    if group.size > 1:
        dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM, group=group.handle)
    return tensor


def all_reduce_max(tensor: Tensor, group: Group) -> Tensor:
    """Elementwise maximum over `group`, in place; returns `tensor`."""
    return all_reduce(tensor, group, dist.ReduceOp.MAX)


def all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """Every rank's `tensor` (equal shapes), in group order."""
    if group.size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(parts, tensor.contiguous(), group=group.handle)
    return parts


def reduce_scatter(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's equal share of a dimension of the sum of all ranks' `tensor`."""
    if group.size == 1:
        return tensor
    parts = [part.contiguous() for part in tensor.chunk(group.size, dim=dim)]
    assert len(parts) == group.size and parts[0].shape == parts[-1].shape, f"{tuple(tensor.shape)} over {group.size}"
    own = torch.empty_like(parts[group.rank])
    dist.reduce_scatter(own, parts, group=group.handle)
    return own


def gather_to_first(tensor: Tensor, group: Group) -> list[Tensor] | None:
    """Every rank's `tensor` (equal shapes), in group order, on the group's first rank; None on the others."""
    if group.size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size)] if group.rank == 0 else None
    dist.gather(tensor.contiguous(), parts, dst=group.ranks[0], group=group.handle)
    return parts


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every rank's small picklable `value`, in group order (errors, names, counts; never tensors of size)."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.handle)
    return values


def broadcast_object(value: Any, group: Group) -> Any:
    """The first rank's `value`, on every rank."""
    if group.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=group.ranks[0], group=group.handle)
    return box[0]


def broadcast_tensor(tensor: Tensor | None, source: int, group: Group) -> Tensor:
    """The tensor of the rank at position `source`, on every rank, on its own device; others give any tensor or None."""
    if group.size == 1:
        assert tensor is not None
        return tensor
    mine = group.rank == source
    box = [(tuple(tensor.shape), tensor.dtype, tensor.device.type) if mine and tensor is not None else None]
    dist.broadcast_object_list(box, src=group.ranks[source], group=group.handle)
    shape, dtype, device = cast("tuple[tuple[int, ...], torch.dtype, str]", box[0])
    whole = tensor.contiguous() if mine and tensor is not None else torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(whole, src=group.ranks[source], group=group.handle)
    return whole


def broadcast_from_first(tensor: Tensor, group: Group) -> None:
    """In place: every rank of the group gets the tensor of its first one."""
    if group.size > 1:
        dist.broadcast(tensor, src=group.ranks[0], group=group.handle)


T = TypeVar("T")


class PeerFailed(RuntimeError):
    """Another rank has failed and reports why. `exit_code` is what that rank ends with."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} failed")
        self.exit_code = exit_code


def agree(action: Callable[[], T], group: Group, exit_code: Callable[[BaseException], int] = lambda _: 1) -> T:
    """Do something that may fail on some ranks only, and fail on all if it fails on any.

    The first rank that fails raises its own error, the others `PeerFailed`, so that exactly one message reaches the
    user and nobody waits in the next collective for a rank that is gone.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    codes = gather_objects(None if error is None else exit_code(error), group)
    first = next((position for position, code in enumerate(codes) if code is not None), None)
    if first is None:
        return cast(T, result)
    if error is not None and first == group.rank:
        raise error
    raise PeerFailed(group.ranks[first], codes[first]) from error


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _SumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return all_reduce(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.cut = group, dim
        return torch.cat(all_gather(tensor, group), dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], *ctx.cut), None, None


class _SumToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.cut = group, dim
        return reduce_scatter(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        group, dim = ctx.cut
        return torch.cat(all_gather(grads[0], group), dim=dim), None, None


class _SoftmaxOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, group: Group) -> Tensor:
        maximum = scores.amax(dim=-1, keepdim=True)
        exponentials = (scores - maximum).exp_()
        own = torch.stack([maximum, exponentials.sum(dim=-1, keepdim=True)])
        maxima, sums = torch.stack(all_gather(own, group), dim=1)
        highest = maxima.amax(dim=0)
        total = (sums * (maxima - highest).exp()).sum(dim=0)
        weights = exponentials.mul_((maximum - highest).exp() / total)
        ctx.group = group
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        weighted = weights * grads[0]
        return weighted - weights * all_reduce(weighted.sum(dim=-1, keepdim=True), ctx.group), None


def copy_to_shards(tensor: Tensor, group: Group) -> Tensor:
    """A replicated `tensor` as input to sharded work: identity in forward, sum of the gradients in backward."""
    return _CopyToShards.apply(tensor, group) if group.size > 1 else tensor


def sum_over_shards(tensor: Tensor, group: Group) -> Tensor:
    """Sum of the ranks' partial results: all-reduce in forward, identity in backward."""
    return _SumOverShards.apply(tensor, group) if group.size > 1 else tensor


def gather_shards(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Every rank's part of a dimension, in group order: all-gather, reduce-scatter in backward."""
    return _GatherShards.apply(tensor, group, dim) if group.size > 1 else tensor


def sum_to_shards(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """A partial sum → this rank's equal part of a dimension of the sum: reduce-scatter, all-gather in backward."""
    return _SumToShards.apply(tensor, group, dim) if group.size > 1 else tensor


def softmax_over_shards(scores: Tensor, group: Group) -> Tensor:
    """This rank's columns of the softmax over the last dimension, which is cut over `group`; float32 or wider."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return _SoftmaxOverShards.apply(scores, group) if group.size > 1 else scores.softmax(dim=-1)
