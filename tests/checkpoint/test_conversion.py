"""Run folders made of tensors from elsewhere: whole or not there."""

import json
import os
import resource
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_allattn.checkpoint.conversion import Tensors, converted_state, read_run, write_run
from megatron_allattn.checkpoint.manifest import verify
from megatron_allattn.checkpoint.progress import Progress
from megatron_allattn.checkpoint.tensors import same_bits
from megatron_allattn.config import ModelConfig, RunConfig, UsageError
from tests.support.forked import kill_before_call, run_forked

SOURCE = Path("source")
RUN = RunConfig(model=ModelConfig(num_layers=1, hidden_size=32))  # that has room in the weights below
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(1500)}
STATES = {"a/sum": torch.full((2, 3), 2.0)}


def _write(output: Path) -> None:
    run = RUN
    tokenizer = {"type": "null", "vocab_size": 7}
    state = converted_state(run, Progress.at(5, run), 7, tokenizer, "f" * 64, {"format": "other"})
    write_run(SOURCE, output, run, 5, state, Tensors.of(WEIGHTS), Tensors.of(STATES))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    _write(tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoints", "config.json", "latest"]
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == RUN.to_dict()
    saved = read_run(tmp_path / "run")
    assert (saved.step_folder.name, saved.run, saved.skipped) == ("step_00000005", RUN, [])
    assert {name: saved.weights.read(name).tolist() for name in saved.weights.names} == {
        name: tensor.tolist() for name, tensor in WEIGHTS.items()
    }
    assert saved.optimizer.read("a/sum").tolist() == STATES["a/sum"].tolist()
    training = RUN.training
    assert saved.state["tokens"] == 5 * training.global_batch_size * training.seq_length
    assert (saved.state["data"], saved.state["data_sha256"], saved.state["cached_length"]) == (None, None, 0)
    assert (saved.state["step"], saved.state["vocab_size"], saved.state["source"]) == (5, 7, {"format": "other"})
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_the_masters_of_a_run(tmp_path: Path, dtype: torch.dtype) -> None:
    given = {name: (tensor / 3).to(dtype) for name, tensor in WEIGHTS.items()}
    state = converted_state(RUN, Progress.at(5, RUN), 7, {"type": "null", "vocab_size": 7}, "f" * 64, {})
    write_run(SOURCE, tmp_path / "run", RUN, 5, state, Tensors.of(given), Tensors.of({}))
    weights = read_run(tmp_path / "run").weights
    for name, tensor in given.items():
        found = weights.read(name)
        assert weights.infos[name].dtype == "F32" and found.dtype == torch.float32
        assert torch.equal(found.to(dtype), tensor) and torch.equal(found, tensor.double().float())


@pytest.mark.parametrize("there", ["run folder", "empty folder", "file", "dangling link"])
def test_what_exists_is_kept(tmp_path: Path, there: str) -> None:
    output = tmp_path / "run"
    if there == "run folder":
        _write(output)
    elif there == "empty folder":
        output.mkdir()
    elif there == "file":
        output.write_text("mine")
    else:
        output.symlink_to(tmp_path / "nowhere")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"^--output .*run: exists already; name another one or remove it$"):
        _write(output)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write_with_little_space() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        _write(tmp_path / "run")

    code, text = run_forked(write_with_little_space)
    assert code == 1 and text.startswith("StorageError: ") and "the file size limit is reached" in text
    assert os.listdir(tmp_path) == []


def test_killed_at_any_point_there_is_no_run_or_a_whole_one(tmp_path: Path) -> None:
    outcomes = []
    for number in range(1, 200, 3):
        output = tmp_path / str(number) / "run"
        output.parent.mkdir()

        def write_and_die(output: Path = output, number: int = number) -> None:
            kill_before_call(number)
            _write(output)

        code, _ = run_forked(write_and_die)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        outcomes.append(output.exists())
        if output.exists():
            verify(read_run(output).step_folder)
        else:
            _write(output)  # and the next one clears away what is left
            assert os.listdir(output.parent) == ["run"]
    assert outcomes.count(False) > 5 and outcomes == sorted(outcomes)


def test_a_run_of_another_version_is_named(tmp_path: Path) -> None:
    run = RUN
    state = converted_state(run, Progress.at(5, run), 7, {}, "", {})
    state["config"] = {**state["config"], "engine": {}}
    write_run(SOURCE, tmp_path / "run", run, 5, state, Tensors.of(WEIGHTS), Tensors.of({}))
    with pytest.raises(
        UsageError, match=r"state.json: configuration engine: unknown key; .*; load a checkpoint of this"
    ):
        read_run(tmp_path / "run")


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"judged": 6},
        {"skipped": 6},
        {"skipped": True},
        {"recent_losses": [None]},
        {"plateau": {"dropped_at": 6}},
        {"plateau": {"colour": 1}},
        {"plateau": []},
        {"loss_scale": {"cur_scale": 1.0}},
    ],
)
def test_progress_that_no_run_has_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(
        UsageError, match=rf"state.json: {name} is .*, which no run at step 5 has; give one that was made"
    ):
        Progress.of(tmp_path / "state.json", change, 5, RUN)


def test_progress_is_what_a_state_says(tmp_path: Path) -> None:
    training = RUN.training
    early = Progress.of(tmp_path, {"config": {}}, 5, RUN)
    assert early == Progress(tokens=5 * training.global_batch_size * training.seq_length, judged=5)
    plateau = {"best": 2.5, "count": 1, "dropped_at": 4}
    full = Progress(tokens=7, judged=4, skipped=2, recent_losses=(1.5, 2), plateau=plateau)
    assert Progress.of(tmp_path, json.loads(json.dumps(full.to_dict())), 5, RUN) == full


def test_the_same_bits() -> None:
    """-0.0 is another value than 0.0, a NaN the same as itself."""
    zeros, empty = torch.zeros(2, 3), torch.zeros(2, 0)
    assert same_bits(zeros, zeros.clone()) and same_bits(zeros.T, torch.zeros(3, 2)) and same_bits(empty, empty.clone())
    assert same_bits(torch.tensor(float("nan")), torch.tensor(float("nan")))
    assert not same_bits(zeros, -zeros)
    assert not same_bits(zeros, zeros.T) and not same_bits(zeros, zeros.double()) and not same_bits(zeros, zeros.int())


def test_a_checkpoint_that_is_not_finite_is_not_converted(tmp_path: Path) -> None:
    """No run saves one; somebody has made it."""
    _write(tmp_path / "run")
    step_folder = tmp_path / "run/checkpoints/step_00000005"
    path = step_folder / "weights-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"  # the last number of b
    path.write_bytes(content)
    manifest = json.loads((step_folder / "manifest.json").read_text())
    manifest["files"][path.name]["sha256"] = sha256(content).hexdigest()
    (step_folder / "manifest.json").write_text(json.dumps(manifest))
    (step_folder / "COMPLETE").write_text(sha256((step_folder / "manifest.json").read_bytes()).hexdigest() + "\n")
    weights = read_run(tmp_path / "run").weights
    assert weights.read("a").equal(WEIGHTS["a"]) and weights.map("a").equal(WEIGHTS["a"])
    for read in (weights.read, weights.map):
        with pytest.raises(UsageError, match="tensor b has numbers that are not finite, which no run saves"):
            read("b")
