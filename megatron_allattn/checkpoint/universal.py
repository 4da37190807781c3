"""A run's checkpoint as one of DeepSpeed's universal ones, which its engines load at any layout, and back.

    OUT/latest_universal                             the next folder's name
    OUT/global_step100_universal/
        megatron_allattn.json                        the `Description`, from which it can be read here
        mp_rank_00_model_states.pt                   DeepSpeed's counters; with zero_pp_rank_0_ before it for ZeRO 3
        zero/optimizer_state.pt                      of the optimizer what is not in tensors
        zero/PARAMETER/{fp32,exp_avg,exp_avg_sq}.pt  {"param": whole, "cat_dim": what tensor parallelism cuts}
        zero/PARAMETER/step.pt                       the number of updates

PARAMETER is the name in `Network.named_parameters()`. Adam's state only: DeepSpeed knows of no other. These files are
pickles; they are read as pickled.py says, without running what is in them.
"""

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.checkpoint.conversion import SavedRun, Tensors, write_run
from megatron_allattn.checkpoint.described import Description
from megatron_allattn.checkpoint.files import (
    made_whole,
    num_bytes_under,
    storage_errors,
    write_json_atomic,
    write_text_atomic,
)
from megatron_allattn.checkpoint.pickled import dump, read_pickled
from megatron_allattn.checkpoint.save import check_plausible
from megatron_allattn.checkpoint.tensors import info_of, same_bits
from megatron_allattn.config import ModelConfig, UsageError, usage_error
from megatron_allattn.config.json_files import MAX_STATE_BYTES, read_bytes, read_json
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.network import Network
from megatron_allattn.model.parameter_groups import parameter_groups
from megatron_allattn.parallel.groups import ALONE
from megatron_allattn.parallel.logical import LogicalTensor, logical_of

FORMAT = "deepspeed-universal"
LATEST, DESCRIPTION = "latest_universal", "megatron_allattn.json"
STATES = ("exp_avg", "exp_avg_sq")
_GIVE = "give a folder that was made here"


def write(saved: SavedRun, output: Path) -> str:
    """Make the folder, one tensor in memory at a time; the name of the step's. Raises UsageError, StorageError."""
    optimizer, step = saved.run.optimizer, saved.state["step"]
    if optimizer.optimizer != "adam":
        rule = "DeepSpeed's universal checkpoints hold Adam's state only"
        raise usage_error("--optimizer", optimizer.optimizer, rule, "convert to safetensors or shards")
    if step and not saved.optimizer.names:
        rule = "has no optimizer state, which a universal checkpoint is made of"
        raise usage_error("--load", saved.step_folder, rule, "convert to safetensors")
    network = _network(saved.run.model, saved.state["vocab_size"])
    updates = step - saved.progress.skipped
    name = f"global_step{step}_universal"
    with made_whole(output) as temporary:
        zero = temporary / name / "zero"
        for parameter, logical in _parameters(network):
            folder = zero / parameter
            with storage_errors(folder, 0):
                folder.mkdir(parents=True)
            for state in (None, *STATES):
                tensor = _tensor(saved, logical, state)
                cut = {} if logical.shard_dim is None else {"cat_dim": logical.shard_dim}
                vocabulary = {"vocab_tensor": True} if _is_padded(logical) else {}
                dump(folder / f"{state or 'fp32'}.pt", {"param": tensor, **cut, **vocabulary})
            dump(folder / "step.pt", updates)
        groups = [{"lr": optimizer.lr, "step": updates} for _ in parameter_groups(network, one_tensor_each=False)]
        counters = {"global_steps": step, "skipped_steps": step - updates, "dp_world_size": 1, "mp_world_size": 1}
        about = {"ds_version": version("deepspeed")}
        content = {"state": {0: {"step": updates}}, "param_groups": groups}
        states = {"clip_grad": optimizer.clip_grad, "param_groups": groups, "optimizer_state_dict": content}
        dump(zero / "optimizer_state.pt", states | about)
        for prefix in ("", "zero_pp_rank_0_"):  # the second for ZeRO 3
            path = temporary / name / f"{prefix}mp_rank_00_model_states.pt"
            dump(path, {"module": {}, "lr_scheduler": None} | counters | about)
        write_json_atomic(temporary / name / DESCRIPTION, Description.of(saved).to_dict())
        write_text_atomic(temporary / LATEST, name)
        _compare(saved, zero, network)
    return name


def _network(model: ModelConfig, vocab_size: int) -> Network:
    """Without its weights."""
    with torch.device("meta"):
        return Network(model, vocab_size, ALONE, FusedOps("torch"))


def _parameters(network: Network) -> Iterator[tuple[str, LogicalTensor]]:
    """By the names that DeepSpeed sees."""
    for name, parameter in network.named_parameters():
        yield name, logical_of(parameter)


def _is_padded(logical: LogicalTensor) -> bool:
    """Whether DeepSpeed has to pad it where the shards do not divide it: of the tables of a vocabulary."""
    return logical.shard_dim == 0 and logical.heads is None and len(logical.shape) == 2


def _tensor(saved: SavedRun, logical: LogicalTensor, state: str | None) -> Tensor:
    if state is None:
        return saved.weights.read(logical.name)
    if not saved.optimizer.names:  # before the first update
        return torch.zeros(logical.shape)
    return saved.optimizer.read(f"{logical.name}/{state}")


def _compare(saved: SavedRun, zero: Path, network: Network) -> None:
    """Read back what was written. Raises UsageError, which names the first tensor that is not the same."""
    for parameter, logical in _parameters(network):
        for state in (None, *STATES):
            if not same_bits(_read(zero / parameter, logical, state), _tensor(saved, logical, state)):
                raise UsageError(f"{parameter} {state or 'fp32'}: is not what was written; nothing is kept")


def _read(folder: Path, logical: LogicalTensor, state: str | None) -> Tensor:
    """A tensor of a universal checkpoint, whole."""
    path = folder / f"{state or 'fp32'}.pt"
    content = read_pickled(path)
    tensor = content.get("param") if isinstance(content, dict) else None
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != logical.shape or tensor.dtype != torch.float32:
        found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "none"
        raise usage_error("file", path, f"has the tensor {found}, expected float32 {logical.shape}", _GIVE)
    return tensor.contiguous()


def read(source: Path, output: Path) -> Description:
    """Make the run folder `output` of the newest step of such a folder. Raises UsageError, StorageError."""
    step_folder = latest(source)
    path = step_folder / DESCRIPTION
    found = Description.from_dict(path, read_json("file", path, _GIVE, MAX_STATE_BYTES))
    zero = step_folder / "zero"
    if not zero.is_dir():
        raise usage_error("file", zero, "is no folder", _GIVE)
    check_plausible(path, found.run.model, sum(1 for _ in zero.iterdir()), num_bytes_under(zero))
    own: dict[str, tuple[Path, LogicalTensor, str | None]] = {}
    for parameter, logical in _parameters(_network(found.run.model, found.vocab_size)):
        for kind in (None, *STATES):
            own[logical.name if kind is None else f"{logical.name}/{kind}"] = (zero / parameter, logical, kind)

    def tensors(names: list[str]) -> Tensors:
        infos = [info_of(name, torch.empty(own[name][1].shape, device="meta")) for name in names]
        return Tensors(infos, lambda name: _read(*own[name]))

    expected, updates = found.step - found.progress.skipped, _updates(folder := next(iter(own.values()))[0])
    if updates != expected:
        rule = f"has {updates} updates, its description {expected} at step {found.step}"
        raise usage_error("file", folder / "step.pt", rule, _GIVE)
    state = found.state(found.progress, {"format": FORMAT})
    weights = tensors([name for name, (*_, kind) in own.items() if kind is None])
    optimizer = tensors([name for name, (*_, kind) in own.items() if kind is not None])
    write_run(source, output, found.run, found.step, state, weights, optimizer)
    return found


def latest(source: Path) -> Path:
    """The folder of the step that is read of such a folder. Raises UsageError: none is named."""
    name = read_bytes("file", source / LATEST, _GIVE, limit=1000).decode(errors="replace").strip()
    if not re.fullmatch(r"global_step\d+_universal", name, re.ASCII):
        raise usage_error("file", source / LATEST, f"names {name!r}, not a folder beside it", _GIVE)
    return source / name


def _updates(folder: Path) -> int:
    """The number of updates."""
    content: Any = read_pickled(folder / "step.pt")
    number = content.item() if isinstance(content, Tensor) and content.numel() == 1 else content
    if type(number) not in (int, float) or number != int(number) or number < 0:
        raise usage_error("file", folder / "step.pt", f"has {content!r}, not a number of updates", _GIVE)
    return int(number)
