"""Comparison with what the paper's published code computes from one of its own checkpoints: CASE.pt and CASE.json.

The checkpoint says what the model is; the JSON file has the ramp of its span mask, a sequence of tokens and that code's
scores of it: the mean over all predictions, single ones, its own evaluation protocol, a greedy continuation
(docs/reference_cases.md). That code computes in float32, so its numbers are off by rounding.
"""

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_allattn.checkpoint import adaptive_span
from megatron_allattn.checkpoint.companion import check_companion, read_companion
from megatron_allattn.config import ModelConfig, ParallelConfig, RunConfig, UsageError, check_world, usage_error
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.inference.decoding import continuations, read_prompt
from megatron_allattn.inference.reader import Reader, named_attend
from megatron_allattn.inference.sampling import greedy
from megatron_allattn.inference.scoring import code_protocol, score
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.model.initialization import load_logical
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.training.reference import CaseReport

# What counts as equal. Means (mean_nll, code_protocol): relative; single predictions (nll): relative above 1 nat,
# absolute below; the least margin of the greedy choices: absolute; greedy: tokens that differ. The recorded numbers
# carry float32 rounding, so no replay comes closer than some 1e-7.
LIMITS = {
    torch.float64: {"mean_nll": 2e-7, "code_protocol": 2e-7, "nll": 5e-6, "greedy": 0.0, "greedy_margin": 1e-5},
    torch.float32: {"mean_nll": 1e-6, "code_protocol": 1e-6, "nll": 5e-5, "greedy": 0.0, "greedy_margin": 5e-5},
}

_GIVE = "give one of the recorded .pt files with its .json file beside it"
_KEYS = {"config", "tokens", "block", "mean_nll"}
_OPTIONAL = {"first_ten_nll", "last_ten_nll", "code_protocol", "greedy", "vocabulary", "note"}
_GREEDY = {"prompt", "tokens", "smallest_margin"}


@dataclass(frozen=True)
class Greedy:
    """A continuation by the likeliest token; margin: the least gap, in nats, between first and second choice."""

    prompt: list[int]
    tokens: list[int]
    margin: float


@dataclass(frozen=True)
class Recorded:
    """A case. protocol: mean nats by batch size; nll: nats of single predictions by their place, from 0 or from −1."""

    name: str
    model: ModelConfig
    vocab_size: int
    weights: dict[str, Tensor]
    tokens: np.ndarray
    block: int
    mean_nll: float
    nll: dict[int, float]
    protocol: dict[int, float]
    greedy: Greedy | None


def read_recorded(path: Path, tensor_size: int = 1, normalization: Literal["window", "span"] = "window") -> Recorded:
    """Read CASE.pt and CASE.json; normalization: `window` is what was recorded.

    Raises UsageError: not such a case, or not one for this many processes.
    """
    beside = path.with_suffix(".json")
    found, content = adaptive_span.read(path), read_companion(beside)
    config, shape = content.get("config"), found.model.shape
    if shape["adaptive_span"]:
        if not isinstance(config, dict) or "span_ramp" not in config:
            raise usage_error("file", beside, "has no config with a span_ramp", _GIVE)
        shape = {**shape, "span_ramp": config["span_ramp"]}
    try:
        model = ModelConfig(**shape, span_normalization=normalization)
        check_companion(beside, content, model, found.model.vocab_size)
        check_world(
            RunConfig(model=model, parallel=ParallelConfig(tensor_model_parallel_size=tensor_size)), tensor_size
        )
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return _Reader(beside, found.model.vocab_size).case(path.stem, model, found.model.weights, content)


class _Reader:
    """The values of a JSON file; each that is missing, unknown or of another kind is a UsageError that names it."""

    def __init__(self, source: Path, vocab_size: int) -> None:
        self.source, self.vocab_size = source, vocab_size

    def case(self, name: str, model: ModelConfig, weights: dict[str, Tensor], content: dict[str, Any]) -> Recorded:
        self._keys("", content, _KEYS, _OPTIONAL)
        first, last = (self._numbers(key, content.get(key, [])) for key in ("first_ten_nll", "last_ten_nll"))
        protocol = dict(content.get("code_protocol", {}))
        protocol.pop("note", None)
        return Recorded(
            name=name,
            model=model,
            vocab_size=self.vocab_size,
            weights=weights,
            tokens=np.array(self._ids("tokens", content["tokens"], at_least=max(2, len(first) + 1, len(last) + 1))),
            block=self._count("block", content["block"]),
            mean_nll=self._number("mean_nll", content["mean_nll"]),
            nll=dict(enumerate(first)) | {index - len(last): value for index, value in enumerate(last)},
            protocol={self._batch(key): self._number(key, value) for key, value in protocol.items()},
            greedy=self._greedy(content["greedy"]) if "greedy" in content else None,
        )

    def _greedy(self, content: Any) -> Greedy:
        self._keys("greedy ", content, _GREEDY, {"note"})
        prompt, tokens = (self._ids(f"greedy {key}", content[key], at_least=1) for key in ("prompt", "tokens"))
        return Greedy(prompt, tokens, self._number("smallest_margin", content["smallest_margin"]))

    def _keys(self, what: str, content: Any, required: set[str], optional: set[str]) -> None:
        found = set(content) if isinstance(content, dict) else set()
        if differing := sorted((required - found) | (found - required - optional)):
            raise usage_error("file", self.source, f"lacks or adds {what}{', '.join(differing)}", _GIVE)

    def _batch(self, key: str) -> int:
        prefix, _, size = key.partition("_")
        if prefix != "batch" or not size.isdecimal() or not int(size):
            raise usage_error("file", self.source, f"code_protocol {key}: expected batch_1, batch_8, …", _GIVE)
        return int(size)

    def _count(self, what: str, value: Any) -> int:
        if type(value) is not int or value < 1:
            raise usage_error("file", self.source, f"{what} is {value!r}, expected a number from 1", _GIVE)
        return value

    def _number(self, what: str, value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise usage_error("file", self.source, f"{what} holds {value!r}, expected a number", _GIVE)
        return float(value)

    def _numbers(self, what: str, values: Any) -> list[float]:
        if not isinstance(values, list):
            raise usage_error("file", self.source, f"{what} is not a list", _GIVE)
        return [self._number(what, value) for value in values]

    def _ids(self, what: str, values: Any, at_least: int) -> list[int]:
        if not isinstance(values, list) or len(values) < at_least:
            raise usage_error("file", self.source, f"{what} is not a list of at least {at_least} tokens", _GIVE)
        if bad := [value for value in values if type(value) is not int or not 0 <= value < self.vocab_size]:
            rule = f"{what} holds {bad[0]!r}, which is not in 0 … {self.vocab_size - 1}"
            raise usage_error("file", self.source, rule, _GIVE)
        return values


def verify_recorded(
    case: Recorded, groups: Groups, device: torch.device, dtype: torch.dtype, backend: str = "cached"
) -> CaseReport:
    """Score a case's tokens and report the largest differences. Collective over the tensor group.

    dtype: float64 or float32; backend: of attention, see `named_attend`.
    """
    attend = named_attend(backend, case.model, device, dtype)
    network = Network(case.model, case.vocab_size, groups.tensor, FusedOps("torch"))
    network.to(device=device, dtype=dtype).requires_grad_(False)
    load_logical(network, case.weights)
    block = case.block
    scored = score(
        network, groups, case.tokens, num_streams=1, block_length=block, device=device, keep_nats=True, attend=attend
    )
    assert scored.nats is not None
    found = {"mean_nll": abs(scored.mean_nats - case.mean_nll) / case.mean_nll}
    if case.nll:
        found["nll"] = max(abs(scored.nats[place] - value) / max(1.0, value) for place, value in case.nll.items())
    for batch, expected in case.protocol.items():
        protocol = code_protocol(
            network, groups, case.tokens, num_streams=batch, block_length=block, device=device, attend=attend
        )
        difference = abs(protocol.mean_nats - expected) / expected
        found["code_protocol"] = max(found.get("code_protocol", 0.0), difference)
    if case.greedy is not None:
        tokens, margin = _continue(network, case.greedy.prompt, len(case.greedy.tokens), attend)
        found["greedy"] = float(sum(a != b for a, b in zip(tokens, case.greedy.tokens, strict=True)))
        found["greedy_margin"] = abs(margin - case.greedy.margin)
    found = {what: math.inf if math.isnan(value) else value for what, value in found.items()}
    return CaseReport(case.name, found, {what: LIMITS[dtype][what] for what in found})


def _continue(network: Network, prompt: list[int], count: int, attend: Attend | None) -> tuple[list[int], float]:
    """The `count` likeliest tokens after the prompt, each given those before it, and the least margin of a choice."""
    margins = []

    def choose(log_probs: Tensor) -> Tensor:
        best, second = log_probs[0].topk(2).values.tolist()
        margins.append(best - second)
        return greedy(log_probs)

    reader = Reader(network, find_spans(network, local_spans(network)), 1, attend)
    steps = continuations(reader, read_prompt(reader, prompt), choose)
    tokens = [token for [token] in islice(steps, count)]
    return tokens, min(margins)
