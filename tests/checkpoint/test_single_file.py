"""One safetensors file and back: the same bits, read by the library too, and nothing taken on trust."""

import json
from pathlib import Path

import pytest
import safetensors
import safetensors.torch

from megatron_allattn.checkpoint import single_file
from megatron_allattn.checkpoint.conversion import read_run
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
