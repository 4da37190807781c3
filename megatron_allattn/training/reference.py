"""Comparison with recorded numbers of the paper's published code (the NPZ cases of the reference set).

A case holds initial weights, tokens, the loss of every step, log-probabilities, and the gradients and updated weights of the
first and last step. It is replayed through `PlainEngine`: the same forward, optimizer and caches as in training.
Names in a case are our logical names.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig, UsageError
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.initialization import load_logical
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.parallel.vocabulary import gather_logits


@dataclass(frozen=True)
class Tolerances:
    """What counts as equal. losses and gradients: relative; gradients per tensor, to its largest element; the rest absolute."""

    losses: float
    log_probs: float
    gradients: float
    weights: float


TOLERANCES = {
    torch.float64: Tolerances(losses=1e-12, log_probs=1e-11, gradients=1e-9, weights=1e-9),
    torch.float32: Tolerances(losses=1e-5, log_probs=1e-3, gradients=2e-3, weights=2e-3),
}


@dataclass(frozen=True)
class CaseReport:
    """The largest differences found in one case, in the units of `Tolerances`."""

    name: str
    losses: float
    log_probs: float
    gradients: float
    weights: float
    tolerances: Tolerances

    @property
    def passed(self) -> bool:
        return all(getattr(self, what) <= getattr(self.tolerances, what) for what in vars(self.tolerances))

    def line(self) -> str:
        """One line for a table."""
        parts = [f"{what} {getattr(self, what):.1e} (≤ {limit:.0e})" for what, limit in vars(self.tolerances).items()]
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name}: {', '.join(parts)}"


def read_case(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A case's configuration and arrays. Raises UsageError when the file is not a case that can be replayed."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        config = json.loads(str(arrays.pop("config")))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path}: not a reference case ({error}); give one of the recorded .npz files") from error
    unknown = {"cutoffs", "divval"} & config.keys() or ({config["optim"]} - {"adagrad"})
    if unknown or "losses" not in arrays:
        raise UsageError(f"{path}: needs {', '.join(sorted(unknown)) or 'losses'}, which cannot be replayed; give another case")
    return config, arrays


def case_run(config: dict[str, Any], tensor_size: int) -> RunConfig:
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
            optimizer="adagrad", lr=config["lr"], lr_decay_style="constant", lr_warmup_iters=0, clip_grad=config["clip"]
        ),
        training=TrainingConfig(
            seq_length=config["block"], global_batch_size=config["batch"], train_iters=config["steps"]
        ),
    )


def case_engine(
    config: dict[str, Any], arrays: dict[str, np.ndarray], groups: Groups, device: torch.device, dtype: torch.dtype
) -> PlainEngine:
    """An engine at a case's initial weights."""
    run = case_run(config, groups.tensor.size)
    network = Network(run.model, config["vocab"], groups.tensor, FusedOps("torch")).double()
    initial = {name[5:]: torch.from_numpy(array) for name, array in arrays.items() if name.startswith("init/")}
    load_logical(network, initial)
    return PlainEngine(network, run, groups, device, dtype, FusedOps("torch"))


def verify_case(path: Path, groups: Groups, device: torch.device, dtype: torch.dtype) -> CaseReport:
    """Replay a case and report the largest differences. Collective over the tensor group."""
    config, arrays = read_case(path)
    engine = case_engine(config, arrays, groups, device, dtype)
    losses, log_probs, gradients, weights = [0.0], [0.0], [0.0], [0.0]
    for step in range(config["steps"]):
        columns = slice(step * config["block"], (step + 1) * config["block"] + 1)
        tokens = arrays["tokens"][:, columns].astype(np.int64)
        spans = engine.spans()
        log_probs.append(_absolute(_log_probs(engine, tokens[:, :-1], spans.windows), arrays[f"step{step}/log_probs"]))
        loss = engine.forward_backward(tokens[:, :-1], tokens[:, 1:], step + 1, spans)
        span_loss = 0.0 if spans.z is None else config["span_loss"] * config["span"] * spans.z.double().mean(1).sum().item()
        for found, expected in zip((loss, loss + span_loss), arrays["losses"][step]):
            losses.append(abs(found - expected) / abs(expected))
        recorded = f"step{step}/grad/embedding.weight" in arrays
        for logical, gradient in engine.gradients() if recorded else ():
            gradients.append(_relative(gradient, arrays[f"step{step}/grad/{logical.name}"]))
        engine.update(config["lr"], step + 1)
        for logical, weight in engine.weights() if recorded else ():
            weights.append(_absolute(weight, arrays[f"step{step}/updated/{logical.name}"]))
    return CaseReport(path.stem, max(losses), max(log_probs), max(gradients), max(weights), TOLERANCES[dtype])


@torch.no_grad()
def _log_probs(engine: PlainEngine, inputs: np.ndarray, windows: tuple[int, ...]) -> Tensor:
    """Log-probabilities [B, M, V] of the next block, before it is trained on; caches keep their state."""
    network = engine.network
    context = BlockContext(windows=windows, cache=engine.slots[0], dropout_keys=None)
    logits = network(torch.from_numpy(inputs).to(engine.device), context)
    return gather_logits(logits, network.vocab_size, network.group).log_softmax(dim=-1)


def _absolute(found: Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.double().cpu().numpy() - expected).max())


def _relative(found: Tensor, expected: np.ndarray) -> float:
    return _absolute(found, expected) / max(float(np.abs(expected).max()), 1e-30)
