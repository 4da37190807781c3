"""Every variant of the ablation learns: a small model on Shakespeare ends far below the entropy of single characters.

Two or three minutes on one core, so it runs in `make test-variants` only. The table of losses is in bits per
character: the mean of the last 50 steps, and the whole validation split, which is the last tenth of the text.
"""

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_allattn.config import ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.accounting import count_parameters
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE, single_process_groups
from megatron_allattn.training.evaluation import evaluate
from megatron_allattn.training.schedules import learning_rate
from tests.support.trajectories import characters
from tests.support.variants import VARIANTS, model_of

STEPS, STREAMS, BLOCK = 300, 16, 32
RUNS = [(variant, True) for variant in VARIANTS] + [("transformer", False)]


def model(variant: str, adaptive_span: bool) -> ModelConfig:
    """Two layers of width 64; as many persistent vectors as there are feed-forward units in the others."""
    feed_forward = variant in ("ff-attn", "transformer")
    return model_of(
        variant,
        hidden_size=64,
        num_attention_heads=4,
        persistent_memory_size=0 if feed_forward or variant == "no-persistent" else 128,
        feed_forward_size=128 if feed_forward else 0,
        max_attention_span=64,
        span_ramp=16,
        adaptive_span=adaptive_span,
        attention_dropout=0.05,
    )


@cache
def text(path: Path) -> tuple[np.ndarray, np.ndarray, int, float]:
    """Training and validation tokens, the size of the alphabet, and the unigram entropy of all in bits."""
    tokens, size = characters(path)
    shares = np.bincount(tokens) / len(tokens)
    cut = len(tokens) - len(tokens) // 10
    return tokens[:cut], tokens[cut:], size, float(-(shares * np.log2(shares)).sum())


@pytest.mark.variants
@pytest.mark.parametrize(("variant", "adaptive_span"), RUNS, ids=[f"{v}{'' if a else '-fixed-span'}" for v, a in RUNS])
def test_it_learns(variant: str, adaptive_span: bool, shared: Path, record_property) -> None:
    train, valid, vocab_size, entropy = text(shared / "data/tinyshakespeare.txt")
    run = RunConfig(
        model=model(variant, adaptive_span),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=3e-3, lr_decay_style="cosine", min_lr=3e-4, lr_warmup_iters=20, clip_grad=1.0
        ),
        training=TrainingConfig(seq_length=BLOCK, global_batch_size=STREAMS, train_iters=STEPS),
    )
    network = Network(run.model, vocab_size, ALONE, FusedOps("torch"))
    initialize(network, run.training.seed)
    engine = PlainEngine(network, run, single_process_groups(), torch.device("cpu"), torch.float32, FusedOps("torch"))
    streams, losses = TokenStreams(train, STREAMS, BLOCK, run.training.seed), []
    for step in range(1, STEPS + 1):
        block = streams.next_block(engine.streams)
        lr = learning_rate(run.optimizer, STEPS, step)
        losses.append(engine.train_step(block.inputs, block.targets, step, lr, engine.spans()).loss)
    found = evaluate(engine, valid, engine.spans(), 0)
    bits = [float(np.mean(losses[-50:])) / math.log(2), found.loss / math.log(2)]
    label = f"{variant}, {'adaptive' if adaptive_span else 'fixed'} span"
    record_property("variant", (label, count_parameters(network).total, STEPS, *bits, entropy))
    assert max(bits) < entropy, f"{label}: {bits} bits per character, single characters have {entropy:.4f}"
