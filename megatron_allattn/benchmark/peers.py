"""Layers that all-attention is compared with, of as many parameters; each an nn.Module [B, M, D] → [B, M, D].

    standard         a Megatron or GPT layer: causal attention on PyTorch's fused kernel, then a ReLU feed-forward
                     sublayer of N units, whose two matrices have as many weights as N keys and N values
    x-transformers   that library's attention with N persistent keys and values per head (num_mem_kv)

Both look at their block alone, no cache and no positions, which only makes them cheaper.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_allattn.config import ModelConfig


class StandardLayer(nn.Module):
    """x = LayerNorm(x + attention(x)), then LayerNorm(x + feed-forward(x)); no biases but the feed-forward's."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.heads, self.dropout = model.num_attention_heads, model.attention_dropout
        self.projections = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.inner = nn.Linear(hidden, model.persistent_memory_size)
        self.outer = nn.Linear(model.persistent_memory_size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = self.norm1(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.outer(F.dropout(F.relu(self.inner(x)), self.dropout)))


class XTransformersLayer(nn.Module):
    """x = LayerNorm(x + attention(x)) with persistent vectors, all by that library."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        from x_transformers.x_transformers import Attention  # noqa: PLC0415

        hidden, heads = model.hidden_size, model.num_attention_heads
        self.attention = Attention(
            hidden,
            dim_head=hidden // heads,
            heads=heads,
            causal=True,
            flash=True,
            num_mem_kv=model.persistent_memory_size,
            dropout=model.attention_dropout,
        )
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        found: Any = self.attention(x)
        return self.norm(x + (found[0] if isinstance(found, tuple) else found))


PEERS: dict[str, Callable[[ModelConfig], nn.Module]] = {"standard": StandardLayer, "x-transformers": XTransformersLayer}


def missing(peer: str) -> str | None:
    """Why a peer cannot be had here, or None."""
    if peer == "x-transformers" and importlib.util.find_spec("x_transformers") is None:
        return "x-transformers is not installed (pip install x-transformers)"
    return None
