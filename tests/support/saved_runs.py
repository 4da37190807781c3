"""Checkpoints of small models, trained for some steps, for tests of what they are converted to."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_allattn.checkpoint import save
from megatron_allattn.checkpoint.conversion import SavedRun, read_run
from megatron_allattn.checkpoint.tensors import same_bits
from megatron_allattn.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from megatron_allattn.data.tokenizers import NullTokenizer, Tokenizer
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import single_process_groups

VOCABULARY = 17
_SMALL: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "persistent_memory_size": 8,
    "max_attention_span": 96,
    "span_ramp": 8,
}
MODELS = {
    "all-attn": ModelConfig(**_SMALL),
    "window": ModelConfig(**_SMALL, span_normalization="window", position_values="shared"),
    "masked": ModelConfig(**_SMALL, empty_cache="mask"),
    "fixed": ModelConfig(**_SMALL | {"persistent_memory_size": 0}, adaptive_span=False),
    "attn-split": ModelConfig(**_SMALL, variant="attn-split"),
    "head-split": ModelConfig(**_SMALL, variant="head-split"),
    "single-head": ModelConfig(**_SMALL, variant="single-head"),
    "ff-attn": ModelConfig(**_SMALL | {"persistent_memory_size": 0}, variant="ff-attn", feed_forward_size=12),
    "transformer": ModelConfig(
        **_SMALL | {"persistent_memory_size": 0}, variant="transformer", feed_forward_size=12, adaptive_span=False
    ),
    "tied": ModelConfig(**_SMALL, untie_embeddings_and_output_weights=False),
    "adaptive": ModelConfig(**_SMALL, adaptive_cutoffs="4,10"),
    "adaptive tied": ModelConfig(**_SMALL, adaptive_cutoffs="4,10", untie_embeddings_and_output_weights=False),
}


def saved_run(
    folder: Path,
    model: ModelConfig,
    optimizer: str = "adam",
    steps: int = 2,
    vocab_size: int = VOCABULARY,
    tokenizer: Tokenizer | None = None,
    data: DataConfig | None = None,
) -> SavedRun:
    """A run folder with one checkpoint, whose spans differ. Its last update was left out, its rate has dropped.

    tokenizer: bare numbers if left out; else its vocabulary is the model's · data: what it is said to be trained on.
    """
    tokenizer = tokenizer or NullTokenizer(vocab_size)
    vocab_size = tokenizer.vocab_size
    training = TrainingConfig(seq_length=12, global_batch_size=3)
    settings = OptimizerConfig(optimizer=optimizer, clip_grad=0.5, lr_decay_style="plateau")
    run = RunConfig(model=model, optimizer=settings, training=training, data=data or DataConfig())
    groups = single_process_groups()
    network = Network(model, vocab_size, groups.tensor, FusedOps("torch"))
    initialize(network, 5)
    with torch.no_grad():
        for layer, z in enumerate(network.span_parameters()):
            z.copy_((torch.arange(len(z)) * 0.1 + layer * 0.05).view(-1, 1, 1))
    engine = PlainEngine(network, run, groups, torch.device("cpu"), torch.float32, FusedOps("torch"))
    tokens = np.random.default_rng(3).integers(0, vocab_size, (3, 12 * steps + 1))
    for step in range(1, steps + 1):
        block = tokens[:, 12 * (step - 1) : 12 * step + 1]
        engine.train_step(block[:, :-1], block[:, 1:], step, 1e-3, engine.spans())
    state = {
        "config": run.to_dict(),
        "vocab_size": vocab_size,
        "tokens": 36 * steps + 12,  # once the batch was larger
        "tokenizer": tokenizer.to_json(),
        "tokenizer_sha256": tokenizer.fingerprint,
        "data": None,
        "judged": steps - 1,
        "skipped": 1,
        "recent_losses": [3.0, 1 / 3],
        "plateau": {"best": 2.75, "count": 2, "dropped_at": steps - 1},
        "loss_scale": {"cur_scale": 512.0, "cur_iter": 2, "last_overflow_iter": 1, "cur_hysteresis": 1},
    }
    save.save(folder, steps, engine, state)
    return read_run(folder)


def same_weights(one: SavedRun, other: SavedRun) -> bool:
    """Whether they have the same weights, to the bit, and the same model."""
    same = all(same_bits(one.weights.read(name), other.weights.read(name)) for name in one.weights.names)
    return same and sorted(one.weights.names) == sorted(other.weights.names) and one.run.model == other.run.model


def same_state(one: SavedRun, other: SavedRun) -> bool:
    """Whether they have the same optimizer state, to the bit, at the same step."""
    names = one.optimizer.names
    same = all(same_bits(one.optimizer.read(name), other.optimizer.read(name)) for name in names)
    return (
        bool(names)
        and same
        and sorted(names) == sorted(other.optimizer.names)
        and one.state["step"] == other.state["step"]
    )
