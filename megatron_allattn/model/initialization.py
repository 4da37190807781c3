"""Weights in and out of a network, as logical tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_allattn.model.network import Network
from megatron_allattn.parallel.logical import logical_of


def initialize(network: Network, seed: int) -> None:
    """Draw every weight from (seed, logical name), full size, and keep this rank's shard: equal at every layout."""
    for logical, parameter in network.logical_parameters():
        copy_logical(parameter, logical.init.draw(seed, logical.name, logical.shape), network)


def load_logical(network: Network, weights: Mapping[str, Tensor]) -> None:
    """Fill the network from full tensors by name. Raises ValueError: one is missing, unknown or misshapen."""
    expected = {logical.name: logical.shape for logical, _ in network.logical_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if expected != found:
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        name = differing[0]
        raise ValueError(
            f"weights: {len(differing)} tensors differ from the model, first {name}: "
            f"the model has {expected.get(name, 'none')}, the file {found.get(name, 'none')}"
        )
    for logical, parameter in network.logical_parameters():
        copy_logical(parameter, weights[logical.name], network)


def copy_logical(parameter: torch.nn.Parameter, full: Tensor, network: Network) -> None:
    """Copy this rank's shard of the full tensor into `parameter`."""
    with torch.no_grad():
        parameter.copy_(network.shard(logical_of(parameter), full))
