"""Whole runs with balanced heads, or with layers cut by the spans of a checkpoint: the losses of runs without."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_allattn.checkpoint import folder
from megatron_allattn.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_allattn.config.run import CheckpointConfig
from megatron_allattn.parallel.failures import Watch
from megatron_allattn.parallel.logical import in_order
from megatron_allattn.training.loop import train
from megatron_allattn.training.session import Session, _reach, open_session
from tests.support.commands import corpus, records
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=8,
    persistent_memory_size=16,
    max_attention_span=512,
    attention_dropout=0.2,
)
# One long head and a longer one beside it, in the last layers alone.
SPANS = [[0.0] * 8] * 2 + [[0.8, 0.9, 0.0, 0.01, 0.3, 0.02, 0.2, 0.1], [0.0, 0.1, 0.2, 0.0, 0.05, 0.0, 0.7, 0.95]]
BEGUN, SAVED, LAST = 1, 4, 7


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("data"), num_words=1600, split="6,2,2")


def run_of(data: Path, load: Path | None, save: Path, last: int = LAST, **parallel: Any) -> RunConfig:
    return RunConfig(
        model=MODEL,
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(optimizer="adagrad", lr=0.02, clip_grad=0.03),
        data=DataConfig(data_path=str(data)),
        training=TrainingConfig(seq_length=32, global_batch_size=4, micro_batch_size=1, train_iters=last, eval_iters=2),
        checkpoint=CheckpointConfig(save=save, load=load, save_interval=SAVED),
    )


def opened(run: RunConfig, world_size: int) -> Session:
    """With the processes that tensor and pipeline parallelism leave over for replicas."""
    tensor, pipeline = run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size
    groups = groups_of(tensor, world_size // tensor // pipeline, pipeline)
    return open_session(run, frozenset(), groups, torch.device("cpu"), Watch(groups, 60.0))


def _begin(rank: int, world_size: int, run: RunConfig) -> None:
    """A run whose heads have learned SPANS."""
    session = opened(run, world_size)
    weights = {logical.name: tensor for logical, tensor in session.engine.weights()}
    weights |= {f"layers.{layer}.span": torch.tensor(spans).view(-1, 1, 1) for layer, spans in enumerate(SPANS)}
    session.engine.load(weights.__getitem__)
    session.step = BEGUN
    session.save()


def _go_on(rank: int, world_size: int, run: RunConfig) -> dict[str, Any]:
    session = opened(run, world_size)
    loaded = session.engine.network.placements
    train(session)
    network = session.engine.network
    return {"notes": session.notes, "loaded": loaded, "ended": network.placements, "layers": len(network.part.layers)}


@pytest.fixture(scope="module")
def begun(data: Path, pools: WorkerPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("begun") / "run"
    pools(4).run(_begin, run_of(data, None, path))
    return path


def go_on(pools: WorkerPools, run: RunConfig) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses of a run's steps, and what its four ranks say."""
    said = pools(4).run(_go_on, run)
    assert run.checkpoint.save is not None
    return [float(one["loss"]) for one in records(run.checkpoint.save) if one["kind"] == "train"], said


def tensors(run_folder: Path, step: int) -> dict[str, str]:
    path = run_folder / "checkpoints" / folder.step_name(step) / "manifest.json"
    files = json.loads(path.read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def in_their_order(
    data: Path, begun: Path, pools: WorkerPools, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    run = run_of(data, begun, tmp_path_factory.mktemp("in_order") / "run", tensor_model_parallel_size=4)
    losses, said = go_on(pools, run)
    assert said[0]["loaded"] == said[0]["ended"] == (in_order(8, 4),) * 4
    return losses


@pytest.fixture(scope="module")
def balanced(
    data: Path, begun: Path, pools: WorkerPools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunConfig, list[float], list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("balanced") / "run"
    run = run_of(data, begun, path, tensor_model_parallel_size=4, balance_heads=True)
    return (run, *go_on(pools, run))


def test_a_balanced_run_has_the_losses_of_one_that_is_not(balanced: Any, in_their_order: list[float]) -> None:
    _, losses, said = balanced
    assert len(losses) == LAST - BEGUN
    assert losses == pytest.approx(in_their_order, rel=1e-6)
    assert len(set(losses)) == len(losses)
    for rank in said:
        assert rank["loaded"] == said[0]["loaded"] and rank["ended"] == said[0]["ended"]
        assert rank["loaded"][:2] == (in_order(8, 4),) * 2
        assert (0, 1) not in rank["loaded"][2] and (6, 7) not in rank["loaded"][3]
        (note,) = [note for note in rank["notes"] if note.startswith("heads")]
        assert note.startswith("heads are balanced: 2 layers moved, the slowest rank's share of attention ")
        assert note.endswith("% (even: 25.0 %)")


def test_a_resumed_balanced_run_goes_on_bit_for_bit(
    balanced: Any, data: Path, pools: WorkerPools, tmp_path: Path
) -> None:
    """Heads lie where the run that wrote the checkpoint put them after it."""
    run, losses, said = balanced
    _copy(run.checkpoint.save / "checkpoints" / folder.step_name(SAVED), tmp_path / "from")
    again = run_of(data, tmp_path / "from", tmp_path / "to", tensor_model_parallel_size=4, balance_heads=True)
    found, after = go_on(pools, again)
    assert found == losses[SAVED - BEGUN :]
    assert tensors(tmp_path / "to", LAST) == tensors(run.checkpoint.save, LAST)
    assert after[0]["ended"] == said[0]["ended"]


def _copy(step_folder: Path, run_folder: Path) -> None:
    target = run_folder / "checkpoints" / step_folder.name
    target.mkdir(parents=True, exist_ok=True)
    for path in step_folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    "parallel", [*rest({}), {"tensor_model_parallel_size": 2, "balance_heads": True}], ids=["dp4", "tp2-dp2, balanced"]
)
def test_it_resumes_at_another_layout(
    balanced: Any, data: Path, pools: WorkerPools, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    run, losses, _ = balanced
    _copy(run.checkpoint.save / "checkpoints" / folder.step_name(SAVED), tmp_path / "from")
    found, _ = go_on(pools, run_of(data, tmp_path / "from", tmp_path / "to", **parallel))
    assert found == pytest.approx(losses[SAVED - BEGUN :], rel=1e-6)


@pytest.mark.layouts
def test_the_first_checkpoint_is_the_same_to_the_byte(data: Path, pools: WorkerPools, tmp_path: Path) -> None:
    """Heads that have learned nothing stay in their order, so that nothing differs yet."""
    for name, wanted in (("off", False), ("on", True)):
        run = run_of(data, None, tmp_path / name, 1, tensor_model_parallel_size=4, balance_heads=wanted)
        go_on(pools, run)
    assert tensors(tmp_path / "on", 1) == tensors(tmp_path / "off", 1)


@pytest.mark.layouts
def test_layers_are_cut_by_the_spans_of_the_checkpoint(
    data: Path, begun: Path, pools: WorkerPools, tmp_path: Path
) -> None:
    """The last layers look far: the first stage gets more layers than at the spans that training starts from."""
    found = {}
    for partition in ("cost", "current-cost"):
        run = run_of(data, begun, tmp_path / partition, pipeline_model_parallel_size=2, pipeline_partition=partition)
        losses, said = go_on(pools, run)
        found[partition] = losses, [rank["layers"] for rank in said]
    assert found["cost"][1] == [2, 2, 2, 2] and found["current-cost"][1] == [3, 3, 1, 1]
    assert found["cost"][0][0] == found["current-cost"][0][0]
    assert found["cost"][0] == pytest.approx(found["current-cost"][0], rel=1e-6)


def test_a_run_that_begins_is_cut_by_the_spans_of_its_start(data: Path, tmp_path: Path) -> None:
    run = run_of(data, None, tmp_path, pipeline_model_parallel_size=2, pipeline_partition="current-cost")
    assert _reach(run, None) == [[33] * 8] * 4
    assert _reach(replace(run, model=replace(MODEL, adaptive_span=False)), None) == [[512] * 8] * 4
