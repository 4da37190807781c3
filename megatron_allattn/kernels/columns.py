"""What depends on a distance alone: how far each head is computed, its span mask there, and the mask's gradient.

The mask is added to scores as a bias log m; with normalization `window` it multiplies weights instead. Distances are
computed in steps (`columns_of`), so a head's columns may reach farther than it sees: what is beyond is hidden.
"""

import torch
from torch import Tensor

from megatron_allattn.kernels.band import columns_of
from megatron_allattn.kernels.interface import (
    AttentionSettings,
    BlockState,
    LayerWeights,
    distances_seen,
    span_slope,
    wide_type,
)


class Columns:
    """Of the H local heads, by distance: the last column is for distance 1.

    spans: S of each head; longest: the largest; bias: added to scores, in float32 at least, [H, longest], -inf for what
    is hidden, or None; biased: of each head, how many of its S columns, the farthest, have a bias or a mask that is not
    1; factors: the mask where it multiplies, [H, longest], or None; edges: with normalization `span`, int64 [H], of
    each head the distance whose mask is 0 and has a gradient, or 0. The masks tell it, not the host, to whom z·L may
    round to another number.
    """

    def __init__(self, weights: LayerWeights, settings: AttentionSettings, state: BlockState) -> None:
        adaptive = weights.span is not None
        seen = distances_seen(adaptive, settings, state)
        self.spans = tuple(columns_of(one) for one in seen)
        self.longest = max(self.spans)
        self.bias: Tensor | None = None
        self.factors: Tensor | None = None
        self.edges: Tensor | None = None
        self.biased = self.spans
        self._settings, self._weights = settings, weights
        if not adaptive:
            self.biased = tuple(span - one for span, one in zip(self.spans, seen, strict=True))
        elif settings.normalization == "span" and state.spans is not None:  # the host knows where the ramps end
            ramp = settings.ramp + 2
            self.biased = tuple(min(span, span - one + ramp) for span, one in zip(self.spans, seen, strict=True))
        if adaptive or any(self.biased):
            self._make_masks(torch.tensor(seen, device=weights.query.device))

    def _make_masks(self, seen: Tensor) -> None:
        distances = torch.arange(self.longest, 0, -1, device=seen.device)
        beyond = distances > seen[:, None]
        wide = wide_type(self._weights.query.dtype)
        bias = torch.zeros(beyond.shape, dtype=wide, device=seen.device)
        if self._weights.span is not None:
            z, settings = self._weights.span.to(wide), self._settings
            slope = span_slope(z, distances.to(wide), settings.max_span, settings.ramp).squeeze(1)
            self._through = (slope >= 0) & (slope <= 1) & ~beyond
            self._masks = slope.clamp(0, 1)
            if settings.normalization == "window":
                self.factors = self._masks
            else:
                bias = self._masks.log()
                self.edges = (((slope == 0) & ~beyond) * distances).sum(-1)
        self.bias = bias.masked_fill_(beyond, -torch.inf)

    def of(self, head: int) -> slice:
        """A head's columns of what all have by distance."""
        return slice(self.longest - self.spans[head], self.longest)

    def span_gradient(self, through: Tensor | None, edges: Tensor | None) -> Tensor | None:
        """dz [H, 1, 1] from the gradient of bias or factors [H, longest], and that of the masks at the `edges` [H]: m
        rises by L / R where it passes gradient."""
        if self._weights.span is None or through is None:
            return None
        dmasks = through if self.factors is not None else through / self._masks.where(self._masks > 0, 1.0)
        dz = (dmasks * self._through).sum(-1)
        if edges is not None and self.edges is not None:
            dz += edges * (self.edges > 0)
        dz *= self._settings.max_span / self._settings.ramp
        return dz[:, None, None].to(self._weights.span.dtype)
