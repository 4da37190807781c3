"""How the next token is chosen from the network's log-probabilities.

    temperature T    p_i ∝ exp(log p_i / T)
    top-k            only the k likeliest tokens (Fan et al. 2018, arXiv 1805.04833)
    top-p            of what is left, only the likeliest tokens whose probabilities reach p together: the fewest that do
                     (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751)

in this order, each on what the one before leaves, made to sum to 1 again. Draws are made on the CPU in float64 from a
generator per sample, seeded by (seed, prompt's number, sample's number): every tensor-parallel rank, which has the same
log-probabilities, draws the same token, and a sample does not depend on what is drawn beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_allattn.parallel.random import tensor_generator

Choose = Callable[[Tensor], Tensor]
"""Log-probabilities [S, V] of the next tokens → ids [S]."""


def greedy(log_probs: Tensor) -> Tensor:
    """The likeliest token of every sample: log-probabilities [S, V] → ids [S]."""
    return log_probs.argmax(dim=-1)


@dataclass(frozen=True)
class Sampling:
    """temperature > 0; top_k ≥ 1 and 0 < top_p ≤ 1, None: not applied."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


def candidates(log_probs: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn from log-probabilities [S, V]: probabilities, float64, and ids, both [S, C]."""
    size = log_probs.shape[-1]
    lower = log_probs.double() - log_probs.amax(dim=-1, keepdim=True)  # 0 for the likeliest, at whatever temperature
    p = (lower / sampling.temperature).softmax(dim=-1)
    if sampling.top_k is None and sampling.top_p is None:
        return p, torch.arange(size, device=p.device).expand_as(p)
    p, ids = p.topk(size if sampling.top_k is None else min(sampling.top_k, size), dim=-1)
    p = p / p.sum(dim=-1, keepdim=True)
    if sampling.top_p is not None:
        likelier = p.cumsum(dim=-1) - p
        p = p.where(likelier < sampling.top_p, 0.0)
        p = p / p.sum(dim=-1, keepdim=True)
    return p, ids


class Sampler:
    """Draws the tokens of several samples, position after position.

    samples: of each the number of its prompt and its own number among that prompt's, from 0.
    """

    def __init__(self, sampling: Sampling, seed: int, samples: Sequence[tuple[int, int]] = ((0, 0),)) -> None:
        self._sampling = sampling
        self._generators = [tensor_generator(seed, f"prompt {prompt}, sample {sample}") for prompt, sample in samples]

    def __call__(self, log_probs: Tensor) -> Tensor:
        """Log-probabilities [S, V] → ids [S] on the CPU."""
        p, ids = candidates(log_probs.cpu(), self._sampling)
        cumulative = p.cumsum(dim=-1)
        # 52 random bits: the product below is then less than the sum, and the token found has a probability above 0
        bits = torch.stack([torch.randint(2**52, (1,), generator=generator) for generator in self._generators])
        target = bits.double() / 2**52 * cumulative[:, -1:]
        return ids.gather(1, torch.searchsorted(cumulative, target, right=True))[:, 0]
