"""Comparison with recorded numbers of the paper's published code (the NPZ files of the reference set).

A *case* holds initial weights, tokens, the loss and log-probabilities of every step, and gradients and updated weights
of the first and last step. A *curve* holds initial weights, tokens, and the loss and mean span of every step of a
longer run. Either is replayed through `PlainEngine`: the same forward, optimizer and caches as in training. Names in a
file are our logical names.
"""

import json
import math
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_allattn.config import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
    UsageError,
    check_world,
)
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.initialization import load_logical
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE, Groups
from megatron_allattn.parallel.vocabulary import gather_logits
from megatron_allattn.training.schedules import learning_rate

# What counts as equal. Losses: relative; gradients: of a tensor, to its largest element; log-probabilities, weights and
# mean spans: absolute.
CASE_LIMITS = {
    torch.float64: {"losses": 1e-12, "log_probs": 1e-11, "gradients": 1e-9, "weights": 1e-9},
    torch.float32: {"losses": 1e-5, "log_probs": 1e-3, "gradients": 2e-3, "weights": 2e-3},
}
# Rounding grows along a curve, a thousandfold every 30 steps or so: every step is compared up to the one given here,
# beyond it only the mean of the losses.
CURVE_STEPS = {torch.float64: 100, torch.float32: 10}
CURVE_LIMITS = {
    torch.float64: {"losses": 1e-7, "span_mean": 1e-7, "mean_loss_beyond": 1e-2},
    torch.float32: {"losses": 1e-4, "span_mean": 1e-4, "mean_loss_beyond": 1e-2},
}

_MODEL_KEYS = frozenset({"vocab", "d", "heads", "layers", "N", "span", "adapt_span", "ramp", "span_loss"})
_KEYS = _MODEL_KEYS | {"block", "batch", "steps", "optim", "lr", "clip"}
_OPTIONAL_KEYS = frozenset({"seed", "ff", "warmup", "adapt_io"})
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)
_GIVE = "give one of the recorded .npz files"


@dataclass(frozen=True)
class CaseReport:
    """The largest differences found in a case, by quantity, beside what they may be."""

    name: str
    differences: dict[str, float]
    limits: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(self.differences[what] <= limit for what, limit in self.limits.items())

    def line(self) -> str:
        """One line for a table."""
        parts = [f"{what} {self.differences[what]:.1e} (≤ {limit:.0e})" for what, limit in self.limits.items()]
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name}: {', '.join(parts)}"


@dataclass
class _Largest:
    """The largest difference of each quantity; one that is not a number counts as infinite."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, difference: float) -> None:
        self.values[what] = max(self.values.get(what, 0.0), math.inf if math.isnan(difference) else difference)


@dataclass(frozen=True)
class Case:
    """A recorded case: what was run, `tokens` [batch, steps·M + 1] and every array by its name in the file."""

    name: str
    config: dict[str, Any]
    run: RunConfig
    arrays: dict[str, np.ndarray]

    @property
    def steps(self) -> int:
        return self.run.training.train_iters

    @property
    def is_curve(self) -> bool:
        return self.arrays["losses"].ndim == 1

    def block(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets [batch, M] of a step, from 0."""
        length = self.run.training.seq_length
        tokens = self.arrays["tokens"][:, step * length : (step + 1) * length + 1].astype(np.int64)
        return tokens[:, :-1], tokens[:, 1:]

    def initial_weights(self) -> dict[str, Tensor]:
        """By logical name."""
        return {name[5:]: torch.from_numpy(array) for name, array in self.arrays.items() if name.startswith("init/")}


def read_case(path: Path, tensor_size: int = 1) -> Case:
    """A recorded case, for `tensor_size` tensor-parallel ranks. Raises UsageError when it cannot be replayed."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        config = json.loads(str(arrays.pop("config")))
    except _UNREADABLE as error:
        raise UsageError(f"{path}: not a reference case ({_reason(error)}); {_GIVE}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: its configuration is not a JSON object; {_GIVE}")
    if config.get("adapt_io") or "cutoffs" in config:
        rule = "uses adaptive input and softmax, only a plain vocabulary can be replayed"
        raise UsageError(f"{path}: {rule}; leave this case out")
    odd = sorted((_KEYS - config.keys()) | (config.keys() - _KEYS - _OPTIONAL_KEYS))
    if odd:
        raise UsageError(f"{path}: its configuration lacks or adds {', '.join(odd)}; {_GIVE}")
    if config["optim"] != "adagrad":
        raise UsageError(f"{path}: optimizer {config['optim']}, only adagrad can be replayed; leave this case out")
    try:
        run = _run_config(config, tensor_size)
        check_world(run, tensor_size)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    case = Case(path.stem, config, run, arrays)
    _check_arrays(path, case)
    return case


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it has no configuration" if isinstance(error, KeyError) else "not a readable NPZ archive"


def _run_config(config: dict[str, Any], tensor_size: int) -> RunConfig:
    """The run that a case's configuration describes."""
    return RunConfig(
        model=ModelConfig(
            num_layers=config["layers"],
            hidden_size=config["d"],
            num_attention_heads=config["heads"],
            persistent_memory_size=config["N"],
            max_attention_span=config["span"],
            adaptive_span=config["adapt_span"],
            span_loss=config["span_loss"],
            span_ramp=config["ramp"],
            variant="transformer" if "ff" in config else "all-attn",
            feed_forward_size=config.get("ff", 0),
        ),
        parallel=ParallelConfig(tensor_model_parallel_size=tensor_size),
        optimizer=OptimizerConfig(
            optimizer="adagrad",
            lr=config["lr"],
            lr_decay_style="constant",
            lr_warmup_iters=config.get("warmup", 0),
            clip_grad=config["clip"],
        ),
        training=TrainingConfig(
            seq_length=config["block"], global_batch_size=config["batch"], train_iters=config["steps"]
        ),
    )


def _check_arrays(path: Path, case: Case) -> None:
    """Every array that is compared is there in the right shape, so that nothing is left out or broadcast in silence."""
    training, vocab_size, steps = case.run.training, case.config["vocab"], case.steps
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise UsageError(f"{path}: its configuration gives a vocabulary of {vocab_size} tokens; {_GIVE}")
    batch, length = training.global_batch_size, training.seq_length
    expected: dict[str, tuple[int, ...]] = {"tokens": (batch, steps * length + 1)}
    with torch.device("meta"):
        network = Network(case.run.model, vocab_size, ALONE, FusedOps("torch"))
    weights = {logical.name: logical.shape for logical, _ in network.logical_parameters()}
    expected.update({f"init/{name}": shape for name, shape in weights.items()})
    if "losses" in case.arrays and case.is_curve:
        expected.update(losses=(steps,), span_mean=(steps,))
    else:
        expected.update(losses=(steps, 2))
        expected.update({f"step{step}/log_probs": (batch, length, vocab_size) for step in range(steps)})
        for step in {0, steps - 1}:
            for name, shape in weights.items():
                expected[f"step{step}/grad/{name}"] = expected[f"step{step}/updated/{name}"] = shape
    found = {name: array.shape for name, array in case.arrays.items()}
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differing:
        name = differing[0]
        shapes = f"expected {expected.get(name, 'no such array')}, found {found.get(name, 'none')}"
        raise UsageError(f"{path}: {len(differing)} arrays differ from its configuration, first {name}: {shapes}")
    tokens = case.arrays["tokens"]
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UsageError(f"{path}: its tokens are not all in 0 … {vocab_size - 1}; {_GIVE}")
    if other := sorted(name for name in expected if name != "tokens" and case.arrays[name].dtype.kind != "f"):
        raise UsageError(f"{path}: {other[0]} holds no floating-point numbers; {_GIVE}")


def case_engine(case: Case, groups: Groups, device: torch.device, dtype: torch.dtype) -> PlainEngine:
    """An engine at a case's initial weights."""
    fused = FusedOps("torch")
    network = Network(case.run.model, case.config["vocab"], groups.tensor, fused).double()
    load_logical(network, case.initial_weights())
    return PlainEngine(network, case.run, groups, device, dtype, fused)


def verify_case(
    case: Case, groups: Groups, device: torch.device, dtype: torch.dtype, steps: int | None = None
) -> CaseReport:
    """Replay a case or a curve (all of it, or its first `steps`) and report the largest differences.

    dtype: float64 or float32. Collective over the tensor group.
    """
    engine = case_engine(case, groups, device, dtype)
    steps = case.steps if steps is None else steps
    found = (_replay_curve if case.is_curve else _replay_steps)(case, engine, steps)
    limits = (CURVE_LIMITS if case.is_curve else CASE_LIMITS)[dtype]
    return CaseReport(case.name, found.values, {what: limit for what, limit in limits.items() if what in found.values})


def _replay_steps(case: Case, engine: PlainEngine, steps: int) -> _Largest:
    largest = _Largest()
    for step in range(steps):
        inputs, targets = case.block(step)
        spans = engine.spans()
        log_probs = _log_probs(engine, inputs, spans.windows)
        largest.add("log_probs", _absolute(log_probs, case.arrays[f"step{step}/log_probs"]))
        loss = engine.forward_backward(inputs, targets, step + 1, spans)
        span_loss = 0.0
        if spans.z is not None:
            model = case.run.model
            span_loss = model.span_loss * model.max_attention_span * spans.z.double().mean(dim=1).sum().item()
        for value, expected in zip((loss, loss + span_loss), case.arrays["losses"][step], strict=True):
            largest.add("losses", abs(value - expected) / abs(expected))
        recorded = f"step{step}/grad/embedding.weight" in case.arrays
        for logical, gradient in engine.gradients() if recorded else ():
            expected = case.arrays[f"step{step}/grad/{logical.name}"]
            largest.add("gradients", _absolute(gradient, expected) / max(float(np.abs(expected).max()), 1e-30))
        engine.update(learning_rate(case.run.optimizer, case.steps, step + 1), step + 1)
        for logical, weight in engine.weights() if recorded else ():
            largest.add("weights", _absolute(weight, case.arrays[f"step{step}/updated/{logical.name}"]))
    return largest


def _replay_curve(case: Case, engine: PlainEngine, steps: int) -> _Largest:
    largest, beyond = _Largest(), []
    for step in range(steps):
        loss = engine.forward_backward(*case.block(step), step + 1, engine.spans())
        engine.update(learning_rate(case.run.optimizer, case.steps, step + 1), step + 1)
        expected = float(case.arrays["losses"][step])
        if step >= CURVE_STEPS[engine.dtype]:
            beyond.append((loss, expected))
            continue
        largest.add("losses", abs(loss - expected) / expected)
        if (z := engine.spans().z) is not None:
            largest.add("span_mean", abs(z.double().mean().item() - float(case.arrays["span_mean"][step])))
    if beyond:
        found, expected = np.mean(beyond, axis=0).tolist()
        largest.add("mean_loss_beyond", abs(found - expected) / expected)
    return largest


@torch.no_grad()
def _log_probs(engine: PlainEngine, inputs: np.ndarray, windows: tuple[int, ...]) -> Tensor:
    """Log-probabilities [B, M, V] of the next block, before it is trained on; caches keep their state."""
    network = engine.network
    context = BlockContext(windows=windows, cache=engine.slots[0], dropout_keys=None)
    logits = network(torch.from_numpy(inputs).to(engine.device), context)
    return gather_logits(logits, network.vocab_size, network.group).log_softmax(dim=-1)


def _absolute(found: Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.double().cpu().numpy() - expected).max())
