"""One call of the `blocked` backend: what its heads compute from, and what they give back.

Shape letters as in interface.py, and: M a whole number of tiles; S distances of a head (columns.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron_allattn.kernels.band import tiling
from megatron_allattn.kernels.columns import Columns
from megatron_allattn.kernels.counts import ScoreCounts
from megatron_allattn.kernels.dropout import DropoutRows, tile_columns
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights, wide_type
from megatron_allattn.kernels.workspace import Workspace


@dataclass(frozen=True)
class Projected:
    """q (divided by √K), k and v of the block, or their gradients: [B·M, H·K], the local heads side by side."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Kept:
    """k and v of positions before the block, instead of a cache of hidden states.

    keys, values [B, rows, K]: of head h, spans[h] positions, from row starts[h] on.
    """

    keys: Tensor
    values: Tensor
    starts: Sequence[int]
    spans: Sequence[int]


@dataclass(frozen=True)
class Gradients:
    """What the heads add to.

    key, value [H·K, D]: what comes through cached positions; persistent_key, persistent_value: None where there are
    none; position_key [1, K, L] and columns [H, longest], in float32 at least: of the table of positions, and of
    bias or factors (None where there are none); edges [H], the same: of the masks at `Columns.edges`.
    """

    key: Tensor
    value: Tensor
    persistent_key: Tensor | None
    persistent_value: Tensor | None
    position_key: Tensor
    columns: Tensor | None
    edges: Tensor | None


@dataclass(frozen=True)
class BlockedCall:
    """block [B, M, D] in whole tiles; cache [B, C, D], or `kept`, which has C = 0; scored: what the heads add to."""

    block: Tensor
    cache: Tensor
    weights: LayerWeights
    settings: AttentionSettings
    state: BlockState
    workspace: Workspace
    kept: Kept | None = None
    scored: ScoreCounts = field(default_factory=ScoreCounts)

    @property
    def batch(self) -> int:
        return self.block.shape[0]

    @property
    def length(self) -> int:
        """M."""
        return self.block.shape[1]

    @property
    def tile(self) -> int:
        """T, which divides M."""
        return tiling(self.length)[1]

    @property
    def heads(self) -> int:
        """H."""
        return len(self.state.heads)

    @property
    def size(self) -> int:
        """K."""
        return self.weights.position_key.shape[1]

    @property
    def persistent(self) -> int:
        """N."""
        return self.weights.num_vectors

    @property
    def shared(self) -> bool:
        """Whether values have positions too."""
        return self.settings.position_values == "shared"

    @cached_property
    def columns(self) -> Columns:
        return Columns(self.weights, self.settings, self.state)

    @property
    def known(self) -> int:
        """How many positions before the block may be attended to."""
        if self.settings.empty_cache == "attend":
            return self.cache.shape[1] + self.columns.longest
        return self.state.cached if self.kept is not None else min(self.state.cached, self.cache.shape[1])

    @cached_property
    def dropout(self) -> DropoutRows | None:
        if self.state.dropout_keys is None or self.settings.dropout == 0:
            return None
        device = self.block.device
        queries = torch.arange(self.length, dtype=torch.int32, device=device)
        keys = self.state.dropout_keys.attention_rows(self.state.layer, self.state.heads, queries)
        pairs = tile_columns(self.columns.longest, self.persistent, device)
        return DropoutRows(keys.transpose(0, 1).contiguous().flatten(1), pairs, self.settings.dropout)

    def zero_gradients(self) -> Gradients:
        def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
            return torch.zeros(like.shape, dtype=dtype, device=like.device)

        weights, bias, own = self.weights, self.columns.bias, self.block.dtype
        return Gradients(
            key=zeros(weights.key, own),
            value=zeros(weights.value, own),
            persistent_key=None if weights.persistent_key is None else zeros(weights.persistent_key, own),
            persistent_value=None if weights.persistent_value is None else zeros(weights.persistent_value, own),
            position_key=zeros(weights.position_key, wide_type(own)),
            columns=None if bias is None else zeros(bias, bias.dtype),
            edges=None if bias is None or self.columns.factors is not None else zeros(bias[:, 0], bias.dtype),
        )


class Heads(Protocol):
    """The heads of one call."""

    def forward(self, projected: Projected) -> Tensor:
        """Outputs [B·M, H·K], without the scale of dropout."""

    def backward(self, projected: Projected, dy: Tensor, grads: Gradients) -> Projected:
        """From dy [B·M, H·K], with the scale of dropout, the gradients of what was projected; others' go to `grads`."""
