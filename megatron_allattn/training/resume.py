"""Going on from a checkpoint: find it, hold it against the run, load it, and clear away what will be made again.

A converted checkpoint (`"data": null` in its state.json) has no place in our data: its streams start at the beginning
with empty caches, in batches of any size. Its model must still be the run's. A format of ours that has the optimizer's
state has its settings too, which hold as of training here; the paper's .pt does not, and from weights alone, at step 0,
a new training begins. Its tokenizer is compared unless all that is known of it is its size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.checkpoint import folder, manifest, save
from megatron_allattn.checkpoint.progress import Progress
from megatron_allattn.checkpoint.run_folder import METRICS, OBSERVATIONS, begun_from, has_saved, run_around
from megatron_allattn.checkpoint.tensors import TensorReader
from megatron_allattn.config import ModelConfig, RunConfig, UsageError, usage_error
from megatron_allattn.config.errors import flag
from megatron_allattn.data.dataset import Dataset
from megatron_allattn.data.tokenizers import difference, tokenizer_from_json
from megatron_allattn.training.metrics import drop_records_after

_PRECISION = ("bf16", "fp16")
_BATCHES = ("seq_length", "global_batch_size", "seed")
_PLATEAU = ("eval_interval", "eval_iters")  # when it is seen
# Of what a run must be resumed with (`_fixed`), --override may change neither what the state is made of, nor where its
# data goes on.
_OVERRIDABLE_BUT = {"optimizer": {"optimizer"}, "training": set(_BATCHES)}
UNKNOWN_TOKENS = (
    "the checkpoint does not say what its ids mean (it was converted without a vocabulary): the data's tokenizer could "
    "not be compared with its own, only their sizes; if they differ, the loss means nothing"
)


@dataclass(frozen=True)
class Change:
    """A setting that is not what the checkpoint was trained with; overridable: whether --override allows it."""

    field: str
    then: Any
    now: Any
    overridable: bool

    def __str__(self) -> str:
        return f"{flag(self.field)} {self.then} (now {self.now})"


def find_checkpoint(run: RunConfig, check: manifest.Check) -> tuple[Path | None, list[str]]:
    """The newest step of --load, or that step itself; None where --load is --save and nothing has been saved: the run
    begins.

    check: of its files (`with_shared_check`).

    Raises UsageError where it is damaged, unless --load-fallback allows an older one, and where nothing has been saved
    of a run that began with the checkpoint of another.
    """
    load = run.checkpoint.load
    if load is None:
        return None, []
    if run.checkpoint.goes_on and not has_saved(load) and run_around(load) is None:
        if (source := begun_from(load)) is not None:
            rule = f"has saved nothing yet, and was begun with --load {source}"
            raise usage_error("--load", load, rule, f"give --load {source} again, or choose another folder")
        return None, []
    way_out = None if run.checkpoint.load_fallback else "give --load-fallback to go on from an older step"
    return folder.find(load, check, way_out)


def is_converted(state: dict[str, Any]) -> bool:
    """Whether a checkpoint's state was made by a conversion rather than by a run."""
    return state["data"] is None


def knows_its_tokens(state: dict[str, Any]) -> bool:
    """Whether a checkpoint says what its ids mean: one that was converted without a vocabulary does not."""
    return not (is_converted(state) and state["tokenizer"]["type"] == "null")


def check_resume(run: RunConfig, dataset: Dataset, step_folder: Path) -> list[Change]:
    """Refuse to go on with another model, other data or, without --override, another schedule; what it overrides.

    Raises UsageError listing both values of everything that differs.
    """
    state = save.read_state(step_folder, save.RUN_FIELDS)
    Progress.of(step_folder / "state.json", state, state["step"], run)
    then, now = save.read_config(step_folder, state).to_dict(), run.to_dict()
    converted, style = is_converted(state), run.optimizer.lr_decay_style
    unsaid = converted and (state["step"] == 0 or not (state.get("source") or {}).get("settings_known"))
    changes = [
        Change(name, then[section][name], now[section][name], _is_overridable(section, name))
        for section, names in _fixed(converted, unsaid, style).items()
        for name in names or now[section]
        if now[section][name] != then[section][name]
    ]
    implied_end = style in ("linear", "cosine") and run.optimizer.lr_decay_iters is None
    if implied_end and not unsaid and run.training.train_iters != then["training"]["train_iters"]:
        changes.append(Change("train_iters", then["training"]["train_iters"], run.training.train_iters, True))
    _refuse_changes(changes, step_folder, override=run.checkpoint.override)
    check_data(run.data.data_path, dataset, step_folder, state, same_text=not converted)
    if converted and state["step"] and not TensorReader(step_folder, "optimizer").names:
        rule = f"it was converted at step {state['step']} without its optimizer's state, which a later step needs"
        raise UsageError(f"{step_folder}: {rule}; convert it with that state, or as step 0")
    return changes


def _fixed(converted: bool, unsaid: bool, style: str) -> dict[str, tuple[str, ...] | None]:
    """What a run must be resumed with, by section of the configuration; None: with all of it."""
    if unsaid:
        return {"model": None, "optimizer": ("optimizer",)}
    training = _PRECISION + (() if converted else _BATCHES) + (_PLATEAU if style == "plateau" else ())
    return {"model": None, "optimizer": None, "training": training}


def _is_overridable(section: str, name: str) -> bool:
    return section in _OVERRIDABLE_BUT and name not in _OVERRIDABLE_BUT[section]


def _refuse_changes(changes: list[Change], step_folder: Path, *, override: bool) -> None:
    refused = [change for change in changes if not (override and change.overridable)]
    if not refused:
        return
    same = "the same value" if len(refused) == 1 else "the same values"
    other = "give --override" if all(change.overridable for change in refused) else "start a new run"
    if [change.field for change in refused] == ["train_iters"]:
        other += ", and --lr-decay-iters for a run that may be prolonged"
    fix = f"resume with {same} or {other}"
    if len(refused) == 1:
        (only,) = refused
        rule = "the decay of {} ends at {}" if only.field == "train_iters" else "{} was trained with {}"
        raise usage_error(flag(only.field), only.now, rule.format(step_folder, only.then), fix)
    raise usage_error("--load", step_folder, f"was trained with {', '.join(map(str, refused))}", fix)


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


def trim_metrics(run_folder: Path | None, step: int, *, judged: bool, finished: bool) -> list[str]:
    """Drop the records that a run resumed at `step` makes again; a note that says so.

    judged: whether its evaluation, if one was due, is in the checkpoint; finished: no step is left, and the last
    evaluations, which come after the last checkpoint, are made again.
    """
    if run_folder is None:
        return []
    kinds = [*(() if judged else ("valid", "plateau")), *(("valid", "test") if finished else ())]
    kinds += ["heads", "memory"] if "valid" in kinds else []
    drop_records_after(run_folder / OBSERVATIONS, step, kinds)
    dropped = drop_records_after(run_folder / METRICS, step, kinds)
    return [f"metrics.jsonl: records after step {step} are made again (dropped {dropped})"] if dropped else []
