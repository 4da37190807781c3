"""metrics.jsonl and its mirrors: every bit of every float, mirrors that are absent, refuse or fail."""

import json
import math
import random
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_allattn.config import LoggingConfig, UsageError
from megatron_allattn.training import metrics
from megatron_allattn.training.metrics import METRICS, Metrics, check_sinks, drop_records_after, per_unit
from tests.support.commands import ROOT


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_floats_read_back_to_the_same_bits(tmp_path: Path) -> None:
    generator = random.Random(3)
    every = [struct.unpack("<d", generator.randbytes(8))[0] for _ in range(2000)]
    floats = [value for value in every if math.isfinite(value)] + [5e-324, -0.0, 0.1, 1 / 3, 2.0**53 + 2]
    sink = Metrics(tmp_path, None, {})
    for step, value in enumerate(floats):
        sink.write({"kind": "train", "step": step, "loss": value})
    found = [record["loss"] for record in lines(tmp_path)]
    assert struct.pack(f"<{len(floats)}d", *found) == struct.pack(f"<{len(floats)}d", *floats)


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Metrics(None, None, {}).write({"kind": "train", "step": 1, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_what_the_loss_is_compared_in() -> None:
    assert per_unit(math.log(2), "byte") == {"bpc": 1.0}
    assert per_unit(3 * math.log(2), "char") == {"bpc": pytest.approx(3.0, rel=1e-15)}
    assert per_unit(math.log(20.5), "token") == {"ppl": pytest.approx(20.5, rel=1e-14)}
    assert math.isfinite(per_unit(1e4, "token")["ppl"])


@pytest.mark.parametrize(
    ("logging", "flag", "package"),
    [
        (LoggingConfig(tensorboard_dir=Path("events")), "--tensorboard-dir events", "tensorboard"),
        (LoggingConfig(wandb_project="all-attention"), "--wandb-project all-attention", "wandb"),
    ],
)
def test_a_mirror_that_is_not_installed_is_refused_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, logging: LoggingConfig, flag: str, package: str
) -> None:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(UsageError) as refusal:
        check_sinks(logging)
    fix = f"pip install {package}, or leave the flag out"
    assert str(refusal.value) == f"{flag}: the package {package} is not installed; {fix}"
    assert f'"{package}": [' in (ROOT / "setup.py").read_text()
    check_sinks(LoggingConfig())


class FakeRun:
    """A wandb run that takes two records and then loses its network."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.calls = 0

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls += 1
        if self.calls > 2:
            raise ConnectionError("network is unreachable")
        self.logged.append((values, step))


def test_a_mirror_that_fails_is_reported_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun()
    begun: list[dict[str, Any]] = []

    def init(**settings: Any) -> FakeRun:
        begun.append(settings)
        return run

    wandb = ModuleType("wandb")
    wandb.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = Metrics(tmp_path, LoggingConfig(wandb_project="p"), {"seed": 7})
    for step in range(1, 6):
        sink.write({"kind": "train", "step": step, "loss": 1.0 / step})
    assert begun == [{"project": "p", "config": {"seed": 7}}]
    assert run.logged == [({"train/loss": 1.0}, 1), ({"train/loss": 0.5}, 2)]
    assert run.calls == 3
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3, 4, 5]
    said = capsys.readouterr()
    assert said.err == "warning: wandb failed and gets no more records (network is unreachable)\n"
    assert said.out == ""


class FakeWriter:
    """TensorBoard's writer: what was written, of all that were opened."""

    scalars: list[tuple[str, float, int]]

    def __init__(self, folder: str) -> None:
        if folder == "/proc/none":
            raise FileNotFoundError(f"no such folder:\n{folder}")
        FakeWriter.scalars = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        FakeWriter.scalars.append((tag, value, step))

    def flush(self) -> None:
        pass


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_gets_the_numbers_by_kind(tmp_path: Path) -> None:
    sink = Metrics(tmp_path, LoggingConfig(tensorboard_dir=tmp_path / "events"), {})
    sink.write({"kind": "train", "step": 3, "loss": 1.5, "tokens": 12})
    sink.write({"kind": "valid", "step": 3, "loss": 2.5})
    assert FakeWriter.scalars == [("train/loss", 1.5, 3), ("train/tokens", 12, 3), ("valid/loss", 2.5, 3)]


@pytest.mark.usefixtures("tensorboard")
def test_a_mirror_that_cannot_be_opened_is_the_users_to_correct(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        Metrics(tmp_path, LoggingConfig(tensorboard_dir=Path("/proc/none")), {})
    rule = "cannot be used (no such folder: /proc/none); correct it or leave the flag out"
    assert str(refusal.value) == f"--tensorboard-dir /proc/none: {rule}"


def written(folder: Path) -> list[dict[str, Any]]:
    records = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 6)]
    records.insert(3, {"kind": "valid", "step": 3, "loss": 0.7})
    records += [{"kind": "valid", "step": 5, "loss": 0.6}, {"kind": "test", "step": 5, "loss": 0.5}]
    for record in records:
        Metrics(folder, None, {}).write(record)
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
        Metrics(tmp_path, None, {}).write(record)
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
