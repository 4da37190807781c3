"""One safetensors file and back: the same bits, read by the library too, and nothing taken on trust."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from megatron_allattn.checkpoint import single_file
from megatron_allattn.checkpoint.conversion import read_run
from megatron_allattn.checkpoint.header import values_start
from megatron_allattn.config import UsageError
from tests.support.saved_runs import MODELS, same_weights, saved_run


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    saved = saved_run(tmp_path / "run", MODELS[name])
    single_file.write(saved, tmp_path / "a.safetensors")
    by_library = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert by_library.keys() == set(saved.weights.names)
    assert all(by_library[one].equal(saved.weights.read(one)) for one in by_library)
    single_file.read(tmp_path / "a.safetensors", tmp_path / "back")
    back = read_run(tmp_path / "back")
    assert same_weights(saved, back)
    assert (back.state["step"], back.state["tokenizer"]) == (0, saved.state["tokenizer"])
    single_file.write(back, tmp_path / "b.safetensors")
    assert safetensors.torch.load_file(tmp_path / "b.safetensors").keys() == by_library.keys()


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    saved = saved_run(tmp_path / "run", MODELS["all-attn"])
    single_file.write(saved, path := tmp_path / "a.safetensors")
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as handle:
        metadata = handle.metadata()
    told = json.loads(metadata["megatron_allattn"])
    for change, message in (
        (None, "has no description of format"),
        ("nonsense", "its description is not JSON"),
        (json.dumps(told | {"vocab_size": 18}), r"tensor embedding.weight has shape \(17, 32\), the model wants \(18"),
        (json.dumps(told | {"config": {"engine": {}}}), "unknown key"),
        (json.dumps(told | {"step": -1}), "has -1 for step, expected int from 0 on"),
        (json.dumps(told | {"vocab_size": 0}), "has 0 for vocab_size, expected int from 1 on"),
        (json.dumps(told | {"progress": None}), "its description has no object for progress"),
        (json.dumps(told | {"progress": {"skipped": 3}}), "skipped is 3, which no run at step 2 has"),
        (json.dumps(told | {"step": "5"}), "has '5' for step, expected int"),
    ):
        texts = {} if change is None else {"megatron_allattn": change}
        safetensors.torch.save_file(tensors, tmp_path / "b.safetensors", metadata=texts)
        with pytest.raises(UsageError, match=message):
            single_file.read(tmp_path / "b.safetensors", tmp_path / "back")
        assert not (tmp_path / "back").exists()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    single_file.write(saved_run(tmp_path / "run", MODELS["all-attn"]), path := tmp_path / "a.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"a.safetensors: damaged: expected SHA-256 \w{64} .*, found \w{64}$"):
        single_file.read(path, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_no_run_saves_is_refused(tmp_path: Path) -> None:
    """Whole numbers, NaN, no hash, and a pipe, which would be waited for without end."""
    single_file.write(saved_run(tmp_path / "run", MODELS["all-attn"]), tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as handle:
        text = handle.metadata()["megatron_allattn"]
    weights = safetensors.torch.load_file(tmp_path / "a.safetensors")
    name, path = "embedding.weight", tmp_path / "b.safetensors"
    broken = weights[name].clone()
    broken[1, 2] = torch.nan
    for changed, hashed, message in (
        (weights[name].long(), True, f"{path}: tensor {name} is of type torch.int64, which no run has"),
        (broken, True, f"{path}: tensor {name}: 1 numbers are not finite"),
        (weights[name], False, f"file {path}: has no hash of its values: an earlier version made it"),
    ):
        safetensors.torch.save_file(weights | {name: changed}, path, metadata={"megatron_allattn": text})
        digest = hashlib.sha256(text.encode() + path.read_bytes()[values_start(path) :]).hexdigest()
        metadata = {"megatron_allattn": text} | ({"megatron_allattn_sha256": digest} if hashed else {})
        safetensors.torch.save_file(weights | {name: changed}, path, metadata=metadata)
        with pytest.raises(UsageError, match=message):
            single_file.read(path, tmp_path / "back")
        assert not (tmp_path / "back").exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: is not a regular file"):
        single_file.read(tmp_path / "pipe", tmp_path / "back")
