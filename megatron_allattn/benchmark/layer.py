"""Whole layers, forward and backward: all-attention beside other layers of as many parameters, taking turns.

A case is a stack of `num_layers` layers. Ours have full caches of random hidden states and the spans of a profile;
peers (peers.py) attend causally inside the block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_allattn.benchmark.machine import DTYPES, rates
from megatron_allattn.benchmark.networks import SEED, Z, full_cache, random_network
from megatron_allattn.benchmark.peers import PEERS
from megatron_allattn.benchmark.timing import alternate, ratios, seconds, summarize
from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.backends import backend_of
from megatron_allattn.parallel.random import DropoutKeys

MACHINE = "machine"


@dataclass(frozen=True)
class LayerCase:
    """A stack of layers. layer: a name of `PEERS`, or an attention backend for the all-attention layer."""

    model: ModelConfig
    batch: int
    block: int
    z: Z
    device: str
    dtype: str
    layer: str


class OwnLayers(nn.Module):
    """The layers of a network, without its vocabulary; every pass reads the same caches."""

    def __init__(self, case: LayerCase, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        backend = backend_of(case.model, case.layer, device, dtype)
        network = random_network(case.model, 2, case.z, device, dtype, backend.attend)
        spans = find_spans(network, local_spans(network))
        keys = DropoutKeys(SEED, 1, torch.arange(case.batch, dtype=torch.int32, device=device))
        cache = full_cache(network, spans.windows, case.batch)
        self.position, self.layers = network.position, network.layers
        self.context = BlockContext(spans.windows, cache, keys, look_back=spans.look_back)

    def forward(self, x: Tensor) -> Tensor:
        position = self.position()
        for layer in self.layers:
            x = layer(x, position, self.context)
        return x


class Layers:
    """Call it for the seconds of one forward and backward pass through the stack."""

    def __init__(self, case: LayerCase) -> None:
        torch.manual_seed(SEED)
        self.device, dtype = torch.device(case.device), DTYPES[case.dtype]
        make = PEERS.get(case.layer)
        if make is None:
            self.stack: nn.Module = OwnLayers(case, self.device, dtype)
        else:
            self.stack = nn.Sequential(*(make(case.model) for _ in range(case.model.num_layers)))
        self.stack.to(self.device, dtype)
        self.hidden, self.gradient = (
            torch.randn(case.batch, case.block, case.model.hidden_size).to(self.device, dtype) for _ in range(2)
        )
        self.leaves = [self.hidden.requires_grad_(), *self.stack.parameters()]

    @property
    def parameters(self) -> int:
        """Weights of the layers; the position table, which all share, is left out."""
        own = {name: p.numel() for name, p in self.stack.named_parameters() if not name.startswith("position.")}
        return sum(own.values())

    def _pass(self) -> None:
        torch.autograd.grad(self.stack(self.hidden), self.leaves, self.gradient)

    def __call__(self) -> float:
        return seconds(self._pass, self.device)


def measure_layers(
    cases: Mapping[str, LayerCase], *, runs: int, warmup: int, sizes: tuple[int, int] | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The results of every case, by name, and the machine's rates of the same rounds.

    `first_over_this`: tokens per second of the first case over those of this one, a median over rounds.
    """
    built = {name: Layers(case) for name, case in cases.items()}
    device = next(iter(cases.values())).device
    timed: dict[str, Callable[[], Any]] = {**built, MACHINE: rates(device, *(sizes or ()))}
    found = alternate(timed, runs, warmup)
    measured = found.pop(MACHINE)
    first = found[next(iter(cases))]
    results = {}
    for name, times in found.items():
        case = cases[name]
        results[name] = {
            "seconds": summarize(times).to_dict(),
            "tokens_per_second": case.batch * case.block / summarize(times).median,
            "first_over_this": ratios(times, first).median,
            "parameters_per_layer": built[name].parameters / case.model.num_layers,
        }
    return results, {name: summarize([one[name] for one in measured]).to_dict() for name in measured[0]}
