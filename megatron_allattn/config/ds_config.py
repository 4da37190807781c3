"""The DeepSpeed JSON: it decides ZeRO, offload and communication; everything else comes from `RunConfig`.

`--zero-stage N` selects the shipped `zeroN.json`, `--deepspeed_config FILE` another one. Keys that `RunConfig` decides
(batch, precision, clipping, optimizer) may repeat its values and are then dropped, since the engine passes them on
itself; a different value is an error that names both. Keys that DeepSpeed would ignore or that change what is trained
are refused.
"""

import difflib
import json
from pathlib import Path
from typing import Any

from megatron_allattn.config.checks import check_regular
from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.rules import batch_shape
from megatron_allattn.config.run import RunConfig

_FLAG = "--deepspeed-config"

_DECIDED_HERE = frozenset(
    {
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "disable_allgather",
        "aio",
        "comms_logger",
        "flops_profiler",
        "wall_clock_breakdown",
        "memory_breakdown",
        "steps_per_print",
        "dump_state",
        "log_level",
    }
)
"""ZeRO, communication, and what DeepSpeed tells about itself."""

_DECIDED_BY_FLAGS = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_accumulation_steps": "--global-batch-size and --micro-batch-size",
    "gradient_clipping": "--clip-grad",
    "bf16": "--bf16",
    "fp16": "--fp16",
    "optimizer": "--optimizer, --lr and the --adam flags",
}
"""Keys that may repeat what the flags say."""

_REFUSED = {
    "scheduler": "the learning rate follows --lr-decay-style, --lr-warmup-iters and --min-lr",
    "amp": "precision comes from --bf16 and --fp16",
    "torch_autocast": "precision comes from --bf16 and --fp16",
    "tensor_parallel": "tensor parallelism comes from --tensor-model-parallel-size",
    "tensorboard": "metrics go to --tensorboard-dir",
    "wandb": "metrics go to --wandb-project",
    "elasticity": "the batch size comes from --global-batch-size",
    "data_efficiency": "the order of the data comes from --data-path and --seed",
    "curriculum_learning": "the order of the data comes from --data-path and --seed",
}
"""Keys of DeepSpeed that have no place in the file, with the reason."""


def load_deepspeed_json(config: RunConfig, world_size: int) -> dict[str, Any]:
    """The DeepSpeed JSON of a run over `world_size` processes (accepted by `check_world`), without RunConfig's keys.

    Raises:
        UsageError: the file cannot be read, or a key of it contradicts the configuration or is not for this file.
    """
    path = _locate(config.parallel.deepspeed_json)
    content = _read(path)
    _check_keys(path, content)
    stage = _stage(path, content)
    if stage != config.parallel.zero_stage:
        raise _contradiction(path, "zero_optimization.stage", stage, "--zero-stage", config.parallel.zero_stage)
    _check_optimizer(path, content)
    _check_offload(path, content.get("zero_optimization", {}), stage)
    for key, expected in _values_of_flags(config, world_size).items():
        if key in content:
            _compare(path, key, content[key], _DECIDED_BY_FLAGS[key], expected)
    return {key: value for key, value in content.items() if key not in _DECIDED_BY_FLAGS}


def read_zero_stage(deepspeed_config: Path) -> int:
    """The ZeRO stage a DeepSpeed JSON asks for (0 if it does not say).

    Raises:
        UsageError: the file cannot be read or its stage is not 0, 1, 2 or 3.
    """
    path = _locate(deepspeed_config)
    return _stage(path, _read(path))


def _locate(name: Path) -> Path:
    """The file itself if there is one, else the shipped one of this bare name (inside the package or beside it)."""
    if name.exists():
        return name
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "ds_configs", package.parent / "ds_configs"):
        if len(name.parts) == 1 and (folder / name).is_file():
            return folder / name
    raise usage_error(_FLAG, name, "no such file", "give a DeepSpeed JSON or use --zero-stage")


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; every way in which it can be unreadable is one line."""
    check_regular(_FLAG, path, "give a JSON file")
    try:
        content = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise usage_error(_FLAG, path, f"cannot be read ({error.strerror})", "give a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise usage_error(_FLAG, path, f"is not valid JSON ({error})", "correct the file") from None
    if not isinstance(content, dict):
        raise usage_error(_FLAG, path, "must hold a JSON object", "correct the file")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; JSON would keep the last of equal keys in silence."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key} appears twice")
    return dict(pairs)


def _stage(path: Path, content: dict[str, Any]) -> int:
    """The ZeRO stage in a DeepSpeed JSON."""
    zero = content.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise usage_error(str(path), "zero_optimization", "must be an object", 'e.g. {"stage": 1}')
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in range(4):
        raise usage_error(str(path), f"zero_optimization.stage {stage}", "must be 0, 1, 2 or 3", "correct the file")
    return stage


def _check_keys(path: Path, content: dict[str, Any]) -> None:
    """Refuses keys that are not for this file, and "auto" where nothing fills it in."""
    known = _DECIDED_HERE | set(_DECIDED_BY_FLAGS)
    for key, value in content.items():
        if key in _REFUSED:
            raise usage_error(str(path), key, _REFUSED[key], "remove the key")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise usage_error(str(path), key, "unknown key", f"did you mean {near[0]}?" if near else "remove the key")
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for name, part in inner if key in _DECIDED_HERE else ():
            if part == "auto":
                whole = f"{key}.{name}" if name else key
                raise usage_error(str(path), whole, '"auto" is filled in by no flag', "give a value or remove the key")


def _check_optimizer(path: Path, content: dict[str, Any]) -> None:
    """Refuse what would have DeepSpeed insist on an optimizer of its own."""
    for key, needed in (("zero_allow_untested_optimizer", True), ("zero_force_ds_cpu_optimizer", False)):
        if content.get(key, needed) is not needed:
            rule = "the optimizer is this program's own, which DeepSpeed would refuse"
            raise usage_error(str(path), f"{key} = {json.dumps(content[key])}", rule, "remove the key")


def _check_offload(path: Path, zero: dict[str, Any], stage: int) -> None:
    """Refuse ways to offload that DeepSpeed ignores at this stage, or that bring another optimizer than the run's."""
    for key, least, what in (
        ("offload_optimizer", 1, "keeps the optimizer's state whole and where it is"),
        ("offload_param", 3, "keeps weights whole and where they are"),
    ):
        name, given = f"zero_optimization.{key}", zero.get(key)
        if not isinstance(given, dict) or given.get("device", "none") == "none":
            continue
        if given["device"] == "nvme":
            rule = "checkpoints read the optimizer's state and weights from memory"
            raise usage_error(str(path), f"{name}.device nvme", rule, 'give "cpu"')
        if stage < least:
            stages = " or ".join(map(str, range(least, 4)))
            fix = f"set zero_optimization.stage to {stages}, or remove the key"
            raise usage_error(str(path), name, f"ZeRO {stage} {what}: it would have no effect", fix)
        for inner, off in (("ratio", 1), ("super_offload", False)):
            if given.get(inner, off) != off:
                rule = "what it leaves on the device is updated by an optimizer of DeepSpeed's, not by --optimizer"
                raise usage_error(str(path), f"{name}.{inner} = {json.dumps(given[inner])}", rule, "remove the key")
    for key, instead in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if key in zero:
            fix = f'give "{instead}": {{"device": "cpu"}}'
            raise usage_error(str(path), f"zero_optimization.{key}", "DeepSpeed has given the key up", fix)
    if zero.get("zenflow"):
        rule = "it updates by an optimizer of DeepSpeed's, not by --optimizer"
        raise usage_error(str(path), "zero_optimization.zenflow", rule, "remove the key")


def _values_of_flags(config: RunConfig, world_size: int) -> dict[str, Any]:
    """What the keys of `_DECIDED_BY_FLAGS` have to be, in DeepSpeed's form."""
    shape, optimizer = batch_shape(config, world_size), config.optimizer
    parameters: dict[str, Any] = {"lr": optimizer.lr}
    if optimizer.optimizer == "adam":
        parameters["betas"] = [optimizer.adam_beta1, optimizer.adam_beta2]
        parameters["eps"] = optimizer.adam_eps
        parameters["weight_decay"] = optimizer.weight_decay
    return {
        "train_batch_size": config.training.global_batch_size,
        "train_micro_batch_size_per_gpu": shape.micro_batch_size,
        "gradient_accumulation_steps": shape.accumulation_steps,
        "gradient_clipping": optimizer.clip_grad,
        "bf16": {"enabled": config.training.bf16},
        "fp16": {"enabled": config.training.fp16},
        "optimizer": {"type": optimizer.optimizer, "params": parameters},
    }


def _compare(path: Path, key: str, given: Any, flags: str, expected: Any) -> None:
    """Refuses a given value (object by object) that is neither "auto" nor what the flags say."""
    if isinstance(given, dict) and isinstance(expected, dict):
        for name, value in given.items():
            if name not in expected:
                raise usage_error(str(path), f"{key}.{name}", f"{key} is decided by {flags} alone", "remove the key")
            _compare(path, f"{key}.{name}", value, flags, expected[name])
        return
    if isinstance(given, str) and given.lower() in ("auto", str(expected).lower()):
        return
    if given != expected or isinstance(given, bool) != isinstance(expected, bool):
        raise _contradiction(path, key, given, flags, expected)


def _contradiction(path: Path, key: str, given: Any, flags: str, expected: Any) -> UsageError:
    """The error for a value of the file that differs from the configuration's."""
    return usage_error(
        str(path), f"{key} = {json.dumps(given)}", f"contradicts {json.dumps(expected)} from {flags}", "make them equal"
    )
