"""The arguments of pretrain.py in a life of a job: those of the submission, and where the run goes on from.

A job may live again at any moment, so that it goes on in its own folder: `--load` is what `--save` is. A submission may
name another run to start from; that holds until the job has a checkpoint of its own.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_allattn.checkpoint.run_folder import has_saved
from megatron_allattn.config import RunConfig, parse, usage_error
from megatron_allattn.config.cli import without_flag

REQUEUE_SECONDS = 30.0
"""What a batch script gets, once its ranks have ended, to have the job requeued before its time is up."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """Checked arguments of a submission, and what they say."""

    arguments: tuple[str, ...]
    run: RunConfig
    explicit: frozenset[str]

    @property
    def run_folder(self) -> Path:
        assert self.run.checkpoint.save is not None
        return self.run.checkpoint.save

    @property
    def data_files(self) -> list[str]:
        """Of the files of --data-path those that are there."""
        prefix = self.run.data.data_path
        names = (".json", ".bin", ".idx", "_train.bin", "_train.idx") if prefix is not None else ()
        return [path for name in names if os.path.exists(path := f"{prefix}{name}")]

    @property
    def absent(self) -> str | None:
        """The first file of --data-path that a run would read, if none of them is there."""
        data = self.run.data
        if data.data_path is None or self.data_files:
            return None
        return data.data_path + (".json" if data.tokenizer_type is None else ".bin")

    def of_life(self, signal_seconds: int | None) -> tuple[str, ...]:
        """The arguments with which a life starts now. signal_seconds: how long before its end it is told to stop."""
        words, load = list(self.arguments), self.run.checkpoint.load
        if load is None or self.run.checkpoint.goes_on or has_saved(self.run_folder):
            words = [*without_flag(words, "load"), "--load", os.fspath(self.run_folder)]
        # A save that would take longer than the job is given up while the batch script can still ask for a requeue.
        deadline = "--stop-deadline-minutes"
        if signal_seconds is not None and deadline not in self.explicit:
            minutes = max(signal_seconds - REQUEUE_SECONDS, signal_seconds / 2) / 60
            words += [deadline, f"{minutes:g}"] if minutes < self.run.checkpoint.stop_deadline_minutes else []
        return tuple(words)


def submitted(arguments: Sequence[str]) -> Submitted:
    """The arguments of pretrain.py that a job was submitted with. Raises UsageError: pretrain.py would refuse them, or
    a job cannot live again with them."""
    run, explicit = parse(arguments)
    if run.checkpoint.save is None:
        rule = "a job that lives again needs a run folder that all nodes see"
        raise usage_error("--save", "", rule, "give --save DIR")
    text = os.fspath(run.checkpoint.save)
    if "\\" in text or not text.isprintable():
        rule = "srun cannot write the ranks' output below such a name"
        raise usage_error("--save", text, rule, "choose one without backslashes and control characters")
    return Submitted(arguments=tuple(arguments), run=run, explicit=explicit)
