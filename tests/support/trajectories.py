"""Short trainings of a small network at any layout and engine, for comparisons: every rank runs `trajectory`."""

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import numpy as np
import torch

from megatron_allattn.config import ModelConfig, OptimizerConfig, ParallelConfig, Recompute, RunConfig, TrainingConfig
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine
from megatron_allattn.engine.interface import Engine
from megatron_allattn.engine.pipeline_engine import PipelineEngine
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.kernels.registry import BACKENDS, Attend
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.model.partition import by_hand, cut
from megatron_allattn.parallel.groups import Groups, make_groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.training.schedules import learning_rate

ADAGRAD = OptimizerConfig(
    optimizer="adagrad", lr=0.07, lr_decay_style="constant", lr_warmup_iters=50, clip_grad=0.03, weight_decay=0.0
)
ADAM = OptimizerConfig(optimizer="adam", lr=2.5e-4, lr_decay_style="constant", lr_warmup_iters=0, clip_grad=0.1)
OPTIMIZERS = {"adagrad": ADAGRAD, "adam": ADAM}

MODEL = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    persistent_memory_size=24,
    max_attention_span=192,
    adaptive_span=True,
    span_loss=1e-4,
    span_ramp=32,
    attention_dropout=0.2,
    embedding_dropout=0.1,
)


@dataclass(frozen=True)
class Case:
    """One layout and everything the trajectory must not depend on; `engine` is "plain" or "deepspeed".

    layers: of every pipeline stage, evenly if left out; offload: of the optimizer's state to the host; spread: heads
    begin with spans of their own, see `spread_tokens`, not all with the ramp alone.
    """

    tensor: int = 1
    data: int = 1
    zero: int = 0
    accumulation: int = 1
    optimizer: str = "adagrad"
    dtype: str = "float32"
    engine: str = "plain"
    pipeline: int = 1
    layers: tuple[int, ...] = ()
    depth: int = 0  # layers of the model, if not its own number
    sequence: bool = False
    shard_caches: bool = False
    recompute: Recompute = "none"
    backend: str = "eager"
    offload: bool = False
    spread: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def single(self) -> "Case":
        """The same training in one process, with the plain engine."""
        return replace(
            self,
            tensor=1,
            pipeline=1,
            layers=(),
            data=1,
            zero=0,
            accumulation=1,
            engine="plain",
            sequence=False,
            shard_caches=False,
            recompute="none",
            offload=False,
        )

    def __str__(self) -> str:
        stages = f"-pp{self.pipeline}{list(self.layers) or ''}" if self.pipeline > 1 else ""
        shared = "-sp" * self.sequence + "-sc" * self.shard_caches
        zero = f"zero{self.zero}" + "-offload" * self.offload
        where = f"tp{self.tensor}{shared}{stages}-dp{self.data}-{zero}-acc{self.accumulation}"
        backend = f"-{self.backend}" * (self.backend != "eager")
        again = f"-recompute_{self.recompute}" * (self.recompute != "none")
        spread = "-spread" * self.spread
        return f"{where}{backend}{again}{spread}-{self.optimizer}-{self.dtype}-{self.engine}"


@dataclass(frozen=True)
class Trajectory:
    """losses and gradient norms of every step; gradients of the first; weights after the last."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def characters(path: Path) -> tuple[np.ndarray, int]:
    """The text of a file as indices into the sorted set of its characters, and how many those are."""
    text = path.read_text()
    alphabet = sorted(set(text))
    index = {character: number for number, character in enumerate(alphabet)}
    return np.array([index[character] for character in text], dtype=np.uint8), len(alphabet)


def run_config(case: Case, model: ModelConfig = MODEL, batch: int = 8, block: int = 32) -> RunConfig:
    """The run of a case: 8 streams of 32 tokens a step unless said otherwise."""
    return RunConfig(
        model=replace(model, num_layers=case.depth or model.num_layers),
        parallel=ParallelConfig(
            tensor_model_parallel_size=case.tensor,
            pipeline_model_parallel_size=case.pipeline,
            sequence_parallel=case.sequence,
            shard_caches=case.shard_caches,
            zero_stage=case.zero,
            deepspeed_config=Path(f"zero{case.zero}-offload.json") if case.offload else None,
        ),
        optimizer=OPTIMIZERS[case.optimizer],
        training=TrainingConfig(
            seq_length=block,
            global_batch_size=batch,
            micro_batch_size=batch // case.data // case.accumulation,
            train_iters=1000,
            bf16=case.dtype == "bfloat16",
            fp16=case.dtype == "float16",
        ),
    )


@cache
def groups_of(tensor: int, data: int, pipeline: int = 1) -> Groups:
    """Process groups over the worker pool, made once per layout."""
    layout = Layout(tensor_size=tensor, data_size=data, pipeline_size=pipeline)
    return make_groups(layout, timedelta(seconds=100))


def build(
    case: Case,
    vocab_size: int,
    run: RunConfig | None = None,
    attend: Attend | None = None,
    recompute: Recompute | None = None,
) -> Engine:
    """A fresh engine of a case on this rank; attend, recompute: instead of the case's."""
    run, attend = run or run_config(case), attend or BACKENDS[case.backend](torch.device("cpu"))
    recompute = recompute or case.recompute
    groups = groups_of(case.tensor, case.data, case.pipeline)
    count = run.model.num_layers
    parts = by_hand(case.layers, count) if case.layers else cut([1.0] * count, 0.0, 0.0, case.pipeline)
    part = parts[groups.pipeline.rank]
    sequence = run.parallel.sequence_parallel
    network = Network(
        run.model, vocab_size, groups.tensor, FusedOps("torch"), attend, recompute, part, sequence_parallel=sequence
    )
    initialize(network, run.training.seed)
    if case.spread:
        spread_spans(network)
    device, dtype = torch.device("cpu"), getattr(torch, case.dtype)
    if case.engine == "plain":
        return PlainEngine(network, run, groups, device, dtype, FusedOps("torch"))
    engine = PipelineEngine if case.pipeline > 1 else DeepSpeedEngine
    return engine(network, run, groups, device, dtype, FusedOps("torch"))


def spread_tokens(layer: int, head: int) -> float:
    """z·L of a head: no two layers are as long, and the first steps take a head to its next token."""
    return 12.0 * layer + 17.0 * head + 0.999


def spread_spans(network: Network) -> None:
    """Give every head the z of `spread_tokens`; heads are placed in order."""
    for layer, z in zip(network.part.layers, network.span_parameters(), strict=True):
        first = network.group.rank * z.numel()
        tokens = torch.tensor([spread_tokens(layer, first + head) for head in range(z.numel())])
        torch.nn.init.zeros_(z).data += (tokens / network.config.max_attention_span).reshape(z.shape)


def trajectory(
    rank: int,
    world_size: int,
    case: Case,
    tokens: np.ndarray,
    vocab_size: int,
    steps: int,
    model: ModelConfig = MODEL,
    batch: int = 8,
    block: int = 32,
) -> Trajectory | None:
    """Train `steps` steps; the first rank returns what happened."""
    run = run_config(case, model, batch, block)
    engine = build(case, vocab_size, run)
    training = run.training
    streams = TokenStreams(tokens, training.global_batch_size, training.seq_length, training.seed)
    losses, norms, gradients = [], [], {}
    for step in range(1, steps + 1):
        block = streams.next_block(engine.streams)
        losses.append(engine.forward_backward(block.inputs, block.targets, step, engine.spans()))
        if step == 1:
            gradients = {logical.name: tensor.double().numpy() for logical, tensor in engine.gradients()}
        norms.append(engine.update(learning_rate(run.optimizer, training.train_iters, step), step))
    weights = {logical.name: tensor.double().numpy() for logical, tensor in engine.weights()}
    return Trajectory(losses, norms, gradients, weights) if rank == 0 else None


def differences(found: Trajectory, expected: Trajectory) -> dict[str, float]:
    """Largest relative differences: the first loss, any gradient tensor of the first step (to its largest element), any
    loss, and the first gradient norm.
    """
    assert found.gradients.keys() == expected.gradients.keys() and len(found.losses) == len(expected.losses)
    losses = np.abs(np.divide(found.losses, expected.losses) - 1)
    gradients = [
        np.abs(found.gradients[name] - gradient).max() / max(np.abs(gradient).max(), 1e-30)
        for name, gradient in expected.gradients.items()
    ]
    norm = abs(found.norms[0] / expected.norms[0] - 1)
    return {
        "first loss": float(losses[0]),
        "gradients": float(max(gradients)),
        "losses": float(losses.max()),
        "first norm": float(norm),
    }
