"""A checkpoint's weights in a network: which step, which shards, which precision, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from megatron_allattn.config import UsageError
from megatron_allattn.inference.model import LoadedModel, load_model
from megatron_allattn.parallel.collectives import PeerFailed, all_gather
from megatron_allattn.parallel.groups import single_process_groups
from tests.support.commands import corpus
from tests.support.pool import WorkerPools
from tests.support.runs import untrained_run
from tests.support.trajectories import groups_of

CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    folder = tmp_path_factory.mktemp("run")
    return folder, untrained_run(folder, corpus(folder), steps=(3, 7))


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(path, single_process_groups(), CPU, dtype)


def loaded_weights(rank: int, world_size: int, path: Path, tensor: int, dtype: torch.dtype) -> Weights:
    groups = groups_of(tensor, world_size // tensor)
    model = load_model(path, groups, CPU, dtype)
    found = {}
    for logical, parameter in model.network.logical_parameters():
        shards = (
            all_gather(parameter.detach(), groups.tensor) if logical.shard_dim is not None else [parameter.detach()]
        )
        found[logical.name] = logical.join(shards)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_newest_step_in_any_precision(saved: tuple[Path, Weights], dtype: torch.dtype) -> None:
    folder, weights = saved
    model = load(folder, dtype)
    assert (model.step_folder.name, model.state["step"], model.notes) == ("step_00000007", 7, [])
    assert model.run.model.num_layers == 2
    for logical, parameter in model.network.logical_parameters():
        assert parameter.dtype == dtype and not parameter.requires_grad
        assert torch.equal(parameter, weights[logical.name].to(dtype)), logical.name


@pytest.mark.parametrize(("tensor", "size"), [(2, 2), (1, 2), (2, 4)])
def test_any_layout(pools: WorkerPools, saved: tuple[Path, Weights], tensor: int, size: int) -> None:
    folder, weights = saved
    for found in pools(size).run(loaded_weights, folder, tensor, torch.float64):
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_a_named_step(saved: tuple[Path, Weights]) -> None:
    folder, _ = saved
    assert load(folder / "checkpoints/step_00000003").state["step"] == 3


def test_a_damaged_step_is_refused_and_an_older_one_taken_when_named(tmp_path: Path) -> None:
    untrained_run(tmp_path, corpus(tmp_path), steps=(3, 7))
    newest = tmp_path / "checkpoints/step_00000007"
    file = newest / "weights-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    for named in (tmp_path, newest):
        with pytest.raises(UsageError, match=r"weights-00001\.safetensors: damaged: expected SHA-256"):
            load(named)
    assert load(tmp_path / "checkpoints/step_00000003").state["step"] == 3


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path}: no checkpoint to load: there is no folder"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match=f"{tmp_path}: expected a file COMPLETE, found none"):
        load(tmp_path)


def refusal(rank: int, world_size: int, path: Path) -> str:
    try:
        load_model(path, groups_of(world_size, 1), CPU, torch.float32)
    except (UsageError, PeerFailed) as error:
        return f"{type(error).__name__} {error}"
    return "loaded"


def test_a_tensor_parallel_size_that_does_not_divide(pools: WorkerPools, saved: tuple[Path, Weights]) -> None:
    """One rank reports it, the others only hear of it."""
    rule = "--tensor-model-parallel-size 4: must divide --num-attention-heads 2; possible are 1, 2"
    assert pools(4).run(refusal, saved[0]) == [f"UsageError {rule}"] + ["PeerFailed rank 0 failed"] * 3


def test_weights_that_are_not_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untrained_run(tmp_path, corpus(tmp_path))
    step = tmp_path / "checkpoints/step_00000007"
    state = json.loads((step / "state.json").read_text())
    state["config"]["model"]["num_layers"] = 3
    monkeypatch.setattr("megatron_allattn.checkpoint.save.read_state", lambda *_: state)
    with pytest.raises(UsageError, match=r"tensor layers.2.\S+ has shape none, the model wants"):
        load(step)
    state["config"] = {"colour": "red"}
    with pytest.raises(UsageError, match=r"state.json: configuration colour: unknown key.*this version"):
        load(step)
