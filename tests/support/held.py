"""The tensors that an engine really holds, counted by their storages."""

import gc
from collections.abc import Iterable, Iterator

from torch import Tensor

from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine

KINDS = ("weights", "optimizer", "gradients", "caches")


def held_by(engine: DeepSpeedEngine) -> dict[str, int]:
    """Bytes of every kind on this rank; a storage counts once, with the first kind that has it."""
    seen: set[int] = set()
    of_kind = {"weights": _weights, "optimizer": _optimizer, "gradients": _gradients, "caches": _caches}
    return {kind: sum(_storages(of_kind[kind](engine), seen)) for kind in KINDS}


def all_tensors(seen: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages of all tensors that Python knows of, those of `seen` left out."""
    gc.collect()
    known = {one.untyped_storage().data_ptr() for one in seen}
    return sum(_storages((one for one in gc.get_objects() if isinstance(one, Tensor)), known))


def _storages(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[int]:
    for tensor in tensors:
        if tensor.device.type == "meta":
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage.nbytes()


def _weights(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    for parameter in engine.network.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor


def _optimizer(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    """Masters, and what the optimizer has for each of them."""
    for group in engine.optimizer.param_groups:
        yield from (one.data for one in group["params"])
    for zero in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        yield from (one.data for one in getattr(engine.engine.optimizer, zero, ()))
    for state in engine.optimizer.state.values():
        yield from (one for one in state.values() if isinstance(one, Tensor))


def _gradients(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    zero = engine.engine.optimizer
    parameters = [
        *engine.network.parameters(),
        *(one for group in engine.optimizer.param_groups for one in group["params"]),
    ]
    yield from (one.grad for one in parameters if one.grad is not None)
    yield from (one.grad_accum for one in parameters if getattr(one, "grad_accum", None) is not None)
    for name in ("averaged_gradients", "all_grad_tensors"):
        for group in getattr(zero, name, {}).values():
            yield from group or ()
    flat = getattr(zero, "grad_partitions_flat_buffer", None)
    if flat is not None:
        yield flat


def _caches(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    for slot in engine.slots:
        yield from (slot.part(layer) for layer in slot.layers)
