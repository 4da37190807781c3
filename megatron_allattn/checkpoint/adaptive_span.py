"""Checkpoints of the paper's published code (the all-attention branch of adaptive-span) ↔ ours, both directions.

Such a file is a dictionary that `torch.save` wrote:

    model            the module's state; keys behind `module.`, since that code trains through a data-parallel wrapper
    optimizer        of torch: state by parameter number (in the order of the model's keys, each tensor once), and one
                     group of hyper-parameters; Adagrad keeps `sum`, Adam `exp_avg` and `exp_avg_sq`, both `step`
    scheduler_iter   updates so far, only in a run with a warm-up
    logger, iter_no  what it printed, and the number of its outer iteration; kept beside our checkpoint for the way back

Everything in it is accounted for: what is missing, unknown or would be ignored is an error that names it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.checkpoint.adaptive_span_model import (
    ModelState,
    check_range,
    check_tensor,
    read_model,
    write_model,
)
from megatron_allattn.checkpoint.pickled import read_pickled
from megatron_allattn.config import OptimizerConfig, RunConfig, check_run, usage_error
from megatron_allattn.config.errors import flag

FORMAT = "adaptive-span"
STATES = {"adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}
_SQUARES = ("sum", "exp_avg_sq")  # of gradients, so never negative
_ITERATION = 1000  # updates in one outer iteration of that code, unless its flag says otherwise
_GIVE = "give a checkpoint of the paper's published code"

# Settings of torch's optimizers that every file may have, beside those that we have too; the values are those of a file
# of our own. Some must have them, the others do not matter: they only decide how an update is computed.
_COMMON: dict[str, Any] = {
    "weight_decay": 0,
    "maximize": False,
    "foreach": None,
    "differentiable": False,
    "fused": None,
}
_SETTINGS = {
    "adagrad": {**_COMMON, "lr_decay": 0, "eps": 1e-10, "initial_accumulator_value": 0},  # the latter is in the sums
    "adam": {**_COMMON, "amsgrad": False, "capturable": False, "decoupled_weight_decay": False},
}
_MUST_BE = {"weight_decay": 0, "maximize": False, "lr_decay": 0, "amsgrad": False}


@dataclass(frozen=True)
class Checkpoint:
    """A file's content. optimizer: the fields of OptimizerConfig that it decides, `lr` being the rate of its last
    update; initial_lr: the rate that this warms up to; state: WEIGHT/STATE, as in our checkpoints; source: the rest of
    it, JSON-able, for the way back.
    """

    model: ModelState
    optimizer: dict[str, Any]
    initial_lr: float
    step: int
    state: dict[str, Tensor]
    source: dict[str, Any]


def read(path: Path) -> Checkpoint:
    """Read and check a whole file; no code in it is run. Raises UsageError, one line that names what is wrong."""
    content = read_pickled(path)
    keys = {"model", "optimizer", "logger", "iter_no"}
    if not isinstance(content, dict):
        raise usage_error("file", path, f"holds a {type(content).__name__}, not a dictionary", _GIVE)
    _check_keys(path, "the file", content, keys, keys | {"scheduler_iter"})
    model = read_model(content["model"], path)
    group, kind, steps, state = _read_optimizer(path, content["optimizer"], model.weights)
    if kind == "adam":
        beta1, beta2 = group["betas"]
        optimizer = {"adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": group["eps"]}
    else:
        optimizer = {"clip_grad": group["grad_clip"]}
    scheduled = _count(path, "scheduler_iter", content.get("scheduler_iter", steps))
    if scheduled != steps:
        rule = f"scheduler_iter is {scheduled}, its optimizer has made {steps} updates"
        raise usage_error("file", path, rule, "both count the updates since the start: set them equal")
    source = {"format": FORMAT, "keys": model.keys, "scheduler": "scheduler_iter" in content}
    source |= {"iter_no": _count(path, "iter_no", content["iter_no"]), "group": group}
    source |= {"logger": _plain(path, "logger", content["logger"])}
    optimizer |= {"optimizer": kind, "lr": group["lr"], "weight_decay": 0.0}
    return Checkpoint(model, optimizer, group.get("initial_lr", group["lr"]), steps, state, source)


def _read_optimizer(
    path: Path, optimizer: Any, weights: dict[str, Tensor]
) -> tuple[dict[str, Any], str, int, dict[str, Tensor]]:
    """Hyper-parameters, kind, number of updates, and the state by WEIGHT/STATE."""
    _check_keys(path, "optimizer", optimizer, {"state", "param_groups"})
    groups, states = optimizer["param_groups"], optimizer["state"]
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(states, dict):
        raise usage_error("file", path, "its optimizer has not one group of parameters and their states", _GIVE)
    group = dict(groups[0]) if isinstance(groups[0], dict) else {}
    numbers = group.pop("params", None)
    numbered = isinstance(numbers, list) and all(type(number) is int for number in numbers)
    if not numbered or len(numbers) != len(weights) or set(numbers) != set(states):
        rule = f"its optimizer does not hold one state for each of the model's {len(weights)} parameters"
        raise usage_error("file", path, rule, _GIVE)
    first = states[numbers[0]]
    kinds = [kind for kind, kept in STATES.items() if isinstance(first, dict) and first.keys() == {"step", *kept}]
    if not kinds:
        rule = "its optimizer's states are neither Adagrad's (step, sum) nor Adam's (step, exp_avg, exp_avg_sq)"
        raise usage_error("file", path, rule, "only these two can be converted")
    _check_group(path, kinds[0], group)
    steps: dict[int, str] = {}
    kept: dict[str, Tensor] = {}
    for number, (name, weight) in zip(numbers, weights.items(), strict=True):
        _check_keys(path, f"optimizer state of {name}", states[number], {"step", *STATES[kinds[0]]})
        steps.setdefault(_count(path, f"optimizer step of {name}", states[number]["step"]), name)
        for which in STATES[kinds[0]]:
            tensor = states[number][which]
            check_tensor(path, f"optimizer state {which} of {name}", tensor)
            if tensor.shape != weight.shape:
                rule = f"optimizer state {which} of {name} has shape {tuple(tensor.shape)}"
                raise usage_error("file", path, f"{rule}, the weight {tuple(weight.shape)}", _GIVE)
            if which in _SQUARES:
                check_range(path, f"optimizer state {which} of {name}", tensor, math.inf)
            kept[f"{name}/{which}"] = tensor
    if len(steps) > 1:
        (one, first_name), (other, other_name) = list(steps.items())[:2]
        rule = f"its optimizer has made {one} updates of {first_name} and {other} of {other_name}"
        raise usage_error("file", path, rule, "one number of updates is kept for all: set them equal")
    return group, kinds[0], next(iter(steps)), kept


def _check_group(path: Path, kind: str, group: dict[str, Any]) -> None:
    """Hyper-parameters that this program has, or that have their neutral value."""
    own = {"adagrad": {"lr", "grad_clip"}, "adam": {"lr", "betas", "eps"}}[kind]
    _check_keys(path, f"optimizer's {kind} settings", group, own, own | {"initial_lr", *_SETTINGS[kind]})
    for name, value in group.items():
        _plain(path, f"optimizer's {name}", value)
    numbers: dict[str, Any] = {name: group[name] for name in ("lr", "initial_lr", "grad_clip", "eps") if name in group}
    if kind == "adam":
        betas = group["betas"] if isinstance(group["betas"], tuple | list) else ()
        numbers |= {f"betas[{index}]": beta for index, beta in enumerate(betas)}
        if len(betas) != 2:
            raise usage_error("file", path, f"its optimizer's betas are {group['betas']!r}", _GIVE)
    for name, value in numbers.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise usage_error("file", path, f"its optimizer's {name} is {value!r}, expected a number", _GIVE)
    neutral = _MUST_BE | ({"eps": 1e-10} if kind == "adagrad" else {})
    for name in neutral.keys() & group.keys():
        if group[name] != neutral[name]:
            rule = f"its optimizer's {name} is {group[name]!r}, here it is always {neutral[name]!r}"
            raise usage_error("file", path, rule, "such a run cannot go on here")


def configure(path: Path, found: Checkpoint, run: RunConfig, explicit: frozenset[str]) -> RunConfig:
    """The run that a file belongs to: what it says of itself, and `run` for the rest.

    explicit: the flags that the user gave. UsageError: one of them, or the recipe, contradicts the file, or a flag has
    no effect on such a run.
    """

    def said(name: str) -> bool:
        return flag(name) in explicit or run.recipe is not None

    def checked(section: Any, fields: dict[str, Any]) -> dict[str, Any]:
        for name, value in fields.items():
            given = getattr(section, name)
            if said(name) and given != value:
                fix = "leave it out" if flag(name) in explicit else f"give {flag(name)} {value} or no --recipe"
                raise usage_error(flag(name), given, f"{path} has {value}", fix)
        return fields

    model = checked(run.model, found.model.shape | {"position_values": "none", "empty_cache": "attend"})
    if found.model.shape["adaptive_span"] and flag("span_normalization") not in explicit:
        model["span_normalization"] = "window"  # what that code computes
    optimizer = {name: value for name, value in found.optimizer.items() if name != "lr"}
    optimizer = checked(run.optimizer, optimizer)
    optimizer |= checked(run.optimizer, {"lr": _base_rate(path, found, run.optimizer, said("lr_warmup_iters"))})
    run = replace(run, model=replace(run.model, **model), optimizer=replace(run.optimizer, **optimizer))
    check_run(run, explicit)
    return run


def _base_rate(path: Path, found: Checkpoint, config: OptimizerConfig, said: bool) -> float:
    """--lr: the rate after the warm-up.

    In that code a run that is started again with another rate keeps the first one as `initial_lr`; a rate below it is
    therefore either that or a warm-up under way, and only the length of the warm-up tells which.
    """
    lr, initial, warmup = found.optimizer["lr"], found.initial_lr, config.lr_warmup_iters
    if math.isclose(lr, initial * min(1.0, found.step / warmup) if warmup else initial, rel_tol=1e-6):
        return initial
    if said and found.step >= warmup:
        return lr
    rates = f"{path} is at step {found.step} with rate {lr} of an initial {initial}: of a warm-up, or of a later rate"
    fix = "give the length of its warm-up, 0 if the rate has fallen since"
    raise usage_error("--lr-warmup-iters", warmup if said else "(not given)", rates, fix)


def write(
    run: RunConfig,
    step: int,
    lr: float,
    weight: Callable[[str], Tensor],
    state: Callable[[str], Tensor] | None,
    source: dict[str, Any] | None,
) -> dict[str, Any]:
    """The content of such a file. Raises UsageError: that code has no such model or optimizer.

    lr: the rate of the last update; weight, state: a full tensor by its name in our checkpoints, no state where there
    is none yet; source: what `read` gave, when this checkpoint was converted and not trained since.
    """
    kept = STATES[run.optimizer.optimizer]
    if run.optimizer.weight_decay:
        rule = "the paper's published code has none"
        raise usage_error("--weight-decay", run.optimizer.weight_decay, rule, "it cannot be converted")
    if source is None:
        source = {"keys": None, "scheduler": run.optimizer.lr_warmup_iters > 0, "logger": {}}
        source |= {"iter_no": max(step // _ITERATION - 1, 0), "group": _new_group(run.optimizer, lr)}
    model, names = write_model(run.model, weight, source["keys"])

    def kept_of(name: str) -> dict[str, Tensor]:
        return {which: state(f"{name}/{which}") if state else torch.zeros_like(weight(name)) for which in kept}

    states = {number: {"step": torch.tensor(float(step)), **kept_of(name)} for number, name in enumerate(names)}
    group = {name: tuple(value) if name == "betas" else value for name, value in source["group"].items()}
    content = {"iter_no": source["iter_no"], "model": model, "logger": source["logger"]}
    content["optimizer"] = {"state": states, "param_groups": [{**group, "params": list(range(len(names)))}]}
    if source["scheduler"]:
        content["scheduler_iter"] = step
    return content


def _new_group(config: OptimizerConfig, lr: float) -> dict[str, Any]:
    """The hyper-parameters of a run of ours as torch's optimizer keeps them."""
    own: dict[str, Any] = {"grad_clip": config.clip_grad}
    if config.optimizer == "adam":
        own = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    return {"lr": lr, **_SETTINGS[config.optimizer], **own, "initial_lr": config.lr}


def _check_keys(path: Path, what: str, found: Any, required: set[str], known: set[str] | None = None) -> None:
    """UsageError naming the first key that is missing or unknown."""
    if not isinstance(found, dict):
        raise usage_error("file", path, f"{what}: expected a dictionary, found a {type(found).__name__}", _GIVE)
    if missing := sorted(required - found.keys()):
        raise usage_error("file", path, f"{what}: key {missing[0]} is missing", _GIVE)
    if unknown := [key for key in found if key not in (known or required)]:
        raise usage_error("file", path, f"{what}: key {unknown[0]} is unknown", _GIVE)


def _count(path: Path, what: str, value: Any) -> int:
    """A number of updates or iterations, which older torch keeps as an int and newer as a tensor."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if type(number) not in (int, float) or not 0 <= number < 2**31 or number != int(number):
        raise usage_error("file", path, f"{what} is {number!r}, expected a whole number from 0", _GIVE)
    return int(number)


def _plain(path: Path, what: str, value: Any) -> Any:
    """The value, which JSON keeps as it is (a tuple as a list)."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(path, f"{what} {key}", one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(path, what, one) for one in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise usage_error("file", path, f"{what}: expected plain values, found a {type(value).__name__}", _GIVE)
