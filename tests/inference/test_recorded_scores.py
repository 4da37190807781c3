"""Scores of the paper's own checkpoints: what its code computed for the same tokens, exactly and by its protocol."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_allattn.checkpoint.adaptive_span import read_model
from megatron_allattn.config import ModelConfig
from megatron_allattn.inference.scoring import code_protocol, score
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.initialization import load_logical
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import Groups, single_process_groups
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of

CPU = torch.device("cpu")
# relative, of means; that code ran in float32
LIMITS = {"char": 1e-7, "word": 1e-7}


def load(folder: Path, name: str, groups: Groups) -> tuple[Network, dict]:
    path = folder / f"adaptive_span_{name}.pt"
    case = json.loads(path.with_suffix(".json").read_text())
    state = read_model(torch.load(path, weights_only=True)["model"], path)
    config = ModelConfig(**state.shape, span_ramp=case["config"]["span_ramp"], span_normalization="window")
    network = Network(config, state.vocab_size, groups.tensor, FusedOps("torch")).double()
    load_logical(network, state.weights)
    return network, case


def differences(rank: int, world_size: int, folder: Path, name: str, tensor: int) -> dict[str, float]:
    """Of every recorded score, relative; of single tokens absolute."""
    groups = groups_of(tensor, world_size // tensor) if world_size > 1 else single_process_groups()
    network, case = load(folder, name, groups)
    tokens, block = np.array(case["tokens"]), case["block"]
    whole = score(network, groups, tokens, num_streams=1, block_length=block, device=CPU, keep_nats=True)
    parts = score(network, groups, tokens, num_streams=5, block_length=50, device=CPU)
    assert whole.nats is not None
    found = {
        "mean_nll": abs(whole.mean_nats / case["mean_nll"] - 1),
        "mean_nll in streams": abs(parts.mean_nats / case["mean_nll"] - 1),
        "first ten": float(np.abs(whole.nats[:10] - case["first_ten_nll"]).max()),
        "last ten": float(np.abs(whole.nats[-10:] - case["last_ten_nll"]).max()),
    }
    for batch in (1, 8):
        code = code_protocol(network, groups, tokens, num_streams=batch, block_length=block, device=CPU)
        found[f"code protocol {batch}"] = abs(code.mean_nats / case["code_protocol"][f"batch_{batch}"] - 1)
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_scores_are_those_of_the_papers_code(shared: Path, name: str) -> None:
    found = differences(0, 1, shared / "reference_cases", name, 1)
    limit = LIMITS[name]
    assert {what for what, value in found.items() if value > limit * (300 if "ten" in what else 1)} == set()


@pytest.mark.parametrize("tensor", [2, *rest(1)])
@pytest.mark.parametrize("name", LIMITS)
def test_scores_over_two_ranks(pools: WorkerPools, shared: Path, name: str, tensor: int) -> None:
    for found in pools(2).run(differences, shared / "reference_cases", name, tensor):
        assert max(found["mean_nll in streams"], found["code protocol 8"]) < LIMITS[name]
