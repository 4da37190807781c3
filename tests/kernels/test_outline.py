"""Attention without arithmetic: what it refuses, keeps and gives back, against the backend that it stands for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_allattn.kernels import outline
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.kernels.registry import Attend

B, M, C, D, H, K, N, L = 2, 8, 16, 12, 3, 4, 5, 32


def weights(**changed: Tensor | None) -> LayerWeights:
    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, device="meta", requires_grad=True)

    made = LayerWeights(
        query=empty(H * K, D),
        key=empty(H * K, D),
        value=empty(H * K, D),
        persistent_key=empty(H, K, N),
        persistent_value=empty(H, N, K),
        span=empty(H, 1, 1),
        position_key=empty(1, K, L),
    )
    return replace(made, **changed)


def settings(keeps: bool) -> AttentionSettings:
    return AttentionSettings(L, 4, "none", "attend", 0.0, "span", keep_projections=keeps)


STATE = BlockState(window=16, cached=C, heads=torch.zeros(H, dtype=torch.int32), layer=0, dropout_keys=None)


def kept_and_given(attend: Attend, given: LayerWeights, keeps: bool) -> tuple[list, list, torch.Size]:
    """Shapes of what autograd keeps, of the gradients, and of the result."""
    block = torch.empty(B, M, D, device="meta", requires_grad=True)
    cache, kept = torch.empty(B, C, D, device="meta"), list[tuple[int, ...]]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = attend(block, cache, given, settings(keeps), STATE)
    result.backward(torch.empty_like(result))
    tensors = [block, *(one for one in given.tensors() if one is not None)]
    return kept, [(tuple(one.grad.shape), one.grad.dtype) for one in tensors], result.shape


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("without", [(), ("persistent_key", "persistent_value"), ("span",)])
def test_it_keeps_and_gives_what_blocked_does(without: tuple[str, ...], keeps: bool) -> None:
    given = dict.fromkeys(without)
    kept, gradients, shape = kept_and_given(outline.attend, weights(**given), keeps)
    blocked = kept_and_given(Blocked(None), weights(**given), keeps)
    assert shape == blocked[2] == (B, M, H * K)
    assert gradients == blocked[1]
    size = [torch.Size(one).numel() for one in kept]
    assert sorted(size) == sorted(torch.Size(one).numel() for one in blocked[0])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("query", (H * K + 1, D), "query weight"),
        ("key", (H * K, D + 1), r"key weight \(12, 13\): 3 heads of 4 need \[12, 12\]"),
        ("value", (H * K - 4, D), "value weight"),
        ("persistent_value", (H, N + 1, K), "persistent values"),
        ("span", (H + 1, 1, 1), "spans"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kept_and_given(outline.attend, weights(**{name: torch.empty(shape, device="meta")}), True)
