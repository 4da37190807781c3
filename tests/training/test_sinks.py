"""The real TensorBoard and W&B (offline), read back: the names of metrics.jsonl, one curve through resumed runs."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.checkpoint.run_folder import METRICS
from megatron_allattn.config import CheckpointConfig, LoggingConfig, ParallelConfig, RunConfig, UsageError
from megatron_allattn.training import sinks
from megatron_allattn.training.metrics import Metrics, drop_records_after
from megatron_allattn.training.sinks import open_mirrors
from tests.support.commands import BIN, PRETRAIN, ROOT, TINY, Program, corpus, environment, records, run
from tests.support.sinks import Points, offline_folders, tensorboard_points, wandb_points, wandb_run
from tests.support.template import Template

Record = dict[str, Any]
SECONDS = 100.0


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def config(folder: Path, *, wandb: str | None = None, load: Path | None = None) -> RunConfig:
    logging = LoggingConfig(tensorboard_dir=None if wandb else folder / "events", wandb_project=wandb)
    return RunConfig(checkpoint=CheckpointConfig(save=folder, load=load), logging=logging)


def life(run: RunConfig, steps: range, step: int = 0, *, scale: float = 1.0) -> None:
    """What a run does with its metrics that goes on from `step`: a record a step, an evaluation at every fourth."""
    folder = run.checkpoint.save
    assert folder is not None
    metrics = Metrics(folder, open_mirrors(run, step))
    drop_records_after(folder / METRICS, step)
    metrics.go_on()
    for at in steps:
        metrics.write({"kind": "train", "step": at, "loss": scale / at, "grad_norm": None, "skipped": 0})
        if at % 4 == 0:
            metrics.write({"kind": "valid", "step": at, "loss": 2 * scale / at, "bpc": 1.5})
    metrics.close(SECONDS)


def expected(folder: Path) -> Points:
    """The points of the numbers in metrics.jsonl."""
    points: Points = {}
    for line in (folder / METRICS).read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name not in ("kind", "step") and value is not None:
                points.setdefault(f"{record['kind']}/{name}", []).append((record["step"], value))
    return points


def written(folder: Path) -> Points:
    """What W&B's own process has written of a run that is over, at the latest a moment after that."""
    deadline = time.monotonic() + 30
    while not (points := wandb_points(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return points


def close(found: Points) -> Any:
    """TensorBoard keeps float32."""
    return {name: [(step, pytest.approx(value, rel=1e-6)) for step, value in line] for name, line in found.items()}


def test_tensorboard_shows_one_curve_through_a_resumed_run(tmp_path: Path) -> None:
    """The evaluation at step 4, from which the run goes on, stays; what the first life did after it does not."""
    life(config(tmp_path), range(1, 8))
    life(config(tmp_path, load=tmp_path), range(5, 7), 4, scale=3.0)
    assert tensorboard_points(tmp_path / "events") == close(expected(tmp_path))
    life(config(tmp_path, load=tmp_path), range(1, 3), 0)  # before its first checkpoint
    points = tensorboard_points(tmp_path / "events")
    assert points["train/loss"] == [(1, 1.0), (2, 0.5)] and "valid/loss" not in {k for k, v in points.items() if v}


def test_tensorboard_goes_on_behind_another_runs_curve(tmp_path: Path) -> None:
    events = tmp_path / "events"
    one, two = (
        RunConfig(
            checkpoint=CheckpointConfig(save=tmp_path / name, load=tmp_path / "a" if name == "b" else None),
            logging=LoggingConfig(tensorboard_dir=events),
        )
        for name in "ab"
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    life(one, range(1, 8))
    life(two, range(5, 7), 4, scale=3.0)
    steps = [step for step, _ in tensorboard_points(events)["train/loss"]]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_wandb_offline_keeps_one_run_whose_last_folder_has_all_of_it(tmp_path: Path) -> None:
    life(config(tmp_path, wandb="all-attention"), range(1, 8))
    (first,) = offline_folders(tmp_path)
    assert written(first) == expected(tmp_path)
    life(config(tmp_path, wandb="all-attention", load=tmp_path), range(5, 7), 4, scale=3.0)
    first, second = offline_folders(tmp_path)
    assert written(second) == expected(tmp_path)
    runs = [wandb_run(folder) for folder in (first, second)]
    kept = json.loads((tmp_path / "wandb.json").read_text())
    assert {run.run_id for run in runs} == {kept["id"]} and {run.project for run in runs} == {"all-attention"}
    assert any(item.key == "model" for item in runs[0].config.update)
    assert (tmp_path / "wandb" / "latest-run").resolve() == second.resolve()
    told = subprocess.run(
        [str(BIN / "wandb"), "sync", "--dry-run", str(tmp_path / "wandb")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Would sync 1 run(s)" in told.stderr and first.name not in told.stderr, told


def test_another_project_or_another_run_is_another_run_of_wandb(tmp_path: Path) -> None:
    ids = set()
    for project, load in (("a", None), ("a", tmp_path), ("b", tmp_path), ("b", None)):
        life(config(tmp_path, wandb=project, load=load), range(0))
        ids.add(json.loads((tmp_path / "wandb.json").read_text())["id"])
    assert len(ids) == 3


def test_the_environment_decides_where_wandb_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    life(config(tmp_path, wandb="p"), range(1, 3))
    assert offline_folders(tmp_path) == []
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    life(config(tmp_path, wandb="p"), range(1, 3))
    assert offline_folders(tmp_path) == []
    assert [folder.name.split("-")[-1] for folder in offline_folders(tmp_path / "elsewhere")] == ["mine"]


def test_an_id_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "wandb.json").write_text("{")
    with pytest.raises(UsageError, match=r"^--wandb-project p: cannot be used \(file .*wandb.json: is not JSON"):
        open_mirrors(config(tmp_path, wandb="p", load=tmp_path), 0)


@pytest.mark.parametrize(
    ("logging", "flag", "package"),
    [
        (LoggingConfig(tensorboard_dir=Path("events")), "--tensorboard-dir events", "tensorboard"),
        (LoggingConfig(wandb_project="all-attention"), "--wandb-project all-attention", "wandb"),
    ],
)
def test_one_that_is_not_installed_is_refused_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, logging: LoggingConfig, flag: str, package: str
) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(UsageError) as refusal:
        open_mirrors(RunConfig(logging=logging), 0)
    fix = f"pip install {package}, or leave the flag out"
    assert str(refusal.value) == f"{flag}: the package {package} is not installed; {fix}"
    assert f'"{package}": [' in (ROOT / "setup.py").read_text()


def test_one_that_cannot_be_opened_is_the_users_to_correct(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = RunConfig(logging=LoggingConfig(tensorboard_dir=tmp_path / "file" / "events"))
    with pytest.raises(UsageError) as refusal:
        open_mirrors(wrong, 0)
    assert str(refusal.value).startswith(f"--tensorboard-dir {tmp_path / 'file' / 'events'}: cannot be used (")
    assert str(refusal.value).endswith("; correct it or leave the flag out")


@pytest.mark.parametrize("lacking", [True, False])
def test_a_run_that_goes_on_does_so_without_one_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lacking: bool
) -> None:
    """As on a node without the package: the other sink is not lost with it."""
    (tmp_path / "file").touch()
    if lacking:
        monkeypatch.setattr(sinks, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name))
    run = replace(
        config(tmp_path, wandb="p", load=tmp_path),
        logging=LoggingConfig(tensorboard_dir=tmp_path / "file" / "events", wandb_project="p"),
    )
    with pytest.raises(UsageError):  # nothing is trained yet
        open_mirrors(run, 0)
    opened = open_mirrors(run, 7)
    assert [mirror.name for mirror in opened] == ["wandb"]
    for mirror in opened:
        mirror.close(60)
    told = capsys.readouterr().err
    assert told.count("warning: ") == 1 and f"--tensorboard-dir {tmp_path}/file/events: " in told
    assert ("is not installed" if lacking else "cannot be used (") in told and "the run goes on without it" in told


def test_one_that_hangs_as_it_opens_holds_up_less_than_ranks_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go = threading.Event()
    real = sinks.TensorBoard
    monkeypatch.setattr(sinks, "TensorBoard", lambda *of: go.wait(60) and real(*of))
    slow = RunConfig(
        parallel=ParallelConfig(distributed_timeout_minutes=0.01),
        logging=LoggingConfig(tensorboard_dir=tmp_path),
    )
    (mirror,) = open_mirrors(slow, 0)
    go.set()
    mirror.close(60)
    assert "warning: tensorboard has not started within 0.3 s" in capsys.readouterr().err


def test_a_run_that_is_killed_and_resumed(tmp_path: Path, template: Template) -> None:
    """Both sinks, the real program: what they show in the end is what metrics.jsonl has, each step once."""
    flags = [*TINY, "--data-path", str(corpus(tmp_path)), "--save", "run", "--tensorboard-dir", "run/events"]
    flags += ["--wandb-project", "p", "--eval-interval", "2", "--eval-iters", "1", "--save-interval", "3"]
    folder, command = tmp_path / "run", [sys.executable, PRETRAIN, *flags]
    with Program([*command, "--train-iters", "100000"], tmp_path, environment(), template) as first:
        while not (folder / "latest").exists() or len((folder / METRICS).read_bytes().splitlines()) < 20:
            assert first.process.poll() is None, first.stderr
            time.sleep(0.01)
        first.process.kill()
        first.process.wait()
        assert "warning" not in first.stderr
    last = int((folder / "latest").read_text().removeprefix("step_")) + 3
    second = run(*command, "--load", "run", "--train-iters", str(last), folder=tmp_path, template=template)
    assert (second.returncode, second.left) == (0, []), second.output
    assert "warning" not in second.stderr
    name = json.loads((folder / "wandb.json").read_text())["id"]
    assert f"note        wandb: run {name}, offline; upload it with: wandb sync run/wandb/latest-run" in second.stdout
    assert [r["step"] for r in records(folder) if r["kind"] == "train"] == list(range(1, last + 1))
    assert tensorboard_points(folder / "events") == close(expected(folder))
    assert wandb_points(offline_folders(folder)[-1]) == expected(folder)
