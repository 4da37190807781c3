"""Run folders with known curves, written as a run writes them, without a run."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_allattn.config import RECIPES, ModelConfig, RunConfig

Records = Sequence[dict[str, Any]]

MODEL = ModelConfig(num_layers=3, num_attention_heads=2, hidden_size=16, persistent_memory_size=8)
STEPS = 60
START = {
    "kind": "start",
    "step": 0,
    "time": 1_790_000_000.0,
    "world_size": 2,
    "tensor": 2,
    "pipeline": 1,
    "data": 1,
    "zero_stage": 1,
    "device": "cpu",
    "precision": "fp32",
}
OTHER_LAYOUT = START | {"step": 40, "world_size": 4, "data": 2}


def write_lines(path: Path, records: Records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_folder(
    folder: Path,
    metrics: Records | None = None,
    observations: Records | None = None,
    *,
    outcome: dict[str, Any] | None = None,
    model: ModelConfig = MODEL,
    recipe: str | None = None,
) -> Path:
    """A run folder with these files; those of None are absent. With a recipe, of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    config = RunConfig(model=model) if recipe is None else replace(RECIPES[recipe]())
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    if metrics is not None:
        write_lines(folder / "metrics.jsonl", metrics)
    if observations is not None:
        write_lines(folder / "observations.jsonl", observations)
    if outcome is not None:
        (folder / "outcome.json").write_text(json.dumps(outcome))
    return folder


def loss_at(step: int) -> float:
    """The known curve, in nats."""
    return 1.0 + 4.0 / (1 + step)


def train(step: int, **other: Any) -> dict[str, Any]:
    """A record of a step."""
    loss = loss_at(step)
    record = {"kind": "train", "step": step, "loss": loss, "bpc": loss / np.log(2), "lr": 0.001 * step}
    record |= {"grad_norm": 2.0 / step, "skipped": 0, "tokens": 100 * step, "tokens_per_second": 1000.0 + step}
    return record | {"span_mean": 10.0 + step, "span_max": 20.0 + step} | other


def evaluation(kind: str, step: int) -> dict[str, Any]:
    loss = loss_at(step) + 0.5
    return {"kind": kind, "step": step, "loss": loss, "bpc": loss / np.log(2), "tokens": 1000}


def spans_at(step: int, layers: int = 3, heads: int = 2) -> np.ndarray:
    """Known spans [layers, heads]: another number in every cell."""
    return step + 10.0 * np.arange(layers)[:, None] + np.arange(heads)


def heads_at(step: int) -> dict[str, Any]:
    cells = np.arange(6.0).reshape(3, 2)
    return {
        "kind": "heads",
        "step": step,
        "spans": spans_at(step).tolist(),
        "persistent_share": ((cells + 1) / 10).tolist(),
        "effective_vectors": (cells + 1.5).tolist(),
        "largest_vector": ((cells + 2) / 10).tolist(),
        "dead_vectors": cells.astype(int).tolist(),
    }


def known_metrics() -> list[dict[str, Any]]:
    """Sixty steps with one of everything that can happen."""
    records: list[dict[str, Any]] = []
    for step in range(1, STEPS + 1):
        left_out = step == 30
        records.append(train(step, loss=None if left_out else loss_at(step), skipped=int(step >= 30)))
        if left_out:
            where = {"position": 512, "stream_length": 10_000}
            records.append({"kind": "skip", "step": 30, "reason": "the loss is not finite on rank 1", **where})
        if step % 20 == 0:
            records.append(evaluation("valid", step))
    records.insert(52, {"kind": "override", "step": 50, "changes": {"lr": [0.1, 0.2]}})
    spike = {"kind": "spike", "step": 55, "loss": 9.0, "median": 1.0, "position": 7, "stream_length": 10_000}
    plateau = {"kind": "plateau", "step": 60, "lr": 0.0001, "best": 1.5, "last_step": 80, "reason": "no better"}
    return [*records, spike, plateau, evaluation("test", STEPS)]


def known_observations() -> list[dict[str, Any]]:
    memory = [{"kind": "memory", "step": s, "peak_bytes": (s // 20) * 2**30, "device": "cuda"} for s in (20, 40, 60)]
    measured = [heads_at(20), memory[0], heads_at(40), memory[1]]
    return [START, *measured[:2], START | {"step": 20}, *measured[2:], OTHER_LAYOUT, heads_at(60), memory[2]]


def known_run(folder: Path, **other: Any) -> Path:
    done = {"outcome": "done", "step": STEPS, "reason": "step 60 was the last"}
    return run_folder(folder, known_metrics(), known_observations(), outcome=done, **other)
