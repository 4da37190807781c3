"""Time per token of cached decoding, after different numbers of tokens, and of reading the whole window each time.

The network has random weights and the spans of a profile. One reader per position has read that many random tokens in
blocks; every round each of them reads some more, one at a time, and one without keys and values kept reads the last
tokens as far as the longest head looks, which is what a next token costs without a cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_allattn.benchmark.machine import DTYPES
from megatron_allattn.benchmark.networks import SEED, Z, random_network, zipf_tokens
from megatron_allattn.benchmark.timing import alternate, ratios, seconds, summarize
from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.interface import Spans, find_spans, local_spans
from megatron_allattn.inference.decoding import PROMPT_BLOCK
from megatron_allattn.inference.reader import Reader
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.model.backends import backend_of
from megatron_allattn.model.network import Network

RECOMPUTE = "recompute"


@dataclass(frozen=True)
class GenerateCase:
    """What to run. z: None with a fixed span; batch: continuations side by side."""

    model: ModelConfig
    vocab_size: int
    batch: int
    z: Z | None
    device: str
    dtype: str


class Decoding:
    """`tokens` further tokens, one at a time, of a reader that has read `position` tokens; gives seconds per token."""

    def __init__(self, network: Network, spans: Spans, batch: int, position: int, tokens: int) -> None:
        self.device = next(network.parameters()).device
        self.reader = Reader(network, spans, batch)
        prompt = zipf_tokens(network.vocab_size, batch, position)
        for block in prompt.split(PROMPT_BLOCK, dim=1):
            self.reader(block, last_only=True)
        self.next = zipf_tokens(network.vocab_size, batch, tokens, SEED + 1).to(self.device)

    def _read(self) -> None:
        for token in self.next.split(1, dim=1):
            self.reader(token, last_only=True)

    def __call__(self) -> float:
        return seconds(self._read, self.device) / self.next.shape[1]


class Recomputing:
    """Read the window before the next token from nothing; gives the seconds, which are those of one token."""

    def __init__(self, network: Network, spans: Spans, batch: int, attend: Attend) -> None:
        self.network, self.spans, self.attend = network, spans, attend
        self.device = next(network.parameters()).device
        self.tokens = zipf_tokens(network.vocab_size, batch, max(spans.windows))

    def _read(self) -> None:
        Reader(self.network, self.spans, self.tokens.shape[0], attend=self.attend)(self.tokens, last_only=True)

    def __call__(self) -> float:
        return seconds(self._read, self.device)


def measure_generation(
    case: GenerateCase, positions: Sequence[int], *, tokens: int, runs: int, warmup: int
) -> dict[str, Any]:
    """Seconds per token at each position and by recomputing, and how many times faster the last position is."""
    device, dtype = torch.device(case.device), DTYPES[case.dtype]
    backend = backend_of(case.model, "auto", device, dtype)
    network = random_network(case.model, case.vocab_size, case.z, device, dtype, backend.attend)
    network.requires_grad_(False).fold_scales()
    spans = find_spans(network, local_spans(network))
    cases: dict[str, Decoding | Recomputing] = {
        str(position): Decoding(network, spans, case.batch, position, tokens) for position in positions
    }
    cases[RECOMPUTE] = Recomputing(network, spans, case.batch, backend.attend)
    return generation_result(alternate(cases, runs, warmup), case, max(spans.windows))


def generation_result(found: Mapping[str, list[float]], case: GenerateCase, window: int) -> dict[str, Any]:
    """The numbers for the JSON file from the seconds of every run."""
    decoding = {name: times for name, times in found.items() if name != RECOMPUTE}
    *_, last = decoding.values()
    medians = [summarize(times).median for times in decoding.values()]
    return {
        "seconds_per_token": {name: summarize(times).to_dict() for name, times in decoding.items()},
        "tokens_per_second": case.batch / medians[-1],
        "flatness": max(medians) / min(medians) - 1,
        "recompute_seconds": summarize(found[RECOMPUTE]).to_dict(),
        "recompute_tokens": window,
        "times_faster": ratios(found[RECOMPUTE], last).median,
        "dtype": case.dtype,
    }
