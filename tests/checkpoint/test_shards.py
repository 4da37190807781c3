"""Shards of a TP × PP grid and back: the same bits at every grid, each shard what that rank would hold."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron_allattn.checkpoint import shards
from megatron_allattn.checkpoint.conversion import read_run
from megatron_allattn.config import ParallelConfig, UsageError
from tests.support.saved_runs import MODELS, same_state, same_weights, saved_run

GRIDS = [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (4, 3)]


def grid(tensor: int, pipeline: int, **more: str) -> ParallelConfig:
    return ParallelConfig(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, **more)


@pytest.mark.parametrize("name", ["all-attn", "tied", "adaptive tied", "transformer"])
def test_there_and_back_at_every_grid(tmp_path: Path, name: str) -> None:
    """The vocabulary of 17 is padded at all but one shard."""
    saved = saved_run(tmp_path / "run", MODELS[name])
    for tensor, pipeline in GRIDS:
        out = tmp_path / f"{tensor}x{pipeline}"
        shards.write(saved, out, grid(tensor, pipeline))
        folders = [
            f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else "") for t in range(tensor) for p in range(pipeline)
        ]
        assert sorted(path.name for path in out.iterdir()) == ["layout.json", *folders]
        shards.read(out, tmp_path / "back")
        back = read_run(tmp_path / "back")
        assert same_weights(saved, back) and same_state(saved, back) and saved.progress == back.progress
        shutil.rmtree(tmp_path / "back")


def test_what_a_rank_holds(tmp_path: Path) -> None:
    saved = saved_run(tmp_path / "run", MODELS["all-attn"])
    shards.write(saved, tmp_path / "out", grid(2, 2, pipeline_layers="1,2"))
    last = safetensors.torch.load_file(tmp_path / "out/mp_rank_01_001/model.safetensors")
    assert {name.split(".")[1] for name in last if name.startswith("layers")} == {"1", "2"}
    assert "position.key" in last and "embedding.weight" not in last
    query, out = saved.weights.read("layers.1.query.weight"), saved.weights.read("layers.1.out.weight")
    assert last["layers.1.query.weight"].equal(query[16:]) and last["layers.1.out.weight"].equal(out[:, 16:])
    bias = saved.weights.read("output.bias")
    assert last["output.bias"].equal(torch.cat([bias[9:], torch.zeros(1)]))
    moment = saved.optimizer.read("layers.1.query.weight/exp_avg")
    states = safetensors.torch.load_file(tmp_path / "out/mp_rank_01_001/optimizer.safetensors")
    assert states["layers.1.query.weight/exp_avg"].equal(moment[16:])


def test_what_is_not_whole_is_named(tmp_path: Path) -> None:
    saved = saved_run(tmp_path / "run", MODELS["all-attn"])
    shards.write(saved, tmp_path / "out", grid(2, 1))
    path = tmp_path / "out/mp_rank_01/model.safetensors"
    tensors = safetensors.torch.load_file(path)

    def refused(message: str) -> None:
        with pytest.raises(UsageError, match=message):
            shards.read(tmp_path / "out", tmp_path / "back")
        assert not (tmp_path / "back").exists()

    safetensors.torch.save_file(tensors | {"position.key": tensors["position.key"] + 1}, path)
    refused(r"tensor position.key is not the same on all ranks that hold it")
    safetensors.torch.save_file(tensors | {"output.bias": tensors["output.bias"][:-1].clone()}, path)
    refused(r"mp_rank_01/model.safetensors: tensor output.bias has shape \(8,\), expected \(9,\)")
    path.unlink()
    refused(r"mp_rank_01/model.safetensors: is not there")
    layout = tmp_path / "out/layout.json"
    content = json.loads(layout.read_text())
    for change, message in (
        ({"tensor_model_parallel_size": 0}, "has no grid"),
        ({"tensors": content["tensors"] | {"../x": {}}}, "tensor ../x is in one of the list and the model alone"),
        ({"description": None}, "has no description"),
    ):
        layout.write_text(json.dumps(content | change))
        refused(message)


def test_a_grid_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    saved = saved_run(tmp_path / "run", MODELS["all-attn"])
    for parallel, message in (
        (grid(3, 1), "must divide --num-attention-heads 4"),
        (grid(1, 4), "3 layers fill at most 3"),
    ):
        with pytest.raises(UsageError, match=message):
            shards.write(saved, tmp_path / "out", parallel)
    assert not (tmp_path / "out").exists()
