"""k and v of cached positions, side by side [2·K] for each head: made anew from hidden states with today's weights."""

import torch
from torch import Tensor

from megatron_allattn.kernels.interface import LayerWeights


def memory_weight(weights: LayerWeights) -> Tensor:
    """W_k and W_v of every head, one above the other, [H, 2·K, D]."""
    size = weights.position_key.shape[1]
    return torch.cat([weight.unflatten(0, (-1, size)) for weight in (weights.key, weights.value)], dim=1)


def project_cache(cache: Tensor, weight: Tensor, out: Tensor) -> None:
    """A head's k and v of the cache's last S positions in `out` [B, S, 2·K]; zeros, in front, where nothing was cached.

    cache: [B, C, D] · weight: the head's [2·K, D].
    """
    known = min(out.shape[1], cache.shape[1])
    out[:, : out.shape[1] - known] = 0
    if known:
        seen = cache[:, cache.shape[1] - known :]
        torch.bmm(seen, weight.t().expand(len(seen), -1, -1), out=out[:, out.shape[1] - known :])
