"""A run that goes on with other flags: what differs is listed with both values, and --override applies wholly."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_allattn.checkpoint.tensors import TensorReader
from tests.faults.conftest import Runs
from tests.support.commands import corpus, records

ADAM = ("--optimizer", "adam", "--attention-dropout", "0.1")
STEP = "run/checkpoints/step_00000004"


@pytest.fixture(scope="module")
def saved(data: Path, tmp_path_factory: pytest.TempPathFactory, template) -> Path:
    runs = Runs(tmp_path_factory.mktemp("saved"), data, template)
    runs.succeeds(1, *ADAM, "--train-iters", "4")
    return runs.folder / "run"


def refused(runs: Runs, saved: Path, *flags: str) -> str:
    shutil.copytree(saved, runs.folder / "run", dirs_exist_ok=True)
    ended = runs.plain(1, 0, "pause@0", *ADAM, "--load", "run", *flags)
    assert ended.codes == [2]
    (line,) = ended.errors
    return line


@pytest.mark.parametrize("more", [(), ("--override",)], ids=["", "override"])
def test_all_that_differs_is_listed_with_both_values(runs: Runs, saved: Path, more: tuple[str, ...]) -> None:
    """What belongs to the model cannot be overridden, and then nothing else is."""
    model = ("--hidden-size", "64", "--persistent-memory-size", "8", "--adaptive-cutoffs", "20,100")
    line = refused(runs, saved, *model, "--lr", "0.5", "--adam-beta2", "0.9", *more)
    listed = [
        "--hidden-size 32 (now 64)",
        "--persistent-memory-size 16 (now 8)",
        "--adaptive-cutoffs None (now 20,100)",
    ]
    listed += [] if more else ["--lr 0.001 (now 0.5)", "--adam-beta2 0.999 (now 0.9)"]
    assert line.startswith(f"error: --load {STEP}: was trained with ")
    assert line.endswith("; resume with the same values or start a new run")
    assert all(one in line for one in listed), line
    assert line.count("(now ") == len(listed)


def test_settings_that_may_be_overridden_say_so(runs: Runs, saved: Path) -> None:
    line = refused(runs, saved, "--lr", "0.5", "--clip-grad", "2")
    assert line == (
        f"error: --load {STEP}: was trained with --lr 0.001 (now 0.5), --clip-grad 1.0 (now 2.0); resume with the same "
        "values or give --override"
    )


def test_another_vocabulary_is_refused(runs: Runs, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = corpus(tmp_path / "other", tokenizer="char")
    line = refused(runs, saved, "--data-path", str(other))
    assert ": its vocabulary size is " in line and f"{STEP} was trained with 256" in line


def gone_on(runs: Runs, saved: Path, folder: str, *flags: str, config: dict[str, Any] | None = None) -> Path:
    """The run after two more steps; config: of the optimizer, put into its checkpoint, as if it had been trained so."""
    shutil.copytree(saved, runs.folder / folder)
    if config is not None:
        step = runs.folder / folder / "checkpoints/step_00000004"
        state = json.loads((step / "state.json").read_text())
        assert state["config"]["optimizer"].keys() >= config.keys()
        state["config"]["optimizer"] |= config
        (step / "state.json").write_text(json.dumps(state))
        manifest = json.loads((step / "manifest.json").read_text())
        content = (step / "state.json").read_bytes()
        manifest["files"]["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        text = json.dumps(manifest)
        (step / "manifest.json").write_text(text)
        (step / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    more = ("--train-iters", "6", "--load", folder, "--save", folder, *flags)
    ended = runs.plain(1, 0, "pause@0", *ADAM, *more)
    assert ended.codes == [0], ended.said
    return runs.folder / folder


def tensors(run: Path, step: int = 6) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in run.glob(f"checkpoints/step_{step:08d}/*.safetensors")}


def test_what_is_overridden_is_as_if_it_had_always_been_so(runs: Runs, saved: Path) -> None:
    flags = ("--lr", "0.003", "--adam-beta1", "0.7", "--adam-beta2", "0.95", "--clip-grad", "0.01")
    config = {"lr": 0.003, "adam_beta1": 0.7, "adam_beta2": 0.95, "clip_grad": 0.01}
    run = gone_on(runs, saved, "overridden", *flags, "--override")
    assert tensors(run) == tensors(gone_on(runs, saved, "always", *flags, config=config)) != {}
    assert tensors(run) != tensors(gone_on(runs, saved, "unchanged"))
    (told,) = [record for record in records(run) if record["kind"] == "override"]
    assert told["step"] == 4 and {name: float(values[1]) for name, values in told["changes"].items()} == config
    assert [float(record["lr"]) for record in records(run) if record["kind"] == "train"] == [0.001] * 4 + [0.003] * 2


def test_a_rate_of_almost_nothing_leaves_weights_as_they_are(runs: Runs, saved: Path) -> None:
    run = gone_on(runs, saved, "run", "--lr", "1e-15", "--override")
    before, after = (TensorReader(run / f"checkpoints/step_{step:08d}", "weights") for step in (4, 6))
    assert torch.equal(before.read("layers.0.query.weight"), after.read("layers.0.query.weight"))
    assert tensors(run) != tensors(run, 4)
