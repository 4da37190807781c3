"""metrics.jsonl and its mirrors: one writer, the run's first rank.

Every record goes to metrics.jsonl in the run folder, with floats that read back to the same bits. TensorBoard and
Weights & Biases get the same names. A sink that was asked for and is not installed is refused before training; one that
fails later is reported once and left out: it never stops a run.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megatron_allattn.checkpoint.files import (
    WITHOUT_LINE,
    append_json_line,
    read_json_lines,
    storage_errors,
    sync_file,
    write_json_lines_atomic,
)
from megatron_allattn.config import LoggingConfig, usage_error

METRICS = "metrics.jsonl"
Record = dict[str, Any]
Mirror = Callable[[Record], None]


def check_sinks(logging: LoggingConfig) -> None:
    """Refuse a sink whose package is absent. Raises UsageError with the package that brings it."""
    for flag, value, package in (
        ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
        ("--wandb-project", logging.wandb_project, "wandb"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            fix = f"pip install {package}, or leave the flag out"
            raise usage_error(flag, value, f"the package {package} is not installed", fix)


def per_unit(loss: float, unit: str) -> Record:
    """What people compare: bits per character (or byte) for such tokenizers, else perplexity."""
    if unit == "token":
        return {"ppl": math.exp(min(loss, 700.0))}
    return {"bpc": loss / math.log(2)}


class Metrics:
    """Writes records on the first rank, does nothing on the others (`folder` None and `logging` None)."""

    def __init__(self, folder: Path | None, logging: LoggingConfig | None, config: Record) -> None:
        self._path = folder / METRICS if folder is not None else None
        self._mirrors: dict[str, Mirror] = {}
        if logging is not None and (events := logging.tensorboard_dir) is not None:
            self._mirrors["tensorboard"] = _opened("--tensorboard-dir", events, lambda: _tensorboard(events))
        if logging is not None and (project := logging.wandb_project) is not None:
            self._mirrors["wandb"] = _opened("--wandb-project", project, lambda: _wandb(project, config))

    def write(self, record: Record) -> None:
        """Append one record; a number that is not finite, for which JSON has none, as null.

        Raises StorageError when the run folder cannot be written.
        """
        record = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        if self._path is not None:
            append_json_line(self._path, record)
        for name, mirror in list(self._mirrors.items()):
            try:
                mirror(record)
            except Exception as error:  # a mirror is a convenience: whatever it raises, the run goes on
                print(f"warning: {name} failed and gets no more records ({error})", file=sys.stderr, flush=True)
                del self._mirrors[name]

    def sync(self) -> None:
        """What was written is on the disk: a checkpoint must not outlive the records before it. Raises StorageError."""
        if self._path is not None and self._path.exists():
            with storage_errors(self._path, 0):
                sync_file(self._path)


def drop_records_after(path: Path, step: int, kinds: Collection[str] = ()) -> int:
    """Remove the records of a file that a run resumed from the checkpoint of `step` makes again; returns how many there
    were.

    kinds: those that it makes again of `step` itself. Raises UsageError naming a line that is no record.
    """
    records = read_json_lines(path)
    for number, record in enumerate(records, start=1):
        at, kind = record.get("step"), record.get("kind")
        if type(at) is not int or not isinstance(kind, str):
            rule = f"line {number} has step {at!r:.40} and kind {kind!r:.40}, expected a whole number and a text"
            raise usage_error("file", path, rule, WITHOUT_LINE)
    kept = [
        record
        for record in records
        if record["step"] < step or (record["step"] == step and record["kind"] not in kinds)
    ]
    if path.exists():
        write_json_lines_atomic(path, kept)
    return len(records) - len(kept)


def _opened(flag: str, value: object, mirror: Callable[[], Mirror]) -> Mirror:
    try:
        return mirror()
    except Exception as error:  # the package's own: a folder that cannot be written, no login, no network
        raise usage_error(flag, value, f"cannot be used ({error})", "correct it or leave the flag out") from error


def _tensorboard(folder: Path) -> Mirror:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (optional)

    writer = SummaryWriter(str(folder))

    def mirror(record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        writer.flush()

    return mirror


def _wandb(project: str, config: Record) -> Mirror:
    import wandb  # noqa: PLC0415  (optional)

    run = wandb.init(project=project, config=config)

    def mirror(record: Record) -> None:
        values = {f"{record['kind']}/{name}": value for name, value in record.items() if name not in ("kind", "step")}
        run.log(values, step=record["step"])

    return mirror
