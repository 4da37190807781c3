"""A checkpoint's weights in a network, without an optimizer and without DeepSpeed, at any tensor-parallel size.

A checkpoint's weights are logical tensors in full precision: each rank reads those it holds a shard of, one at a time,
and keeps its shard in the precision that is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_allattn.checkpoint import folder, save
from megatron_allattn.checkpoint.shared_check import with_shared_check
from megatron_allattn.checkpoint.tensors import TensorReader
from megatron_allattn.config import ParallelConfig, RunConfig, check_world
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.initialization import copy_logical
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.collectives import agree, broadcast_object
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.training.session import exit_code

T = TypeVar("T")


@dataclass(frozen=True)
class LoadedModel:
    """A network at a checkpoint's weights.

    run: the configuration it was trained with · state: state.json (step, tokenizer, …) · step_folder: where it lies ·
    notes: entries of the run folder that were passed over on the way, with the reasons.
    """

    network: Network
    run: RunConfig
    state: dict[str, Any]
    step_folder: Path
    notes: list[str]


def load_model(path: Path, groups: Groups, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load a run folder's newest intact step, or one step folder, whose every byte is checked.

    Collective. Raises UsageError (PeerFailed where another rank reports it): there is no intact checkpoint, its weights
    are not the model's, or the model does not divide over the tensor-parallel ranks.
    """

    def agreed(action: Callable[[], T]) -> T:
        return agree(action, groups.world, exit_code)

    found = agreed(lambda: with_shared_check(partial(folder.find, path), groups.world))
    step_folder, notes = broadcast_object(found, groups.world)
    state = agreed(lambda: save.read_state(step_folder, save.MODEL_FIELDS))
    run = agreed(lambda: _configuration(step_folder, state, groups))
    network = agreed(lambda: _network(step_folder, state, run, groups, device, dtype))
    return LoadedModel(network, run, state, step_folder, notes)


def _configuration(step_folder: Path, state: dict[str, Any], groups: Groups) -> RunConfig:
    """What the checkpoint was trained with; its layout and batch do not matter here, this run's layout must fit."""
    run = save.read_config(step_folder, state)
    here = ParallelConfig(tensor_model_parallel_size=groups.tensor.size)
    batch = replace(run.training, global_batch_size=groups.data.size, micro_batch_size=None)
    check_world(replace(run, parallel=here, training=batch), groups.world.size)
    return run


def _network(
    step_folder: Path,
    state: dict[str, Any],
    run: RunConfig,
    groups: Groups,
    device: torch.device,
    dtype: torch.dtype,
) -> Network:
    weights = TensorReader(step_folder, "weights")
    save.check_weights(step_folder, weights, run.model, state["vocab_size"])
    network = Network(run.model, state["vocab_size"], groups.tensor, FusedOps("torch"))
    network.to(device=device, dtype=dtype).requires_grad_(False)
    for logical, parameter in network.logical_parameters():
        copy_logical(parameter, weights.read(logical.name), network)
    return network
