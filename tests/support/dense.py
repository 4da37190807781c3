"""An independent reference: a plain all-attention network over a whole text in one pass, in float64, without caches.

Written from the equations alone, for one head at a time, on logical weights: position t attends to the positions c with
1 ≤ t − c ≤ W, whether or not the text reaches that far back (a position before it has a zero hidden state).
"""

import math

import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig

QUERIES = 512  # rows of the attention matrix that are held at once


def dense_network(weights: dict[str, Tensor], model: ModelConfig, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Nats of tokens[1:], [T − 1], and every layer's input hidden states, [T − 1, D] each."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    hidden, states = weights["embedding.weight"][tokens[:-1]], []
    for layer in range(model.num_layers):
        states.append(hidden)
        own = {name.removeprefix(f"layers.{layer}."): w for name, w in weights.items() if f"layers.{layer}." in name}
        hidden = _norm(hidden + _attention(hidden, own, weights["position.key"][0], model), own, "norm1")
        if model.feed_forward_size:
            inner = (hidden @ own["ff.in.weight"].T + own["ff.in.bias"]).clamp(min=0)
            hidden = _norm(hidden + inner @ own["ff.out.weight"].T + own["ff.out.bias"], own, "norm2")
    logits = hidden @ weights["output.weight"].T + weights["output.bias"]
    log_probabilities = logits - logits.exp().sum(dim=1, keepdim=True).log()
    return -log_probabilities[torch.arange(len(hidden)), tokens[1:]], states


def reach_of(weights: dict[str, Tensor], model: ModelConfig, layer: int) -> int:
    """W, written out from the paper's code: the longest head and its ramp, in steps of 64 down from L."""
    longest = model.max_attention_span
    if model.adaptive_span:
        z = weights[f"layers.{layer}.span"].max().item()
        longest = min(longest, math.ceil(z * model.max_attention_span) + model.span_ramp)
    return model.max_attention_span - (model.max_attention_span - longest) // 64 * 64


def _attention(hidden: Tensor, own: dict[str, Tensor], position: Tensor, model: ModelConfig) -> Tensor:
    length, size = len(hidden), model.hidden_size // model.num_attention_heads
    reach = reach_of({"layers.0.span": own["span"]} if model.adaptive_span else {}, model, 0)
    before = torch.cat([torch.zeros(reach, model.hidden_size, dtype=torch.float64), hidden])
    heads = []
    for head in range(model.num_attention_heads):
        rows = slice(head * size, (head + 1) * size)
        query = hidden @ own["query.weight"][rows].T
        key, value = before @ own["key.weight"][rows].T, before @ own["value.weight"][rows].T
        out = [
            _rows(query, key, value, head, range(start, min(start + QUERIES, length)), reach, own, position, model)
            for start in range(0, length, QUERIES)
        ]
        heads.append(torch.cat(out))
    return torch.cat(heads, dim=1) @ own["out.weight"].T


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head: int,
    rows: range,
    reach: int,
    own: dict[str, Tensor],
    position: Tensor,
    model: ModelConfig,
) -> Tensor:
    """One head's outputs for the queries in `rows`; keys and values have `reach` empty positions in front."""
    size, count = query.shape[1], model.persistent_memory_size
    here = slice(rows.start, rows.stop + reach)
    query, key, value = query[rows.start : rows.stop], key[here], value[here]
    row = torch.arange(rows.start, rows.stop)[:, None]
    column = torch.arange(here.start, here.stop)[None] - reach  # its place in the text
    distance = row - column
    seen = (distance >= 1) & (distance <= reach)
    if model.empty_cache == "mask":
        seen &= column >= 0
    column_of = (model.max_attention_span - distance).clamp(0, model.max_attention_span - 1)
    scores = query @ key.T + (query @ position).gather(1, column_of)
    if count:
        scores = torch.cat([scores, query @ (math.sqrt(size) * own["persistent.key"][head])], dim=1)
        seen = torch.cat([seen, torch.ones(len(row), count, dtype=torch.bool)], dim=1)
    weight = torch.where(seen, (scores / math.sqrt(size)).exp(), 0.0)
    smallest = 1e-300  # a row may see nothing: it gets nothing
    if model.adaptive_span:
        if model.span_normalization == "window":
            weight, smallest = weight / weight.sum(dim=1, keepdim=True).clamp(min=smallest), 1e-8
        z = own["span"].flatten()[head]
        mask = ((model.span_ramp + z * model.max_attention_span + 1 - distance) / model.span_ramp).clamp(0, 1)
        weight = torch.cat([weight[:, : distance.shape[1]] * mask, weight[:, distance.shape[1] :]], dim=1)
    weight = weight / (weight.sum(dim=1, keepdim=True) + smallest)
    out = weight[:, : distance.shape[1]] @ value
    return out + weight[:, distance.shape[1] :] @ (math.sqrt(count) * own["persistent.value"][head]) if count else out


def _norm(x: Tensor, own: dict[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean(dim=1, keepdim=True)
    scaled = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    return scaled * own[f"{name}.weight"] + own[f"{name}.bias"]
