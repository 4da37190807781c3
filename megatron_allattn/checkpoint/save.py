"""A run's state to a step folder and back.

    weights-*.safetensors      every weight, full precision, under its logical name
    optimizer-*.safetensors    every piece of optimizer state, as WEIGHT/STATE, in the weight's logical shape
    caches-*.safetensors       every layer's hidden-state cache of all global streams, in stream order
    state.json                 step, configuration, data position, … (whatever the caller passes)

All of it is independent of the layout. All ranks write (assembly.py), the world's first begins and commits. Every rank
reads what it needs.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_allattn.checkpoint import folder
from megatron_allattn.checkpoint.assembly import plan, write
from megatron_allattn.checkpoint.files import StorageError, write_json_atomic
from megatron_allattn.checkpoint.tensors import TensorReader
from megatron_allattn.config import ModelConfig, RunConfig, UsageError, usage_error
from megatron_allattn.config.json_files import MAX_STATE_BYTES, read_json_object
from megatron_allattn.engine.finite import NotFinite, not_saved
from megatron_allattn.engine.fragments import Fragment, Join
from megatron_allattn.engine.interface import Engine
from megatron_allattn.model.network import logical_tensors
from megatron_allattn.parallel.collectives import PeerFailed, agree, broadcast_object, gather_objects
from megatron_allattn.parallel.groups import Group

MODEL_FIELDS = ("step", "config", "vocab_size", "tokenizer", "tokenizer_sha256")
RUN_FIELDS = (*MODEL_FIELDS, "data_sha256", "data", "cached_length")
LARGEST_COUNT = 2**63 - 1
GIVE_OURS = "give one that was made here"
_OTHER = "load another checkpoint"
_KINDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "config": (dict,),
    "vocab_size": (int,),
    "tokenizer": (dict,),
    "tokenizer_sha256": (str,),
    "data_sha256": (str, type(None)),
    "data": (dict, type(None)),
    "cached_length": (int,),
}


def save(run_folder: Path, step: int, engine: Engine, state: dict[str, Any]) -> None:
    """Write the complete step folder of `step`. Collective. A step that exists already is replaced.

    Raises StorageError on a rank whose files cannot be written and PeerFailed on the others, or NotFinite on all ranks
    where a tensor is not; nothing half-written is left.
    """
    write_step(run_folder, step, list(engine.fragments()), engine.network.join, state, engine.groups.saving)


def write_step(
    run_folder: Path, step: int, fragments: Sequence[Fragment], join: Join, state: dict[str, Any], group: Group
) -> None:
    """`save` of what was taken before: fragments and `join`, by the heads' placement then. group: of all ranks."""
    first = group.rank == 0
    temporary = broadcast_object(agree(lambda: folder.begin(run_folder, step) if first else None, group), group)
    try:
        written = gather_objects(write(temporary, plan(fragments, group), fragments, join, group), group)
        if not_finite := sorted({name for one in written for name in one.not_finite}):
            raise not_saved(not_finite)
        hashes = {name: digest for one in written for name, digest in one.hashes.items()}
        agree(lambda: _commit(temporary, step, state, hashes) if first else None, group)
    except BaseException as error:
        if first:
            folder.abort(temporary)
        if isinstance(error, StorageError | PeerFailed | NotFinite):  # on all ranks: none ends the run before this
            gather_objects(None, group)
        raise


def _commit(temporary: Path, step: int, state: dict[str, Any], hashes: dict[str, str]) -> None:
    write_json_atomic(temporary / "state.json", {"step": step, **state})
    folder.commit(temporary, step, replace=True, hashes=hashes)


def read_state(step_folder: Path, needed: Sequence[str] = ()) -> dict[str, Any]:
    """state.json of a verified step folder. needed: fields that must be there beside the step.

    Raises UsageError when it is not what `save` writes, or is gone.
    """
    path = step_folder / "state.json"
    with folder.told_if_gone(step_folder):
        state = read_json_object("file", path, _OTHER, MAX_STATE_BYTES)
    check_fields(path, state, ("step", *needed), _OTHER)
    return state


def check_fields(path: Path, content: dict[str, Any], needed: Sequence[str], fix: str = GIVE_OURS) -> None:
    """UsageError naming a field of a state that is missing, or of another type than it has here."""
    for name, kinds in _KINDS.items():
        value = content.get(name)
        if name not in content and name not in needed:
            continue
        small = type(value) is not int or (name == "vocab_size") <= value <= LARGEST_COUNT
        if type(value) not in kinds or not small:
            shown = repr(value) if name in content else "nothing"
            expected = " or ".join(kind.__name__ for kind in kinds).replace("NoneType", "None")
            expected += f" from {int(name == 'vocab_size')} on" if type(value) is int else ""
            raise usage_error("file", path, f"has {shown[:60]} for {name}, expected {expected}", fix)


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
    whose caches are empty and which may lack optimizer state. Raises UsageError naming a tensor that is missing, or
    a folder that its run deletes meanwhile.
    """
    with folder.told_if_gone(step_folder):
        _load(step_folder, engine, cached_length)


def _load(step_folder: Path, engine: Engine, cached_length: int | None) -> None:
    network = engine.network
    weights, optimizer, caches = (TensorReader(step_folder, prefix) for prefix in ("weights", "optimizer", "caches"))
    agree(
        lambda: check_weights(step_folder, weights, network.config, network.vocab_size),
        engine.groups.world,
        lambda _: 2,
    )
    engine.load(weights.read, None if cached_length is None and not optimizer.names else optimizer.read)
    if cached_length is not None:
        engine.load_caches(caches.read, cached_length)


def check_weights(source: Path, weights: TensorReader, model: ModelConfig, vocab_size: int) -> None:
    """Refuse weights that are not the model's: UsageError names the first tensor that differs and both shapes."""
    check_plausible(source, model, len(weights.infos), weights.num_bytes)
    expected = {logical.name: logical.shape for logical in logical_tensors(model, vocab_size)}
    found = {name: tuple(info.shape) for name, info in weights.infos.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UsageError(
                f"{source}: tensor {name} has shape {found.get(name, 'none')}, the model wants "
                f"{expected.get(name, 'none')}; load a checkpoint of the same model"
            )


def check_plausible(source: Path, model: ModelConfig, num_tensors: int, num_bytes: int) -> None:
    """Refuse a model that no weights of this number and size can be of, before it is built: a file may say anything.

    Raises UsageError.
    """
    for name, value, least in (
        ("num_layers", model.num_layers, num_tensors),
        ("adaptive_cutoffs", len(model.cutoffs), num_tensors),
        ("hidden_size", model.hidden_size, math.isqrt(num_bytes)),  # every layer has a matrix of its square
    ):
        if value > least:
            rule = f"has a model with {name} {value:,}, and {num_tensors:,} tensors of {num_bytes:,} bytes together"
            raise usage_error("file", source, rule, "load a checkpoint of the same model")
