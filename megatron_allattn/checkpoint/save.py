"""A run's state to a step folder and back.

    weights-*.safetensors      every weight, full precision, under its logical name
    optimizer-*.safetensors    every piece of optimizer state, as WEIGHT/STATE, in the weight's logical shape
    caches-*.safetensors       every layer's hidden-state cache of all global streams, in stream order
    state.json                 step, configuration, data position, … (whatever the caller passes)

All of it is independent of the layout. The world's first rank writes; tensors reach it one at a time. Every rank reads
what it needs.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_allattn.checkpoint import folder
from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.checkpoint.tensors import TensorFiles, TensorReader
from megatron_allattn.config import RunConfig, UsageError
from megatron_allattn.engine.interface import Engine
from megatron_allattn.model.network import Network, logical_tensors
from megatron_allattn.parallel.collectives import agree


def save(run_folder: Path, step: int, engine: Engine, state: dict[str, Any]) -> None:
    """Write the complete step folder of `step`. Collective. A step that exists already is replaced.

    Raises StorageError on the first rank when it cannot be written; nothing half-written is left. The others raise
    PeerFailed where that is before or after the tensors; in between they hear of it as of any failure (failures.py).
    """
    writer = engine.groups.rank == 0
    temporary = agree(lambda: folder.begin(run_folder, step) if writer else None, engine.groups.world, lambda _: 1)
    try:
        for prefix, tensors in (
            ("weights", ((logical.name, tensor) for logical, tensor in engine.weights())),
            ("optimizer", engine.optimizer_state()),
            ("caches", engine.caches()),
        ):
            files = TensorFiles(temporary, prefix) if temporary is not None else None
            for name, tensor in tensors:
                if files is not None and tensor is not None:
                    files.add(name, tensor)
            if files is not None:
                files.close()
        agree(lambda: _commit(temporary, step, state), engine.groups.world, lambda _: 1)
    except BaseException:
        if temporary is not None:
            folder.abort(temporary)
        raise


def _commit(temporary: Path | None, step: int, state: dict[str, Any]) -> None:
    if temporary is not None:
        write_json_atomic(temporary / "state.json", {"step": step, **state})
        folder.commit(temporary, step, replace=True)


def read_state(step_folder: Path) -> dict[str, Any]:
    """state.json of a verified step folder. Raises UsageError when it is not what `save` writes."""
    path = step_folder / "state.json"
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); load another checkpoint") from error
    if not isinstance(state, dict) or "step" not in state:
        raise UsageError(f"{path}: expected an object with a step; load another checkpoint")
    return state


def read_config(step_folder: Path, state: dict[str, Any]) -> RunConfig:
    """The configuration in a step folder's state. Raises UsageError: this version knows no such configuration.

    One without `span_normalization` was written before there was a choice: learned spans were trained with `window`.
    """
    try:
        run = RunConfig.from_dict(state["config"])
    except (UsageError, KeyError) as error:
        raise UsageError(f"{step_folder / 'state.json'}: {error}; load a checkpoint of this version") from error
    if run.model.adaptive_span and "span_normalization" not in state["config"].get("model", {}):
        return replace(run, model=replace(run.model, span_normalization="window"))
    return run


def load(step_folder: Path, engine: Engine, cached_length: int | None) -> None:
    """Set weights, optimizer state and caches from a verified step folder, at any layout. Collective.

    cached_length: how many tokens the caches' streams have seen since they started; None for a converted checkpoint,
    whose caches are empty and which may lack optimizer state. Raises UsageError naming a tensor that is missing.
    """
    weights, optimizer, caches = (TensorReader(step_folder, prefix) for prefix in ("weights", "optimizer", "caches"))
    agree(lambda: check_weights(step_folder, weights, engine.network), engine.groups.world, lambda _: 2)
    engine.load(weights.read, None if cached_length is None and not optimizer.names else optimizer.read)
    if cached_length is not None:
        engine.load_caches(caches.read, cached_length)


def check_weights(step_folder: Path, weights: TensorReader, network: Network) -> None:
    """Refuse weights that are not the model's: UsageError names the first tensor that differs and both shapes."""
    expected = {logical.name: logical.shape for logical in logical_tensors(network.config, network.vocab_size)}
    found = {name: tuple(info.shape) for name, info in weights.infos.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UsageError(
                f"{step_folder}: tensor {name} has shape {found.get(name, 'none')}, the model wants "
                f"{expected.get(name, 'none')}; load a checkpoint of the same model"
            )
