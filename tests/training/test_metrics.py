"""metrics.jsonl: every bit of every float, and what is dropped of it where a run goes on."""

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.checkpoint.run_folder import METRICS
from megatron_allattn.config import UsageError
from megatron_allattn.training.metrics import Metrics, drop_records_after, per_unit


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_floats_read_back_to_the_same_bits(tmp_path: Path) -> None:
    generator = random.Random(3)
    every = [struct.unpack("<d", generator.randbytes(8))[0] for _ in range(2000)]
    floats = [value for value in every if math.isfinite(value)] + [5e-324, -0.0, 0.1, 1 / 3, 2.0**53 + 2]
    sink = Metrics(tmp_path)
    for step, value in enumerate(floats):
        sink.write({"kind": "train", "step": step, "loss": value})
    found = [record["loss"] for record in lines(tmp_path)]
    assert struct.pack(f"<{len(floats)}d", *found) == struct.pack(f"<{len(floats)}d", *floats)


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Metrics(None).write({"kind": "train", "step": 1, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_what_the_loss_is_compared_in() -> None:
    assert per_unit(math.log(2), "byte") == {"bpc": 1.0}
    assert per_unit(3 * math.log(2), "char") == {"bpc": pytest.approx(3.0, rel=1e-15)}
    assert per_unit(math.log(20.5), "token") == {"ppl": pytest.approx(20.5, rel=1e-14)}
    assert math.isfinite(per_unit(1e4, "token")["ppl"])


def written(folder: Path) -> list[dict[str, Any]]:
    records = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 6)]
    records.insert(3, {"kind": "valid", "step": 3, "loss": 0.7})
    records += [{"kind": "valid", "step": 5, "loss": 0.6}, {"kind": "test", "step": 5, "loss": 0.5}]
    for record in records:
        Metrics(folder).write(record)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # the writer was killed
    return records


def test_records_that_are_made_again_are_dropped(tmp_path: Path) -> None:
    records = written(tmp_path)
    assert drop_records_after(tmp_path / METRICS, 3) == 4
    assert lines(tmp_path) == records[:4]
    assert drop_records_after(tmp_path / METRICS, 3) == 0
    assert drop_records_after(tmp_path / METRICS, 0) == 4
    assert lines(tmp_path) == []


def test_last_evaluations_are_made_again_only_when_no_step_is_left(tmp_path: Path) -> None:
    records = written(tmp_path)
    assert drop_records_after(tmp_path / METRICS, 5) == 0
    assert lines(tmp_path) == records
    assert drop_records_after(tmp_path / METRICS, 5, ("valid", "test")) == 2
    assert lines(tmp_path) == records[:6]


def test_a_plateau_at_the_last_step_is_not_made_again(tmp_path: Path) -> None:
    """It is part of what the checkpoint of that step knows."""
    records = [{"kind": kind, "step": 5} for kind in ("train", "valid", "plateau", "test")]
    for record in records:
        Metrics(tmp_path).write(record)
    drop_records_after(tmp_path / METRICS, 5, ("valid", "test"))
    assert lines(tmp_path) == [records[0], records[2]]


def test_a_run_without_records_gets_no_file(tmp_path: Path) -> None:
    assert drop_records_after(tmp_path / METRICS, 2) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ['{"a": 1}', '{"step": "x", "kind": "train"}', '{"step": 2, "kind": 5}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"kind": "train", "step": 1}}\n{line}\n')
    with pytest.raises(
        UsageError, match=f"^file {path}: line 2 has step .*; take the line out, or move the file away$"
    ):
        drop_records_after(tmp_path / METRICS, 1)


def test_a_folder_in_place_of_the_records_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UsageError, match=f"^file {path}: is not a regular file; move it away$"):
        drop_records_after(tmp_path / METRICS, 1)
