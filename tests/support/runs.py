"""A run folder as `pretrain.py --save` writes it, of a network that was never trained, in milliseconds."""

from pathlib import Path

import torch

from megatron_allattn.checkpoint import save
from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_allattn.data.dataset import open_dataset
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import single_process_groups

SMALL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    persistent_memory_size=6,
    max_attention_span=80,
    span_ramp=8,
)
BLOCK = 32


def untrained_run(
    folder: Path, data_path: Path, model: ModelConfig = SMALL, steps: tuple[int, ...] = (7,)
) -> dict[str, torch.Tensor]:
    """Save the given steps, all with the same weights, in `folder`; returns those by logical name, in float64."""
    run = RunConfig(
        model=model,
        data=DataConfig(data_path=str(data_path)),
        training=TrainingConfig(seq_length=BLOCK, global_batch_size=4),
    )
    dataset, groups = open_dataset(run.data), single_process_groups()
    network = Network(model, dataset.tokenizer.vocab_size, groups.tensor, FusedOps("torch"))
    initialize(network, seed=5)
    for layer, z in enumerate(network.span_parameters()):
        torch.nn.init.constant_(z, 0.1 * (layer + 1))
    engine = PlainEngine(network, run, groups, torch.device("cpu"), torch.float32, FusedOps("torch"))
    state = {
        "tokens": 0,
        "config": run.to_dict(),
        "vocab_size": dataset.tokenizer.vocab_size,
        "tokenizer": dataset.tokenizer.to_json(),
        "tokenizer_sha256": dataset.tokenizer.fingerprint,
        "data_sha256": dataset.fingerprint,
        "data": TokenStreams(dataset.train, 4, BLOCK, run.training.seed).state(),
        "cached_length": 0,
    }
    for step in steps:
        save.save(folder, step, engine, state)
    write_json_atomic(folder / "config.json", run.to_dict())
    return {logical.name: tensor.double() for logical, tensor in engine.weights()}
