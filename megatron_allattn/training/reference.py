"""Comparison with recorded numbers of the paper's published code (the NPZ files of the reference set).

A case or a curve (`reference_case`) is replayed through `PlainEngine`: the same forward, optimizer and caches as in
training.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_allattn.engine.interface import Engine, Spans
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.backends import backend_of
from megatron_allattn.model.initialization import load_logical
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.training.reference_case import TOKEN_LOSSES, Case
from megatron_allattn.training.schedules import learning_rate

# What counts as equal. Losses: relative; gradients: of a tensor, to its largest element; log-probabilities, weights and
# mean spans: absolute; losses of tokens (nll): relative above 1 nat, absolute below. Adagrad's first steps divide a
# gradient by itself: of the smallest ones (1e-11 where the largest is 0.1) rounding is a visible part, hence the room
# for weights and for what the next step computes from them.
CASE_LIMITS = {
    torch.float64: {"losses": 1e-11, "log_probs": 1e-9, "nll": 1e-9, "gradients": 1e-8, "weights": 1e-7},
    torch.float32: {"losses": 1e-5, "log_probs": 1e-3, "nll": 1e-3, "gradients": 2e-3, "weights": 2e-3},
}
# Without the 1e-8 of the paper's renormalization (--span-normalization span).
SPAN_LIMITS = {"losses": 1e-8, "log_probs": 1e-5, "nll": 1e-5, "gradients": 1e-5, "weights": 1e-5}
SPAN_CURVE_STEPS, SPAN_CURVE_LIMITS = 20, {"losses": 1e-6, "span_mean": 1e-6}
# Rounding grows along a curve, a thousandfold every 30 steps or so: every step is compared up to the one given here,
# beyond it only the mean of the losses.
CURVE_STEPS = {torch.float64: 100, torch.float32: 10}
CURVE_LIMITS = {
    torch.float64: {"losses": 1e-7, "span_mean": 1e-7, "mean_loss_beyond": 1e-2, "mean_of_last_50": 1e-2},
    torch.float32: {"losses": 1e-4, "span_mean": 1e-4, "mean_loss_beyond": 1e-2, "mean_of_last_50": 1e-2},
}
# The paper's code computes the losses of its adaptive softmax in float32, whatever the rest is in: an exact replay in
# float64 is this far away, and its curve departs as one in float32 does.
ADAPTIVE_LIMIT = 1e-5


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


def case_engine(
    case: Case,
    groups: Groups,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Engine] = PlainEngine,
    backend: str = "eager",
) -> Engine:
    """An engine at a case's initial weights."""
    fused, model = FusedOps("torch"), case.run.model
    attend = backend_of(model, backend, device, dtype).attend
    network = Network(model, case.vocab_size, groups.tensor, fused, attend).to(dtype)
    load_logical(network, case.initial_weights())
    return kind(network, case.run, groups, device, dtype, fused)


def verify_case(
    case: Case,
    groups: Groups,
    device: torch.device,
    dtype: torch.dtype,
    steps: int | None = None,
    kind: type[Engine] = PlainEngine,
    backend: str = "eager",
) -> CaseReport:
    """Replay a case or a curve (all of it, or its first `steps`) and report the largest differences.

    dtype: float64, or float32, which is all that a DeepSpeedEngine of `kind` can do; backend: of attention. Collective
    over the tensor group.
    """
    engine = case_engine(case, groups, device, dtype, kind, backend)
    steps = case.steps if steps is None else steps
    exact_steps, limits = _allowed(case, dtype)
    found = (
        _replay_curve(case, engine, steps, exact_steps) if case.is_curve else _replay_steps(case, engine, steps)
    ).values
    return CaseReport(case.name, found, {what: limit for what, limit in limits.items() if what in found})


def _allowed(case: Case, dtype: torch.dtype) -> tuple[int, dict[str, float]]:
    """How many steps of a curve are compared one by one, and the limits of a case or a curve."""
    exact = case.run.model.span_normalization == "window" or not case.run.model.adaptive_span
    if not case.is_curve:
        limits = CASE_LIMITS[dtype]
        if not exact:
            limits = {what: max(limit, SPAN_LIMITS[what]) for what, limit in limits.items()}
        return 0, {what: max(limit, ADAPTIVE_LIMIT) for what, limit in limits.items()} if case.is_adaptive else limits
    precision = torch.float32 if case.is_adaptive else dtype  # the lower one of what is replayed and what was recorded
    steps, limits = CURVE_STEPS[precision], CURVE_LIMITS[precision]
    if exact:
        return steps, limits
    limits = {what: max(limit, SPAN_CURVE_LIMITS.get(what, 0.0)) for what, limit in limits.items()}
    return min(steps, SPAN_CURVE_STEPS), limits


def _replay_steps(case: Case, engine: Engine, steps: int) -> _Largest:
    largest = _Largest()
    for step in range(steps):
        inputs, targets = case.block(step)
        spans = engine.spans()
        for kind in TOKEN_LOSSES:
            if (recorded := case.arrays.get(f"step{step}/{kind}")) is not None:
                wanted = targets if kind == "nll" else None
                unit = np.maximum(np.abs(recorded), 1.0) if kind == "nll" else 1.0
                largest.add(kind, _absolute(_predict(engine, inputs, wanted, spans), recorded, unit))
        loss = engine.forward_backward(inputs, targets, step + 1, spans)
        span_loss = 0.0
        if spans.z is not None:
            model = case.run.model
            span_loss = model.span_loss * model.max_attention_span * spans.z.double().mean(dim=1).sum().item()
        for value, expected in zip((loss, loss + span_loss), case.arrays["losses"][step], strict=True):
            largest.add("losses", abs(value - expected) / abs(expected))
        in_full = f"step{step}/updated/position.key" in case.arrays
        for logical, gradient in engine.gradients() if in_full else ():
            expected = case.gradient(step, logical.name)
            largest.add("gradients", _absolute(gradient, expected) / max(float(np.abs(expected).max()), 1e-30))
        engine.update(learning_rate(case.run.optimizer, case.steps, step + 1), step + 1)
        for logical, weight in engine.weights() if in_full else ():
            largest.add("weights", _absolute(weight, case.arrays[f"step{step}/updated/{logical.name}"]))
    return largest


def _replay_curve(case: Case, engine: Engine, steps: int, exact: int) -> _Largest:
    largest, pairs = _Largest(), []
    for step in range(steps):
        loss = engine.forward_backward(*case.block(step), step + 1, engine.spans())
        engine.update(learning_rate(case.run.optimizer, case.steps, step + 1), step + 1)
        expected = float(case.arrays["losses"][step])
        pairs.append((loss, expected))
        if step >= exact:
            continue
        largest.add("losses", abs(loss - expected) / expected)
        if (z := engine.spans().z) is not None:
            largest.add("span_mean", abs(z.double().mean().item() - float(case.arrays["span_mean"][step])))
    for what, part in (
        ("mean_loss_beyond", pairs[exact:]),
        ("mean_of_last_50", pairs[-50:] if steps == case.steps else []),
    ):
        if part:
            found, expected = np.mean(part, axis=0).tolist()
            largest.add(what, abs(found - expected) / expected)
    return largest


@torch.no_grad()
def _predict(engine: Engine, inputs: np.ndarray, targets: np.ndarray | None, spans: Spans) -> Tensor:
    """What the network says of the next block before it is trained on: nats of targets, or all log-probabilities."""
    context = BlockContext(spans.windows, engine.slots[0], dropout_keys=None, look_back=spans.look_back)
    ids = [None if array is None else torch.from_numpy(array).to(engine.device) for array in (inputs, targets)]
    return engine.network(ids[0], context, ids[1])


def _absolute(found: Tensor, expected: np.ndarray, unit: np.ndarray | float = 1.0) -> float:
    return float((np.abs(found.double().cpu().numpy() - expected) / unit).max())
