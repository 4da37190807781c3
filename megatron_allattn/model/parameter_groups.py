"""Which of a network's parameters an optimizer treats alike."""

from typing import Any

from torch import nn

from megatron_allattn.model.network import Network


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether this rank holds only a part of the logical tensor."""
    return bool(parameter.tensor_model_parallel)  # type: ignore[attr-defined]


def parameter_groups(network: Network, *, one_tensor_each: bool) -> list[dict[str, Any]]:
    """Parameter groups with the keys `params`, `decay`, `span` and `sharded`.

    Weight decay spares vectors (biases, norms) and spans, as in Megatron-LM. `one_tensor_each` keeps logical tensors
    apart in ZeRO's flat buffers, which a per-tensor norm needs.
    """
    spans = {id(parameter) for parameter in network.span_parameters()}
    groups: dict[Any, dict[str, Any]] = {}
    for logical, parameter in network.logical_parameters():
        span, sharded = id(parameter) in spans, is_sharded(parameter)
        decay = len(logical.shape) > 1 and not span
        key = logical.name if one_tensor_each else (decay, span)
        groups.setdefault(key, {"params": [], "decay": decay, "span": span, "sharded": sharded})["params"].append(
            parameter
        )
    return list(groups.values())
