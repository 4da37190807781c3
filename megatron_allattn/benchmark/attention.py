"""The attention of a network's layers alone, forward and backward: q, k and v projections to the heads' outputs.

Needs torch (and triton for its backend) and nothing else, so that it runs on a machine that was only lent. Every layer
has the same random weights and spans of its own; the block's hidden states and the cache are random.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.benchmark.machine import rate_name, rates
from megatron_allattn.benchmark.networks import SEED, Z
from megatron_allattn.benchmark.timing import alternate, ratios, seconds, summarize
from megatron_allattn.config import ModelConfig
from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.model.backends import backend_of
from megatron_allattn.model.span import cache_length, layer_windows, layers_look_back, span_in_tokens
from megatron_allattn.model.work import flops_by_part
from megatron_allattn.parallel.random import DropoutKeys

MACHINE = "machine"
_PARTS = ("block", "cached", "attention")  # of model/work.py: what runs here


@dataclass(frozen=True)
class AttentionCase:
    """What to run. z: of every head of every layer; dtype: a name of `DTYPES` or "float64"; rounded: the type in which
    weights and inputs are drawn before they become `dtype`, so that a wider one computes from the same numbers."""

    model: ModelConfig
    batch: int
    block: int
    z: Z
    device: str
    dtype: str
    backend: str
    rounded: str | None = None


class Attention:
    """Call it for the seconds of one forward and backward pass through every layer."""

    def __init__(self, case: AttentionCase) -> None:
        self.case, self.device, self.number = case, torch.device(case.device), 0
        model, self.dtype = case.model, getattr(torch, case.dtype)
        heads, hidden = model.num_attention_heads, model.hidden_size
        size, length, vectors = model.head_size, model.max_attention_span, model.persistent_memory_size
        self.backend = backend_of(model, case.backend, self.device, self.dtype)
        self._generator = torch.Generator().manual_seed(SEED)
        self.settings = AttentionSettings(
            max_span=length,
            ramp=model.span_ramp,
            position_values=model.position_values,
            empty_cache=model.empty_cache,
            dropout=model.attention_dropout,
            normalization="span",
        )
        scale = 1 / math.sqrt(hidden)
        self.weights = LayerWeights(
            query=self._draw(hidden, hidden, scale=scale),
            key=self._draw(hidden, hidden, scale=scale),
            value=self._draw(hidden, hidden, scale=scale),
            persistent_key=self._draw(heads, size, vectors) if vectors else None,
            persistent_value=self._draw(heads, vectors, size) if vectors else None,
            span=None,
            position_key=self._draw(1, size, length),
        )
        self.hidden = self._draw(case.batch, case.block, hidden)
        self.gradient = self._draw(case.batch, case.block, hidden).detach()
        self.z = [torch.tensor(z, device=self.device, dtype=self.dtype).view(-1, 1, 1).requires_grad_() for z in case.z]
        rounded = [z.flatten().tolist() for z in self.z]  # what the mask sees
        self.windows = layer_windows(rounded, length, model.span_ramp)
        self.reach = layers_look_back(rounded, self.windows, length, model.span_ramp)
        self.caches = [self._draw(case.batch, cache_length(window, length), hidden).detach() for window in self.windows]
        self.heads = torch.arange(heads, dtype=torch.int32, device=self.device)
        self.streams = torch.arange(case.batch, dtype=torch.int32, device=self.device)

    def _draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator).mul_(scale)
        if self.case.rounded is not None:
            drawn = drawn.to(getattr(torch, self.case.rounded))
        return drawn.to(self.device, self.dtype).requires_grad_()

    def _attend(self, layer: int) -> tuple[Tensor, dict[str, Tensor]]:
        """A layer's output and what gets a gradient."""
        weights = replace(self.weights, span=self.z[layer])
        state = BlockState(
            window=self.windows[layer],
            cached=self.caches[layer].shape[1],
            heads=self.heads,
            layer=layer,
            dropout_keys=DropoutKeys(SEED, self.number, self.streams),
            spans=self.reach[layer],
        )
        y = self.backend.attend(self.hidden, self.caches[layer], weights, self.settings, state)
        named = {name: tensor for name, tensor in vars(weights).items() if tensor is not None}
        return y, {"hidden": self.hidden, **named}

    def results(self, layer: int) -> dict[str, Tensor]:
        """A layer's `output` and the gradient of everything that has one, float64 on the CPU."""
        y, leaves = self._attend(layer)
        gradients = torch.autograd.grad(y, list(leaves.values()), self.gradient)
        found = {"output": y.detach(), **dict(zip(leaves, gradients, strict=True))}
        return {name: tensor.double().cpu() for name, tensor in found.items()}

    def _pass(self) -> None:
        for layer in range(len(self.z)):
            y, leaves = self._attend(layer)
            torch.autograd.grad(y, list(leaves.values()), self.gradient)

    def __call__(self) -> float:
        self.number += 1
        return seconds(self._pass, self.device)

    def gflop(self) -> dict[str, float]:
        """The work of one pass over all layers, by what `model.work` calls it."""
        case, model = self.case, replace(self.case.model, num_layers=len(self.z))
        parts = flops_by_part(model, 1, case.batch, case.block, self.reach, self.backend.name)
        return {kind: sum(getattr(parts[part], kind) for part in _PARTS) / 1e9 for kind in ("model", "executed")}


def measure_attention(
    cases: Mapping[str, AttentionCase], *, runs: int, warmup: int, sizes: tuple[int, int] | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The results of every case, by name, and the machine's rates of the same rounds; all in this process."""
    built = {name: Attention(case) for name, case in cases.items()}
    device = next(iter(cases.values())).device
    found: dict[str, list[Any]] = alternate({**built, MACHINE: rates(device, *(sizes or ()))}, runs, warmup)
    measured = found.pop(MACHINE)
    by_rate = {name: [one[name] for one in measured] for name in measured[0]}
    results = {}
    for name, attention in built.items():
        case, work, times = attention.case, attention.gflop(), found[name]
        gflops = [work["model"] / took for took in times]
        spans = span_in_tokens(torch.tensor(case.z), case.model.max_attention_span, case.model.span_ramp)
        results[name] = {
            "seconds": summarize(times).to_dict(),
            "tokens_per_second": case.batch * case.block / summarize(times).median,
            "gflop": work,
            "gflops": summarize(gflops).median,
            "share": ratios(gflops, by_rate[rate_name(case.dtype, case.device)]).median,
            "dtype": case.dtype,
            "attention_backend": attention.backend.name,
            "span_mean": spans.mean().item(),
            "span_max": spans.max().item(),
        }
    return results, {name: summarize(values).to_dict() for name, values in by_rate.items()}
