"""The optimizers against torch's own, hand-computed steps, and ZeRO-like partitions of the same tensors."""

import math

import numpy as np
import pytest
import torch

from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.optimizers import Adagrad, Adam, clip_gradients, gradient_norm
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.model.parameter_groups import parameter_groups
from megatron_allattn.parallel.groups import ALONE, Group
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of

FUSED = FusedOps("torch")
BETAS = (0.9, 0.999)
SHAPES = [(5, 3), (7,), (2, 4, 3)]


def _tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def _group(tensors: list[torch.Tensor], **options: bool) -> dict:
    return {"params": tensors, "decay": True, "span": False, "sharded": False} | options


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_adamw(weight_decay: float) -> None:
    ours, theirs = _tensors(1), _tensors(1)
    adam = Adam([_group(ours)], (0.9, 0.98), 1e-6, weight_decay, FUSED)
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.98), eps=1e-6, weight_decay=weight_decay)
    for step in range(1, 8):
        for a, b, gradient in zip(ours, theirs, _tensors(100 + step), strict=True):
            a.grad, b.grad = gradient.clone(), gradient.clone()
        adam.param_groups[0].update(lr=0.01, step=step)
        adam.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adagrad_without_clip_is_torchs(weight_decay: float) -> None:
    ours, theirs = _tensors(2), _tensors(2)
    adagrad = Adagrad([_group(ours)], 0.0, weight_decay, ALONE, ALONE, FUSED)
    reference = torch.optim.Adagrad(theirs, lr=0.07, eps=1e-10, weight_decay=weight_decay)
    for step in range(5):
        for a, b, gradient in zip(ours, theirs, _tensors(200 + step), strict=True):
            a.grad, b.grad = gradient.clone(), gradient.clone()
        adagrad.param_groups[0]["lr"] = 0.07
        adagrad.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_adagrad_clips_the_step_not_the_accumulator() -> None:
    """g = (3, 4): norm 5, clip 0.5, so the first step is lr · 0.1 · g/|g| per element; the sum takes 9 and 16."""
    p, q = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    optimizer = Adagrad([_group([p]), _group([q])], 0.5, 0.0, ALONE, ALONE, FUSED)
    for group in optimizer.param_groups:
        group["lr"] = 0.07
    p.grad = torch.tensor([3.0, -4.0], dtype=torch.float64)
    q.grad = torch.tensor([0.03, -0.04], dtype=torch.float64)  # below the clip: whole steps
    optimizer.step()
    np.testing.assert_allclose(p.numpy(), [-0.007, 0.007], rtol=1e-9)
    np.testing.assert_allclose(q.numpy(), [-0.07, 0.07], rtol=1e-8)
    np.testing.assert_allclose(optimizer.state[p]["sum"].numpy(), [9.0, 16.0], rtol=1e-15)
    optimizer.step()
    np.testing.assert_allclose(p.numpy(), np.array([-0.007, 0.007]) * (1 + 1 / math.sqrt(2)), rtol=1e-9)


@pytest.mark.parametrize("kind", ["adam", "adagrad"])
def test_spans_stay_in_the_unit_interval(kind: str) -> None:
    z, other = torch.tensor([0.01, 0.99, 0.5]), torch.tensor([0.01, 0.99, 0.5])
    groups = [_group([z], span=True, decay=False), _group([other], decay=False)]
    adam = kind == "adam"
    optimizer = Adam(groups, BETAS, 1e-8, 0.0, FUSED) if adam else Adagrad(groups, 0, 0, ALONE, ALONE, FUSED)
    for group in optimizer.param_groups:
        group["lr"] = 0.2
    for tensor in (z, other):
        tensor.grad = torch.tensor([1.0, -1.0, 1.0])
    optimizer.step()
    np.testing.assert_allclose(z.numpy(), [0.0, 1.0, 0.3], atol=1e-6)
    np.testing.assert_allclose(other.numpy(), [-0.19, 1.19, 0.3], atol=1e-6)


def test_groups_spare_vectors_and_spans_from_decay() -> None:
    network = Network(ModelConfig(num_layers=2), 50, ALONE, FUSED)
    by_kind = parameter_groups(network, one_tensor_each=False)
    count = {(group["decay"], group["span"]): len(group["params"]) for group in by_kind}
    # Per layer q, k, v, o, k', v' decay, the norm's two do not. Besides: embedding, position, output and its bias.
    assert count == {(True, False): 2 * 6 + 3, (False, False): 2 * 2 + 1, (False, True): 2}
    single = parameter_groups(network, one_tensor_each=True)
    assert [len(group["params"]) for group in single] == [1] * (2 * 9 + 4)


def test_state_exists_before_the_first_step_and_has_the_tensors_shape() -> None:
    tensors = _tensors(3)
    optimizer = Adam([_group(tensors)], BETAS, 1e-8, 0.0, FUSED)
    optimizer.ensure_state(tensors)
    assert [optimizer.state[t]["exp_avg"].shape for t in tensors] == [torch.Size(shape) for shape in SHAPES]
    assert all(not optimizer.state[t][name].any() for t in tensors for name in optimizer.state_names)


def _clipped_step(rank: int, world_size: int, sharded: bool) -> tuple[list[float], float]:
    """One clipped step on a tensor whose elements lie on different ranks, as ZeRO (or TP, if sharded) deals them."""
    group: Group = groups_of(1, world_size).data
    full, gradient = torch.zeros(8, dtype=torch.float64), torch.arange(1.0, 9.0, dtype=torch.float64)
    part = full.view(world_size, -1)[rank].clone()
    part.grad = gradient.view(world_size, -1)[rank].clone()
    groups = (group, ALONE) if sharded else (ALONE, group)
    optimizer = Adagrad([_group([part], sharded=sharded)], 0.5, 0.0, *groups, FUSED)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    return part.tolist(), float(gradient.norm())


@pytest.mark.parametrize("sharded", [True, False], ids=["tensor parallel", "ZeRO partition"])
def test_the_norm_is_that_of_the_whole_tensor(sharded: bool, pools: WorkerPools) -> None:
    results = pools(2).run(_clipped_step, sharded)
    step = -0.1 * 0.5 / math.sqrt(204)  # 1² + … + 8² = 204; Adagrad's first step is lr times the sign
    np.testing.assert_allclose(results[0][0] + results[1][0], [step] * 8, rtol=1e-9)


def _norm_and_clip(rank: int, world_size: int) -> tuple[float, float]:
    group = groups_of(world_size, 1).tensor
    network = Network(ModelConfig(num_layers=1, hidden_size=16, persistent_memory_size=8), 9, group, FUSED)
    initialize(network, 5)
    for parameter in network.parameters():
        parameter.grad = parameter.detach().clone()  # the gradient is the weight: its norm is known
    norm = gradient_norm(network, group, FUSED)
    clip_gradients(network, norm, 0.25)
    return norm, gradient_norm(network, group, FUSED)


def test_the_global_norm_counts_replicated_tensors_once(pools: WorkerPools) -> None:
    alone = _norm_and_clip_alone()
    for size in (2, 4):
        for norm, clipped in pools(size).run(_norm_and_clip):
            assert norm == pytest.approx(alone, rel=1e-6)
            assert clipped == pytest.approx(0.25, rel=1e-6)


def _norm_and_clip_alone() -> float:
    network = Network(ModelConfig(num_layers=1, hidden_size=16, persistent_memory_size=8), 9, ALONE, FUSED)
    initialize(network, 5)
    return math.sqrt(sum(float(p.detach().double().square().sum()) for p in network.parameters()))
