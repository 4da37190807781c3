"""How large a model is: parameters and the memory they take on a rank."""

from dataclasses import dataclass

from megatron_allattn.model.network import Network


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of logical parameters (vocabulary padding and shards' copies not counted)."""

    total: int
    persistent: int
    local: int  # elements this rank holds, padding included


def count_parameters(network: Network) -> ParameterCount:
    """Count the parameters of a network of any layout."""
    logicals = [logical for logical, _ in network.logical_parameters()]
    return ParameterCount(
        total=sum(logical.numel for logical in logicals),
        persistent=sum(logical.numel for logical in logicals if ".persistent." in logical.name),
        local=sum(parameter.numel() for parameter in network.parameters()),
    )


def state_bytes(local_parameters: int, *, zero_stage: int, data_size: int, half: bool, moments: int) -> int:
    """Bytes of weights, gradients and optimizer state on a rank (ZeRO, Rajbhandari et al. 2020, section 5).

    moments: float32 values an optimizer keeps per parameter beside the master weight (Adagrad 1, Adam 2).
    """
    compute = 2 if half else 4
    master = 4 if half else 0
    weights = local_parameters * compute / (data_size if zero_stage >= 3 else 1)
    gradients = local_parameters * compute / (data_size if zero_stage >= 2 else 1)
    optimizer = local_parameters * (4 * moments + master) / (data_size if zero_stage >= 1 else 1)
    return int(weights + gradients + optimizer)


def cache_bytes(lengths: list[int], streams: int, hidden_size: int, element_bytes: int) -> int:
    """Bytes of the hidden-state caches of a rank's `streams` at these cache lengths (one per layer)."""
    return sum(lengths) * streams * hidden_size * element_bytes
