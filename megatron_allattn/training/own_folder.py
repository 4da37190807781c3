"""The folder of --save as a run begins in it: that it holds no other run, and what is made there first."""

import os
from pathlib import Path

from megatron_allattn.checkpoint import folder
from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.checkpoint.run_folder import (
    CONFIG,
    FOLDER,
    LATEST,
    METRICS,
    begun_from,
    has_saved,
    prepare_run_folder,
)
from megatron_allattn.config import RunConfig, usage_error
from megatron_allattn.training.pace import PACE


def check_own_folder(run: RunConfig) -> None:
    """Raises UsageError: it holds another run, or a folder where files are to be."""
    run_folder = run.checkpoint.save
    if run_folder is None:
        return
    left = (FOLDER, LATEST, METRICS)
    if not run.checkpoint.goes_on and any((run_folder / name).exists() for name in left):
        _check_begins_again(run, run_folder)
    for name in (LATEST, PACE):  # which the first save replaces
        if (run_folder / name).is_dir():
            raise usage_error("--save", run_folder, f"has a folder {name}, where a file is to be", "remove it")


def _check_begins_again(run: RunConfig, run_folder: Path) -> None:
    """The folder of a run may be begun in again where that run came from the same checkpoint and has saved nothing."""
    rule, load = "holds a run already", run_folder
    source = None if has_saved(run_folder) else begun_from(run_folder)
    if source is not None:
        if run.checkpoint.load is not None and os.path.realpath(source) == os.path.realpath(run.checkpoint.load):
            return
        rule, load = f"holds a run that was begun with --load {source} and has saved nothing", source
    fix = f"give --load {load} to go on with it, or choose another folder"
    raise usage_error("--save", run_folder, rule, fix)


def prepare_own_folder(run: RunConfig, step_folder: Path | None) -> list[str]:
    """Make the run folder; lines to tell. step_folder: from which the run goes on. Raises UsageError, StorageError."""
    run_folder = run.checkpoint.save
    if run_folder is None:
        return []
    prepare_run_folder(run_folder)
    write_json_atomic(run_folder / CONFIG, run.to_dict())
    if step_folder is None or not (run.checkpoint.goes_on and run.checkpoint.load_fallback):
        return []
    return folder.set_aside_after(run_folder, step_folder)
