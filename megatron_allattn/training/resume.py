"""Going on from a checkpoint: find it, hold it against the run, load it, and clear away what will be made again.

A checkpoint converted from another program (`"data": null` in its state.json) has a model, its optimizer's state and a
step, but no place in our data: its streams start at the beginning with empty caches. Its model must still be the run's;
the other settings are not ours to compare, and its tokenizer is compared unless all that is known of it is its size.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.checkpoint import folder, save
from megatron_allattn.checkpoint.tensors import TensorReader
from megatron_allattn.config import ModelConfig, RunConfig, UsageError, usage_error
from megatron_allattn.config.errors import flag
from megatron_allattn.data.dataset import Dataset
from megatron_allattn.data.tokenizers import difference, tokenizer_from_json
from megatron_allattn.training.metrics import drop_records_after

# What a run must be resumed with, by section of the configuration; None: with all of it.
_Fixed = dict[str, tuple[str, ...] | None]
_TRAINING = ("seq_length", "global_batch_size", "seed", "bf16", "fp16")
_FIXED: _Fixed = {"model": None, "optimizer": None, "training": _TRAINING}
_FIXED_WITH_PLATEAU: _Fixed = {**_FIXED, "training": (*_TRAINING, "eval_interval", "eval_iters")}  # when it is seen
UNKNOWN_TOKENS = (
    "the checkpoint does not say what its ids mean (it was converted without --vocabulary): the data's tokenizer could "
    "not be compared with its own, only their sizes; if they differ, the loss means nothing"
)
_FIXED_WHEN_CONVERTED: _Fixed = {"model": None, "optimizer": ("optimizer",)}


def find_checkpoint(run: RunConfig) -> tuple[Path | None, list[str]]:
    """The newest intact step of --load; None where --load is --save and nothing has been saved: the run begins."""
    load, own = run.checkpoint.load, run.checkpoint.save
    if load is None:
        return None, []
    new = own is not None and own.absolute() == load.absolute() and not folder.has_saved(load)
    if new and folder.run_around(load) is None:
        return None, []
    return folder.find_latest(load, check_bytes=True)


def is_converted(state: dict[str, Any]) -> bool:
    """Whether a checkpoint's state was made by a conversion rather than by a run."""
    return state["data"] is None


def knows_its_tokens(state: dict[str, Any]) -> bool:
    """Whether a checkpoint says what its ids mean: one that was converted without a vocabulary does not."""
    return not (is_converted(state) and state["tokenizer"]["type"] == "null")


def check_resume(run: RunConfig, dataset: Dataset, step_folder: Path) -> None:
    """Refuse to go on with another model, other data or another schedule. Raises UsageError listing both values."""
    state = save.read_state(step_folder)
    then, now = save.read_config(step_folder, state).to_dict(), run.to_dict()
    converted, style = is_converted(state), run.optimizer.lr_decay_style
    fixed = _FIXED_WHEN_CONVERTED if converted else _FIXED_WITH_PLATEAU if style == "plateau" else _FIXED
    for section, names in fixed.items():
        for name in names or now[section]:
            if now[section][name] != then[section][name]:
                rule = f"{step_folder} was trained with {then[section][name]}"
                raise usage_error(flag(name), now[section][name], rule, "resume with the same value or start a new run")
    implied_end = style in ("linear", "cosine") and run.optimizer.lr_decay_iters is None
    if implied_end and not converted and run.training.train_iters != then["training"]["train_iters"]:
        rule = f"the decay of {step_folder} ends at {then['training']['train_iters']}"
        fix = "resume with the same value; a run that may be prolonged sets --lr-decay-iters"
        raise usage_error("--train-iters", run.training.train_iters, rule, fix)
    check_data(run.data.data_path, dataset, step_folder, state, same_text=not converted)
    if converted and state["step"] and not TensorReader(step_folder, "optimizer").names:
        rule = f"it was converted at step {state['step']} without its optimizer's state, which a later step needs"
        raise UsageError(f"{step_folder}: {rule}; convert it with that state, or as step 0")


def check_data(
    data_path: str | None, dataset: Dataset, step_folder: Path, state: dict[str, Any], *, same_text: bool
) -> None:
    """The tokens mean the same and, with `same_text`, are the same. Raises UsageError listing both values.

    Where the checkpoint does not know its tokens (`knows_its_tokens`), only their number can be compared.
    """
    tokenizer, shown = dataset.tokenizer, data_path or "(left out: Python's own sources)"
    rows: list[tuple[str, int | str, int | str]] = [("vocabulary size", tokenizer.vocab_size, state["vocab_size"])]
    words = ""
    if knows_its_tokens(state):
        rows.append(("tokenizer", tokenizer.fingerprint, state["tokenizer_sha256"]))
        then = tokenizer_from_json(state["tokenizer"], str(step_folder / "state.json"))
        words = f" ({found})" if (found := difference(tokenizer, then)) else ""
    if same_text:
        rows.append(("data", dataset.fingerprint, state["data_sha256"]))
    for what, now, kept in rows:
        if now != kept:
            fix = "resume with the same data" if same_text else "give data prepared with the same tokenizer"
            raise UsageError(
                f"--data-path {shown}: its {what} is {now}, {step_folder} was trained with {kept}{words}; {fix}"
            )


def saved_spans(step_folder: Path, model: ModelConfig) -> Tensor:
    """z of every head in a verified step folder, [layers, heads]. Raises UsageError: one is missing."""
    weights = TensorReader(step_folder, "weights")
    return torch.stack([weights.read(f"layers.{layer}.span").flatten() for layer in range(model.num_layers)])


def trim_metrics(run_folder: Path | None, step: int, last_step: int) -> list[str]:
    """Drop the records that a run resumed at `step` makes again; a note that says so."""
    dropped = drop_records_after(run_folder, step, finished=step >= last_step) if run_folder is not None else 0
    return [f"metrics.jsonl: records after step {step} are made again (dropped {dropped})"] if dropped else []
