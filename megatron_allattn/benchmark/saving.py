"""What a checkpoint costs: how fast its files are written beside plain files of as many bytes, and how long training
stands still for one that is written while it goes on.

One process, all of whose state is in host memory. A save is that of a run: fragments, files, hashes, fsync, commit. The
plain files are as large, have the same bytes and are flushed too.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from megatron_allattn.benchmark.networks import Z, random_network, zipf_tokens
from megatron_allattn.benchmark.timing import ratios, summarize
from megatron_allattn.checkpoint.saver import Saver
from megatron_allattn.checkpoint.tensors import DEFAULT_MAX_BYTES, cut
from megatron_allattn.config import ModelConfig, RunConfig, TrainingConfig
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import choose_fused
from megatron_allattn.model.backends import backend_of
from megatron_allattn.parallel.groups import single_process_groups

CPU = torch.device("cpu")


class Saves:
    """A training whose state can be saved in `folder`; z: None with a fixed span."""

    def __init__(self, folder: Path, model: ModelConfig, vocab_size: int, batch: int, block: int, z: Z | None) -> None:
        attend = backend_of(model, "auto", CPU, torch.float32).attend
        network = random_network(model, vocab_size, z, CPU, torch.float32, attend).requires_grad_()
        training = TrainingConfig(seq_length=block, global_batch_size=batch)
        run, groups = RunConfig(model=model, training=training), single_process_groups()
        self.engine = PlainEngine(network, run, groups, CPU, torch.float32, choose_fused("auto", False))
        tokens = zipf_tokens(vocab_size, batch, block + 1).numpy()
        self._block, self._folder, self.number = (tokens[:, :-1], tokens[:, 1:]), folder, 0
        self._savers = {asynchronous: self._saver(asynchronous) for asynchronous in (False, True)}
        self.num_bytes = sum(one.values.numel() * one.values.itemsize for one in self.engine.fragments())

    def step(self) -> float:
        """Seconds of a training step."""
        start, self.number = time.perf_counter(), self.number + 1
        self.engine.train_step(*self._block, self.number, 1e-5, self.engine.spans())
        return time.perf_counter() - start

    def plain(self) -> float:
        """MB/s of writing and flushing files."""
        folder = self._folder / "plain"
        folder.mkdir()
        values = [one.values.view(torch.uint8).numpy().data for one in self.engine.fragments() if one.values.numel()]
        start = time.perf_counter()
        for number, part in enumerate(cut(values, len, DEFAULT_MAX_BYTES)):
            with open(folder / str(number), "xb", buffering=0) as handle:
                for content in part:
                    left = content
                    while left:
                        left = left[handle.write(left) :]
                os.fsync(handle.fileno())
        took = time.perf_counter() - start
        shutil.rmtree(folder)
        return self.num_bytes / 1e6 / took

    def save(self) -> float:
        """MB/s of a save that training waits for."""
        saver, start = self._savers[False], time.perf_counter()
        saver.save(self.number, {})
        saver.finished()
        took = time.perf_counter() - start
        self._clear()
        return self.num_bytes / 1e6 / took

    def beside(self) -> dict[str, float]:
        """A save that training does not wait for: seconds for which it stands still, and those of the steps until the
        save has ended, on average."""
        saver, start = self._savers[True], time.perf_counter()
        saver.save(self.number, {})
        blocked = time.perf_counter() - start
        steps: list[float] = []
        while not steps or (saver.finished() is None and not saver.failed):
            steps.append(self.step())
        saver.wait()
        self._clear()
        return {"blocked": blocked, "step": sum(steps) / len(steps)}

    def _saver(self, asynchronous: bool) -> Saver:
        return Saver(self._folder / "run", self.engine, asynchronous=asynchronous, after_commit=lambda *_: None)

    def _clear(self) -> None:
        shutil.rmtree(self._folder / "run")


def measure_saves(saves: Saves, *, runs: int, warmup: int) -> dict[str, Any]:
    """The numbers for the JSON file; docs/performance.md says what they mean."""
    rates: dict[str, list[float]] = {"plain": [], "save": [], "step": []}
    beside = []
    for turn in range(warmup + runs):
        writers = [("plain", saves.plain), ("save", saves.save)]
        found = {name: write() for name, write in writers[:: -1 if turn % 2 else 1]}
        found["step"] = saves.step()
        asynchronous = saves.beside()
        if turn >= warmup:
            for name, one in found.items():
                rates[name].append(one)
            beside.append(asynchronous)
    plain, save, step = rates.values()
    return {
        "bytes": saves.num_bytes,
        "plain_mb_per_second": summarize(plain).to_dict(),
        "save_mb_per_second": summarize(save).to_dict(),
        "share_of_plain": ratios(save, plain).to_dict(),
        "seconds_per_step": summarize(step).to_dict(),
        "blocked_seconds": summarize([one["blocked"] for one in beside]).to_dict(),
        "blocked_share": ratios([one["blocked"] for one in beside], step).to_dict(),
        "step_beside": ratios([one["step"] for one in beside], step).to_dict(),
    }
