"""Recorded numbers of the paper's published code, read from NPZ files. docs/reference_cases.md describes the format.

A *case* holds initial weights, tokens, the loss of every token of every step, and gradients and updated weights of the
first and last step. A *curve* holds initial weights, tokens, and the loss and mean span of every step of a longer run.
Names in a file are our logical names.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
    check_vocabulary,
    check_world,
)
from megatron_allattn.config.checks import check_regular
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE

ALWAYS = ("vocab", "d", "heads", "layers", "N", "span", "adapt_span", "block", "batch", "steps", "optim", "lr", "clip")
WITH_ADAPTIVE_SPAN = ("ramp", "span_loss")
WITH_ADAPTIVE_IO = ("cutoffs", "divval", "tied")
AT_WILL = ("adapt_io", "ff", "warmup", "seed")
FLAGS = {  # what a key is called where its value is checked
    "--hidden-size": "d",
    "--num-attention-heads": "heads",
    "--num-layers": "layers",
    "--persistent-memory-size": "N",
    "--max-attention-span": "span",
    "--span-ramp": "ramp",
    "--span-loss": "span_loss",
    "--adaptive-cutoffs": "cutoffs",
    "--adaptive-div-value": "divval",
    "--feed-forward-size": "ff",
    "--seq-length": "block",
    "--global-batch-size": "batch",
    "--train-iters": "steps",
    "--lr-warmup-iters": "warmup",
    "--lr": "lr",
    "--clip-grad": "clip",
}
TOKEN_LOSSES = ("log_probs", "nll")
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)
_GIVE = "give a case as docs/reference_cases.md describes it"


@dataclass(frozen=True)
class Case:
    """A recorded case: what was run, `tokens` [batch, steps·M + 1] and every array by its name in the file."""

    name: str
    vocab_size: int
    run: RunConfig
    arrays: dict[str, np.ndarray]

    @property
    def steps(self) -> int:
        return self.run.training.train_iters

    @property
    def is_curve(self) -> bool:
        return self.arrays["losses"].ndim == 1

    @property
    def is_adaptive(self) -> bool:
        """Whether it has adaptive input and softmax, whose losses the paper's code computes in float32."""
        return bool(self.run.model.cutoffs)

    def block(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets [batch, M] of a step, from 0."""
        length = self.run.training.seq_length
        tokens = self.arrays["tokens"][:, step * length : (step + 1) * length + 1].astype(np.int64)
        return tokens[:, :-1], tokens[:, 1:]

    def initial_weights(self) -> dict[str, Tensor]:
        """By logical name."""
        return {name[5:]: torch.from_numpy(array) for name, array in self.arrays.items() if name.startswith("init/")}

    def gradient(self, step: int, name: str) -> np.ndarray:
        """The recorded gradient of a weight; zero for one that may be left out."""
        found = self.arrays.get(f"step{step}/grad/{name}")
        return np.zeros(()) if found is None else found


def read_case(path: Path, tensor_size: int = 1, normalization: Literal["window", "span"] = "window") -> Case:
    """A recorded case, for `tensor_size` tensor-parallel ranks; normalization: `window` is what was recorded.

    Raises UsageError when it cannot be replayed.
    """
    check_regular("file", path, _GIVE)
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: _array(path, name, archive) for name in archive.files}
    except UsageError:
        raise
    except _UNREADABLE as error:
        raise UsageError(f"{path}: not a reference case ({_reason(error)}); {_GIVE}") from error
    config = _read_config(path, arrays.pop("config", None))
    _check_keys(path, config)
    vocab_size = config["vocab"]
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise UsageError(f"{path}: its configuration gives a vocabulary of {vocab_size} tokens; {_GIVE}")
    try:
        run = _run_config(config, tensor_size, normalization)
        check_world(run, tensor_size)
        check_vocabulary(run.model, vocab_size)
    except UsageError as error:
        words = re.sub(r"--[a-z-]+", lambda found: FLAGS.get(found[0], found[0]), str(error))
        raise UsageError(f"{path}: {words}") from error
    case = Case(path.stem, vocab_size, run, arrays)
    _check_arrays(path, case)
    return case


def _array(path: Path, name: str, archive: Any) -> np.ndarray:
    """One array of an open archive. Raises UsageError: it is none, or is pickled."""
    try:
        array = archive[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):  # what numpy says of an array of Python objects
            raise
        rule = f"not a reference case (its {name} holds Python objects, which are pickled and may be programs)"
        raise UsageError(f"{path}: {rule}; {_GIVE}") from None
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{path}: not a reference case (its {name} is no array); {_GIVE}")
    return array


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "not a readable NPZ archive"


def _read_config(path: Path, array: np.ndarray | None) -> dict[str, Any]:
    """The case's configuration, a JSON object as a string."""
    if array is None:
        raise UsageError(f"{path}: not a reference case (it has no configuration); {_GIVE}")
    try:
        config = json.loads(str(array))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: its configuration is not JSON ({error}); {_GIVE}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}: its configuration is not a JSON object; {_GIVE}")
    return config


def _is_adaptive(config: dict[str, Any]) -> bool:
    return bool(config.get("adapt_io", "cutoffs" in config))


def _check_keys(path: Path, config: dict[str, Any]) -> None:
    """Every key that the case needs is there, and every key that is there is known."""
    needed = [*ALWAYS]
    if config.get("adapt_span"):
        needed += WITH_ADAPTIVE_SPAN
    if _is_adaptive(config):
        needed += WITH_ADAPTIVE_IO
    if missing := sorted(needed - config.keys()):
        raise UsageError(f"{path}: its configuration lacks {', '.join(missing)}; {_GIVE}")
    known = (*ALWAYS, *WITH_ADAPTIVE_SPAN, *WITH_ADAPTIVE_IO, *AT_WILL)
    if unknown := sorted(config.keys() - known):
        raise UsageError(
            f"{path}: its configuration has {', '.join(unknown)}, which nothing here stands for; "
            f"known are {', '.join(known)}"
        )
    if config["optim"] not in ("adagrad", "adam"):
        raise UsageError(f"{path}: optimizer {config['optim']}; known are adagrad and adam")


def _run_config(config: dict[str, Any], tensor_size: int, normalization: Literal["window", "span"]) -> RunConfig:
    """The run that a case's configuration describes."""
    spans = {"span_loss": config["span_loss"], "span_ramp": config["ramp"]} if config["adapt_span"] else {}
    cutoffs = config["cutoffs"] if _is_adaptive(config) else None
    if cutoffs is not None and not isinstance(cutoffs, list):
        raise UsageError(f"cutoffs {cutoffs}: not a list; {_GIVE}")
    adaptive = (
        {"adaptive_cutoffs": ",".join(map(str, cutoffs)), "adaptive_div_value": config["divval"]}
        if cutoffs is not None
        else {}
    )
    return RunConfig(
        model=ModelConfig(
            num_layers=config["layers"],
            hidden_size=config["d"],
            num_attention_heads=config["heads"],
            persistent_memory_size=config["N"],
            max_attention_span=config["span"],
            adaptive_span=config["adapt_span"],
            span_normalization=normalization,
            variant="transformer" if config.get("ff") else "all-attn",
            feed_forward_size=config.get("ff") or 0,
            untie_embeddings_and_output_weights=not config.get("tied", False),
            **spans,
            **adaptive,
        ),
        parallel=ParallelConfig(tensor_model_parallel_size=tensor_size),
        optimizer=OptimizerConfig(
            optimizer=config["optim"],
            lr=config["lr"],
            lr_decay_style="constant",
            lr_warmup_iters=config.get("warmup") or 0,
            clip_grad=config["clip"] or 0,
        ),
        training=TrainingConfig(
            seq_length=config["block"], global_batch_size=config["batch"], train_iters=config["steps"]
        ),
    )


def _check_arrays(path: Path, case: Case) -> None:
    """Every array that is compared is there in the right shape, so that nothing is left out or broadcast in silence."""
    expected = _expected_arrays(case)
    found = {name: array.shape for name, array in case.arrays.items()}
    differing = sorted(
        name
        for name in expected.keys() | found.keys()
        if expected.get(name) != found.get(name) and not (name in expected and _may_be_left_out(name, found))
    )
    if differing:
        name = differing[0]
        shapes = f"expected {expected.get(name, 'no such array')}, found {found.get(name, 'none')}"
        count = f"{len(differing)} array{'s differ' if differing[1:] else ' differs'} from its configuration"
        raise UsageError(f"{path}: {count}, first {name}: {shapes}")
    tokens = case.arrays["tokens"]
    if tokens.dtype.kind not in "iu":
        raise UsageError(f"{path}: its tokens are of type {tokens.dtype}, not integers; {_GIVE}")
    if tokens.min() < 0 or tokens.max() >= case.vocab_size:
        raise UsageError(f"{path}: its tokens are not all in 0 … {case.vocab_size - 1}; {_GIVE}")
    if other := sorted(name for name in found if name != "tokens" and case.arrays[name].dtype.kind != "f"):
        raise UsageError(f"{path}: {other[0]} holds no floating-point numbers; {_GIVE}")
    for name in sorted(name for name in found if name.startswith("init/")):
        if not np.isfinite(case.arrays[name]).all():
            raise UsageError(f"{path}: {name} holds NaN or infinity; {_GIVE}")
        if name.endswith(".span") and not ((case.arrays[name] >= 0) & (case.arrays[name] <= 1)).all():
            raise UsageError(f"{path}: {name} holds spans outside 0 … 1; {_GIVE}")


def _expected_arrays(case: Case) -> dict[str, tuple[int, ...]]:
    """The shapes of all arrays, by name."""
    training, steps = case.run.training, case.steps
    batch, length = training.global_batch_size, training.seq_length
    with torch.device("meta"):
        network = Network(case.run.model, case.vocab_size, ALONE, FusedOps("torch"))
    weights = {logical.name: logical.shape for logical, _ in network.logical_parameters()}
    expected: dict[str, tuple[int, ...]] = {"tokens": (batch, steps * length + 1)}
    expected.update({f"init/{name}": shape for name, shape in weights.items()})
    if "losses" in case.arrays and case.is_curve:
        return expected | {"losses": (steps,)} | ({"span_mean": (steps,)} if case.run.model.adaptive_span else {})
    shapes = {"log_probs": (batch, length, case.vocab_size), "nll": (batch, length)}
    recorded = _recorded_token_losses(case.arrays) or ["nll" if case.is_adaptive else "log_probs"]
    expected["losses"] = (steps, 2)
    expected.update({f"step{step}/{kind}": shapes[kind] for step in range(steps) for kind in recorded})
    for step in {0, steps - 1}:
        for name, shape in weights.items():
            expected[f"step{step}/grad/{name}"] = expected[f"step{step}/updated/{name}"] = shape
    return expected


def _recorded_token_losses(names: Iterable[str]) -> list[str]:
    """Which of log_probs and nll occur among the arrays."""
    return [kind for kind in TOKEN_LOSSES if any(name.endswith(f"/{kind}") for name in names)]


def _may_be_left_out(name: str, found: dict[str, tuple[int, ...]]) -> bool:
    """Gradients of a cluster's own weights: autograd gives none for a cluster that no token of a step has hit."""
    return "/grad/" in name and ".cluster" in name and ".cluster_logits." not in name and name not in found
