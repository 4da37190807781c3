"""metrics.jsonl and its mirrors: one writer, the run's first rank.

Every record goes to metrics.jsonl in the run folder, with floats that read back to the same bits. TensorBoard and
Weights & Biases (sinks.py) get the same names, behind threads of their own (mirror.py).
"""

import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron_allattn.checkpoint.files import (
    WITHOUT_LINE,
    append_json_line,
    read_json_lines,
    storage_errors,
    write_json_lines_atomic,
)
from megatron_allattn.checkpoint.run_folder import METRICS
from megatron_allattn.config import usage_error
from megatron_allattn.config.disk import sync_file
from megatron_allattn.training.mirror import Mirror, Record


def per_unit(loss: float, unit: str) -> Record:
    """What people compare: bits per character (or byte) for such tokenizers, else perplexity."""
    if unit == "token":
        return {"ppl": math.exp(min(loss, 700.0))}
    return {"bpc": loss / math.log(2)}


class Metrics:
    """Writes records on the first rank, does nothing on the others (`folder` None and no mirrors)."""

    def __init__(self, folder: Path | None, mirrors: Sequence[Mirror] = ()) -> None:
        self._path = folder / METRICS if folder is not None else None
        self._mirrors = mirrors

    @property
    def notes(self) -> list[str]:
        """What is to be said of the mirrors."""
        return [mirror.note for mirror in self._mirrors if mirror.note is not None]

    def go_on(self) -> None:
        """What is in metrics.jsonl now is kept: the mirrors catch up with it."""
        if self._path is not None and self._path.exists():
            for mirror in self._mirrors:
                mirror.catch_up(self._path)

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
        for mirror in self._mirrors:
            mirror.put(record)

    def sync(self) -> None:
        """What was written is on the disk: a checkpoint must not outlive the records before it. Raises StorageError."""
        if self._path is not None and self._path.exists():
            with storage_errors(self._path, 0):
                sync_file(self._path)

    def close(self, seconds: float) -> None:
        """The run is over: mirrors get so long, all together, to write what they have."""
        deadline = time.monotonic() + seconds
        for mirror in self._mirrors:
            mirror.close(max(0.1, deadline - time.monotonic()))


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
