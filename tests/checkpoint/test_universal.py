"""DeepSpeed's universal checkpoints: its own engines load them, at several layouts, and they come back the same."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_allattn.checkpoint import universal
from megatron_allattn.checkpoint.conversion import read_run
from megatron_allattn.config import UsageError
from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.network import Network
from tests.support.pool import WorkerPools
from tests.support.saved_runs import MODELS, same_state, same_weights, saved_run
from tests.support.trajectories import groups_of


@pytest.mark.parametrize("name", ["all-attn", "tied", "transformer"])
def test_there_and_back(tmp_path: Path, name: str) -> None:
    saved = saved_run(tmp_path / "run", MODELS[name])
    assert universal.write(saved, tmp_path / "out") == "global_step2_universal"
    universal.read(tmp_path / "out", tmp_path / "back")
    back = read_run(tmp_path / "back")
    assert same_weights(saved, back) and same_state(saved, back) and saved.progress == back.progress


def test_another_number_of_updates_is_refused(tmp_path: Path) -> None:
    saved = saved_run(tmp_path / "run", MODELS["all-attn"])
    universal.write(saved, tmp_path / "out")
    zero = tmp_path / "out/global_step2_universal/zero"
    assert torch.load(zero / "embedding.weight/step.pt") == 1  # of two steps one was left out
    for path in zero.glob("*/step.pt"):
        path.unlink()
        torch.save(2, path)
    with pytest.raises(UsageError, match=r"step.pt: has 2 updates, its description 1 at step 2; give a folder"):
        universal.read(tmp_path / "out", tmp_path / "back")


@pytest.mark.parametrize("name", ["", ".", "..", "../out", "/etc", "global_step2_universal/..", "x" * 2000])
def test_latest_names_a_folder_of_a_step(tmp_path: Path, name: str) -> None:
    (tmp_path / "latest_universal").write_text(name)
    with pytest.raises(
        UsageError, match=r"latest_universal: (names .*, not a folder beside it|has more than 1,000 by)"
    ):
        universal.read(tmp_path, tmp_path / "back")


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    saved = saved_run(tmp_path / "run", MODELS["all-attn"], "adagrad")
    with pytest.raises(UsageError, match=r"^--optimizer adagrad: DeepSpeed's universal checkpoints hold Adam's state"):
        universal.write(saved, tmp_path / "out")


def _loaded(rank: int, world_size: int, folder: str, run: str, tensor: int, zero: int) -> dict[str, np.ndarray]:
    """Weights and optimizer state of one of DeepSpeed's engines that has loaded such a folder itself."""
    from dataclasses import replace

    saved = read_run(Path(run))
    groups = groups_of(tensor, world_size // tensor, 1)
    parallel = replace(saved.run.parallel, tensor_model_parallel_size=tensor, zero_stage=zero)
    training = replace(saved.run.training, global_batch_size=4)
    network = Network(saved.run.model, saved.state["vocab_size"], groups.tensor, FusedOps("torch"))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    config = replace(saved.run, parallel=parallel, training=training)
    engine = DeepSpeedEngine(network, config, groups, torch.device("cpu"), torch.float32, FusedOps("torch"))
    engine.engine._config.load_universal_checkpoint = True
    engine.engine.load_checkpoint(folder)
    found = {logical.name: tensor.numpy() for logical, tensor in engine.weights()}
    return found | {name: tensor.numpy() for name, tensor in engine.optimizer_state()}


@pytest.mark.parametrize(("tensor", "zero"), [(1, 1), (1, 3), (2, 1)])
def test_deepspeeds_engine_loads_it(tmp_path: Path, pools: WorkerPools, tensor: int, zero: int) -> None:
    saved = saved_run(tmp_path / "run", MODELS["fixed"], vocab_size=18)  # DeepSpeed does not pad a bias
    universal.write(saved, tmp_path / "out")
    found = pools(2).run(_loaded, str(tmp_path / "out"), str(tmp_path / "run"), tensor, zero)[0]
    for name, tensor_found in found.items():
        reader = saved.optimizer if "/" in name else saved.weights
        np.testing.assert_array_equal(tensor_found, reader.read(name).numpy(), err_msg=name)
