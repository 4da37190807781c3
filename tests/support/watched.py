"""Run folders for the live view, written as a run writes them."""

import json
from pathlib import Path
from typing import Any

from megatron_allattn.config import CheckpointConfig, ModelConfig, ParallelConfig, RunConfig, TrainingConfig

Record = dict[str, Any]
TOKENS = 512  # of a step


def train(step: int, *, loss: float | None = None, **values: Any) -> Record:
    """A record of a training step of a quarter of a second."""
    loss = 4.0 / step + 1.0 if loss is None else loss
    record = {"kind": "train", "step": step, "loss": loss, "bpc": loss / 0.6931471805599453, "lr": 0.01}
    record |= {"grad_norm": 0.5, "skipped": 0, "tokens": TOKENS * step, "tokens_per_second": 4.0 * TOKENS}
    return record | {"span_mean": 17.5, "span_max": 213.0} | values


def append(folder: Path, *records: Record, name: str = "metrics.jsonl") -> None:
    with (folder / name).open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def begin(folder: Path, *, steps: int = 0, last_step: int = 400) -> Path:
    """A run of the recipe `enwik8-small` by name, with so many steps behind it."""
    folder.mkdir(parents=True, exist_ok=True)
    run = RunConfig(
        recipe="enwik8-small",
        model=ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, max_attention_span=256),
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        training=TrainingConfig(train_iters=last_step),
        checkpoint=CheckpointConfig(save=folder),
    )
    (folder / "config.json").write_text(json.dumps(run.to_dict()))
    if steps:
        append(folder, *(train(step) for step in range(1, steps + 1)))
    return folder


def end(folder: Path, outcome: str = "done", step: int | None = 400, reason: str = "reached --train-iters") -> None:
    (folder / "outcome.json").write_text(json.dumps({"outcome": outcome, "step": step, "reason": reason}))
