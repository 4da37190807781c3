"""The attention of one layer, token by token and head by head in loops: an independent truth for the backends.

Written from the equations alone, on scalars and vectors of float64, so that autograd gives true gradients too. The
dropout mask comes from Python integers, by the hash that parallel/random.py documents.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ATTENTION_SITE, EMBEDDING_SITE, REPRESENTATION_SITE, FEED_FORWARD_SITE = 1, 2, 3, 4


@dataclass
class Problem:
    """Everything a layer's attention depends on. Persistent vectors come scaled; heads: logical ids of the local heads.

    dropout: None, or (probability, seed, step, streams).
    """

    block: Tensor  # [B, M, D]
    cache: Tensor  # [B, C, D]
    query: Tensor  # [H·K, D]
    key: Tensor
    value: Tensor
    persistent_key: Tensor | None  # [H, K, N]
    persistent_value: Tensor | None  # [H, N, K]
    span: Tensor | None  # [H, 1, 1]
    position: Tensor  # [1, K, L]
    heads: list[int]
    window: int
    cached: int
    ramp: int
    layer: int = 0
    position_values: str = "none"
    empty_cache: str = "attend"
    normalization: str = "window"
    dropout: tuple[float, int, int, list[int]] | None = None

    @property
    def max_span(self) -> int:
        return self.position.shape[2]


def slow_attend(problem: Problem) -> Tensor:
    """Outputs [B, M, H·K] of the local heads before W_o."""
    batch, length, _ = problem.block.shape
    rows = [
        torch.cat([_head_output(problem, stream, head, token) for head in range(len(problem.heads))])
        for stream in range(batch)
        for token in range(length)
    ]
    return torch.stack(rows).unflatten(0, (batch, length))


def _head_output(p: Problem, stream: int, head: int, token: int) -> Tensor:
    size, span = p.position.shape[1], p.max_span
    rows = slice(head * size, (head + 1) * size)
    q = p.query[rows] @ p.block[stream, token]

    columns, masks, scores, values = [], [], [], []  # of everything this token may look at
    for distance in range(p.window, 0, -1):
        position = token - distance  # from the block's start; negative in the cache
        if p.empty_cache == "mask" and position < -min(p.cached, p.cache.shape[1]):
            continue
        x = _hidden(p, stream, position)
        u = p.position[0, :, span - distance]
        columns.append(-distance)
        masks.append(_soft_mask(p, head, distance))
        scores.append(q @ (p.key[rows] @ x + u) / math.sqrt(size))
        values.append(p.value[rows] @ x + (u if p.position_values == "shared" else 0.0))
    for i in range(0 if p.persistent_key is None else p.persistent_key.shape[2]):
        assert p.persistent_key is not None and p.persistent_value is not None
        columns.append(i)
        masks.append(torch.ones((), dtype=q.dtype))
        scores.append(q @ p.persistent_key[head, :, i] / math.sqrt(size))
        values.append(p.persistent_value[head, i])
    if not columns:
        return torch.zeros(size, dtype=q.dtype)

    weights = normalized(scores, masks, "span" if p.span is None else p.normalization)
    output = torch.zeros(size, dtype=q.dtype)
    for column, weight, value in zip(columns, weights, values, strict=True):
        output = output + _keep_factor(p, stream, head, token, column) * weight * value
    return output


def _hidden(p: Problem, stream: int, position: int) -> Tensor:
    if position >= 0:
        return p.block[stream, position]
    index = p.cache.shape[1] + position
    return p.cache[stream, index] if index >= 0 else torch.zeros_like(p.block[stream, 0])


def _soft_mask(p: Problem, head: int, distance: int) -> Tensor:
    """m_z(x); the gradient passes wherever 0 ≤ the unclamped value ≤ 1, both ends included."""
    if p.span is None:
        return torch.ones((), dtype=p.block.dtype)
    value = (p.ramp + p.span[head, 0, 0] * p.max_span + 1 - distance) / p.ramp
    return value if 0 <= value.item() <= 1 else torch.tensor(float(value.item() > 1), dtype=p.block.dtype)


def normalized(scores: list[Tensor], masks: list[Tensor], normalization: str) -> list[Tensor]:
    """Weights from scores (already divided by √K) and span masks.

    "window": a softmax, the mask, and a division by the sum plus 1e-8; "span": mask · exp(score) over its sum.
    """
    exponentials = [score.exp() for score in scores]
    if normalization == "window":
        total = sum(exponentials)
        exponentials = [exponential / total for exponential in exponentials]
    weights = [mask * exponential for mask, exponential in zip(masks, exponentials, strict=True)]
    total = sum(weights) + (1e-8 if normalization == "window" else 0.0)
    return [weight / total for weight in weights]


def _keep_factor(p: Problem, stream: int, head: int, token: int, column: int) -> float:
    if p.dropout is None:
        return 1.0
    probability, seed, step, streams = p.dropout
    row = (ATTENTION_SITE, step, p.layer, streams[stream], p.heads[head], token)
    return keep_factor(seed, row, column, probability)


def keep_factor(seed: int, row: tuple[int, ...], column: int, probability: float) -> float:
    """What dropout multiplies an element by: 0, or 1 / the share that is kept, in 2⁻¹⁴."""
    dropped = round(probability * 2**14)
    field = hash_bits(seed, row, column) >> (16 if column % 2 else 0) & 0x3FFF
    return 2**14 / (2**14 - dropped) if field >= dropped else 0.0


def hash_bits(seed: int, row: tuple[int, ...], column: int) -> int:
    """The documented 32 bits of an element's pair of columns, by Python integers."""
    key = lowbias32(lowbias32(seed >> 32) + (seed & WORD))
    for part in row:
        key = lowbias32(key + part)
    return scramble(key ^ lowbias32(column // 2 * 0x9E3779B9 + 1))


def scramble(x: int) -> int:
    """Two multiplications and a shift that keeps the sign."""
    y = x * 0x7FEB352D & WORD
    signed = y - (WORD + 1) if y >> 31 else y
    return (y ^ signed >> 15) * 0x846CA68B & WORD


def lowbias32(x: int) -> int:
    x &= WORD
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return x ^ (x >> 16)
