"""Shards of a TP × PP grid and back: the same bits at every grid, each shard what that rank would hold."""

import hashlib
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

    layout = tmp_path / "out/layout.json"

    def refused(message: str) -> None:
        with pytest.raises(UsageError, match=message):
            shards.read(tmp_path / "out", tmp_path / "back")
        assert not (tmp_path / "back").exists()

    def changed(**other: torch.Tensor) -> None:
        """As if it had been written so."""
        safetensors.torch.save_file(tensors | {name.replace("_", "."): one for name, one in other.items()}, path)
        content = json.loads(layout.read_text())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        content["files"]["mp_rank_01/model.safetensors"] = {"bytes": path.stat().st_size, "sha256": digest}
        layout.write_text(json.dumps(content))

    changed(position_key=tensors["position.key"] + 1)
    refused(r"tensor position.key is not the same on all ranks that hold it")
    changed(output_bias=tensors["output.bias"][:-1].clone())
    refused(r"mp_rank_01/model.safetensors: tensor output.bias has shape \(8,\), expected \(9,\)")
    path.unlink()
    refused(r"mp_rank_01/model.safetensors: expected a file of [\d,]+ bytes, found none")
    content = json.loads(layout.read_text())
    for change, message in (
        ({"tensor_model_parallel_size": 0}, "has no grid"),
        ({"tensors": content["tensors"] | {"../x": {}}}, "tensor ../x is in one of the list and the model alone"),
        ({"description": None}, "has no description"),
        ({"files": None}, "has no hashes of its files: an earlier version made it; convert the run once more"),
        ({"files": {}}, "lists no mp_rank_00/model.safetensors"),
        ({"files": {"../x": {}}}, "lists '../x', which is no file of a rank"),
        ({"files": {"mp_rank_00/model.safetensors": {"bytes": "5"}}}, "expected bytes and sha256"),
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


@pytest.mark.parametrize("file", ["model", "optimizer"])
def test_swapped_shards_and_a_flipped_bit_are_refused(tmp_path: Path, file: str) -> None:
    """Both shards have the same names, shapes and size: their hashes alone tell them apart."""
    shards.write(saved_run(tmp_path / "run", MODELS["all-attn"]), tmp_path / "out", grid(2, 2))
    one, other = (tmp_path / f"out/mp_rank_{rank}_000/{file}.safetensors" for rank in ("00", "01"))
    contents = one.read_bytes(), other.read_bytes()
    flipped = bytearray(contents[0])
    flipped[-1] ^= 1
    for now in (contents[::-1], (bytes(flipped), contents[1])):
        one.write_bytes(now[0])
        other.write_bytes(now[1])
        expected, found = (hashlib.sha256(content).hexdigest() for content in (contents[0], now[0]))
        with pytest.raises(UsageError, match=f"{one}: damaged: expected SHA-256 {expected}, found {found}$"):
            shards.read(tmp_path / "out", tmp_path / "back")
        assert not (tmp_path / "back").exists()
