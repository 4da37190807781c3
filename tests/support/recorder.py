"""Writes case files (docs/reference_cases.md) by an implementation of its own: plain float64 PyTorch, logical weights.

Nothing of the package is used. Attention gathers the K and V of every query by an index, softmaxes over the vocabulary
are dense, optimizers are torch's own (Adam) or written out (Adagrad).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights of a case."""
    d, heads, size, vocab = config["d"], config["heads"], config["d"] // config["heads"], config["vocab"]
    tied, shapes = config.get("tied", False), {}
    if config.get("adapt_io"):
        bounds = [0, *config["cutoffs"], vocab]
        for k in range(len(bounds) - 1):
            rows, width = bounds[k + 1] - bounds[k], d // config["divval"] ** k
            for part in ("embedding",) if tied else ("embedding", "output"):
                shapes[f"{part}.cluster{k}.weight"] = (rows, width)
                shapes[f"{part}.cluster{k}.projection"] = (d, width)
            shapes[f"output.cluster{k}.bias"] = (rows,)
        shapes["output.cluster_logits.weight"] = (len(bounds) - 2, d)
        shapes["output.cluster_logits.bias"] = (len(bounds) - 2,)
    else:
        shapes |= {"embedding.weight": (vocab, d), "output.bias": (vocab,)}
        shapes |= {} if tied else {"output.weight": (vocab, d)}
    shapes["position.key"] = (1, size, config["span"])
    for i in range(config["layers"]):
        layer = {f"{name}.weight": (d, d) for name in ("query", "key", "value", "out")}
        layer |= {"norm1.weight": (d,), "norm1.bias": (d,)}
        if config["adapt_span"]:
            layer["span"] = (heads, 1, 1)
        if config["N"]:
            layer |= {"persistent.key": (heads, size, config["N"]), "persistent.value": (heads, config["N"], size)}
        if config.get("ff"):
            ff = config["ff"]
            layer |= {"ff.in.weight": (ff, d), "ff.in.bias": (ff,), "ff.out.weight": (d, ff), "ff.out.bias": (d,)}
            layer |= {"norm2.weight": (d,), "norm2.bias": (d,)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def draw(config: dict[str, Any], seed: int) -> Weights:
    """Random weights of a reasonable size, spans inside [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes_of(config).items():
        scale = 0.3 if len(shape) > 1 else 0.1
        value = torch.randn(shape, dtype=torch.float64, generator=generator) * scale
        if name.endswith(".span"):
            value = torch.rand(shape, dtype=torch.float64, generator=generator) * 0.6
        weights[name] = value + (1.0 if ".norm" in name and name.endswith("weight") else 0.0)
    return weights


def embed(weights: Weights, config: dict[str, Any], tokens: Tensor) -> Tensor:
    if not config.get("adapt_io"):
        rows = weights["embedding.weight"][tokens]
        return rows * config["d"] ** 0.5 if config.get("tied") else rows
    tables = [
        weights[f"embedding.cluster{k}.weight"] @ weights[f"embedding.cluster{k}.projection"].T
        for k in range(len(config["cutoffs"]) + 1)
    ]
    return torch.cat(tables)[tokens] * math.sqrt(config["d"])


def log_probabilities(weights: Weights, config: dict[str, Any], hidden: Tensor) -> Tensor:
    """[..., d] → [..., V]."""
    source = "embedding" if config.get("tied") else "output"
    if not config.get("adapt_io"):
        return (hidden @ weights[f"{source}.weight"].T + weights["output.bias"]).log_softmax(-1)

    def logits(k: int) -> Tensor:
        projected = hidden @ weights[f"{source}.cluster{k}.projection"]
        return projected @ weights[f"{source}.cluster{k}.weight"].T + weights[f"output.cluster{k}.bias"]

    clusters = hidden @ weights[f"{source}.cluster0.projection"] @ weights["output.cluster_logits.weight"].T
    head = torch.cat([logits(0), clusters + weights["output.cluster_logits.bias"]], dim=-1).log_softmax(-1)
    tails = [head[..., -k, None] + logits(k).log_softmax(-1) for k in range(1, len(config["cutoffs"]) + 1)]
    return torch.cat([head[..., : config["cutoffs"][0]], *tails], dim=-1)


def attention(own: Weights, position: Tensor, config: dict[str, Any], hidden: Tensor, cached: Tensor) -> Tensor:
    """The attention sublayer of a block [B, M, d] with the L states before it [B, L, d], zeros where there are none."""
    span, heads, size = config["span"], config["heads"], config["d"] // config["heads"]
    length, window = hidden.shape[1], span
    if config["adapt_span"]:
        longest = min(span, math.ceil(own["span"].max().item() * span) + config["ramp"])
        window = span - (span - longest) // 64 * 64
    memory = torch.cat([cached, hidden], dim=1)
    query, key, value = (
        (x @ own[f"{name}.weight"].T).unflatten(-1, (heads, size))
        for x, name in ((hidden, "query"), (memory, "key"), (memory, "value"))
    )
    # row m sees the memory's positions m … m + L − 1, of which the last W count: distances W … 1
    index = torch.arange(length)[:, None] + torch.arange(span - window, span)
    distance = torch.arange(window, 0, -1)
    scores = torch.einsum("bmhk,bmwhk->bhmw", query, key[:, index] + position[0].T[-window:, None, :])
    if config["N"]:
        memory_scores = torch.einsum("bmhk,hkn->bhmn", query, own["persistent.key"] * math.sqrt(size))
        scores = torch.cat([scores, memory_scores], dim=-1)
    a = (scores / math.sqrt(size)).softmax(-1)
    if config["adapt_span"]:
        soft = ((config["ramp"] + own["span"] * span + 1 - distance) / config["ramp"]).clamp(0, 1)
        a = a * torch.cat([soft, torch.ones(heads, 1, config["N"], dtype=a.dtype)], dim=-1)
        a = a / (a.sum(-1, keepdim=True) + 1e-8)
    y = torch.einsum("bhmw,bmwhk->bmhk", a[..., :window], value[:, index])
    if config["N"]:
        y = y + torch.einsum("bhmn,hnk->bmhk", a[..., window:], own["persistent.value"] * math.sqrt(config["N"]))
    return y.flatten(2) @ own["out.weight"].T


def forward(
    weights: Weights, config: dict[str, Any], tokens: Tensor, caches: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities [B, M, V] and every layer's next cache."""
    hidden, kept, d = embed(weights, config, tokens), [], config["d"]
    for i, cached in enumerate(caches):
        own = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        kept.append(torch.cat([cached, hidden.detach()], dim=1)[:, -config["span"] :])
        hidden = hidden + attention(own, weights["position.key"], config, hidden, cached)
        hidden = F.layer_norm(hidden, (d,), own["norm1.weight"], own["norm1.bias"])
        if config.get("ff"):
            inner = (hidden @ own["ff.in.weight"].T + own["ff.in.bias"]).relu()
            hidden = hidden + inner @ own["ff.out.weight"].T + own["ff.out.bias"]
            hidden = F.layer_norm(hidden, (d,), own["norm2.weight"], own["norm2.bias"])
    return log_probabilities(weights, config, hidden), kept


class Adagrad:
    """Every tensor's step scaled by its own norm; the accumulator takes the raw gradient."""

    def __init__(self, weights: Weights, clip: float) -> None:
        self.weights, self.clip = weights, clip
        self.sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for name, weight in self.weights.items():
            gradient = weight.grad
            self.sums[name] += gradient**2
            scale = min(1.0, self.clip / (gradient.norm().item() + 1e-10)) if self.clip else 1.0
            weight -= lr * scale * gradient / (self.sums[name].sqrt() + 1e-10)


class Adam:
    def __init__(self, weights: Weights, clip: float) -> None:
        self.weights, self.clip = list(weights.values()), clip
        self.optimizer = torch.optim.Adam(self.weights)

    def step(self, lr: float) -> None:
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.weights, self.clip)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()


@dataclass(frozen=True)
class Step:
    """What a step computes before its update, and the weights after it."""

    log_probs: Tensor
    nll: Tensor
    losses: tuple[float, float]
    gradients: dict[str, np.ndarray]
    updated: dict[str, np.ndarray]


def train(weights: Weights, tokens: np.ndarray, config: dict[str, Any]) -> Iterator[Step]:
    """All steps that `config` asks for, on weights that require gradients."""
    block = config["block"]
    caches = [torch.zeros(len(tokens), config["span"], config["d"], dtype=torch.float64)] * config["layers"]
    optimizer = {"adagrad": Adagrad, "adam": Adam}[config["optim"]](weights, config["clip"] or 0.0)
    spans = [weight for name, weight in weights.items() if name.endswith(".span")]
    for step in range(config["steps"]):
        text = torch.from_numpy(tokens[:, step * block : (step + 1) * block + 1])
        log_probs, caches = forward(weights, config, text[:, :-1], caches)
        nll = -log_probs.gather(-1, text[:, 1:, None])[..., 0]
        loss = nll.mean() + sum(config["span_loss"] * config["span"] * z.mean() for z in spans)
        for weight in weights.values():
            weight.grad = None
        loss.backward()
        gradients = {name: weight.grad.numpy().copy() for name, weight in weights.items()}
        optimizer.step(config["lr"] * min(1.0, (step + 1) / (config.get("warmup") or 1)))
        for z in spans:
            z.data.clamp_(0, 1)
        updated = {name: weight.detach().numpy().copy() for name, weight in weights.items()}
        yield Step(log_probs.detach(), nll.detach(), (nll.mean().item(), loss.item()), gradients, updated)


def _start(config: dict[str, Any], seed: int) -> tuple[Weights, np.ndarray, dict[str, np.ndarray]]:
    """Weights, tokens, and the arrays that every file begins with."""
    weights = {name: weight.requires_grad_() for name, weight in draw(config, seed).items()}
    tokens = np.random.default_rng(seed).integers(
        config["vocab"], size=(config["batch"], config["steps"] * config["block"] + 1)
    )
    arrays = {"config": np.array(json.dumps(config)), "tokens": tokens}
    return (
        weights,
        tokens,
        arrays | {f"init/{name}": weight.detach().numpy().copy() for name, weight in weights.items()},
    )


def record_case(path: Path, config: dict[str, Any], *, seed: int = 0, kinds: tuple[str, ...] = ("log_probs",)) -> Path:
    """Train as `config` says and write a case. kinds: which of log_probs and nll it holds."""
    weights, tokens, arrays = _start(config, seed)
    steps = list(train(weights, tokens, config))
    for number, step in enumerate(steps):
        arrays |= {f"step{number}/{kind}": getattr(step, kind).numpy() for kind in kinds}
        if number in (0, len(steps) - 1):
            arrays |= {f"step{number}/grad/{name}": array for name, array in step.gradients.items()}
            arrays |= {f"step{number}/updated/{name}": array for name, array in step.updated.items()}
    np.savez(path, **arrays, losses=np.array([step.losses for step in steps]))
    return path


def record_curve(path: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Train as `config` says and write a curve."""
    weights, tokens, arrays = _start(config, seed)
    steps = list(train(weights, tokens, config))
    if config["adapt_span"]:
        spans = [[array for name, array in step.updated.items() if name.endswith(".span")] for step in steps]
        arrays["span_mean"] = np.array([np.mean(z) for z in spans])
    np.savez(path, **arrays, losses=np.array([step.losses[0] for step in steps]))
    return path
