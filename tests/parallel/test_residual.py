"""The residual stream, whole and cut, by hand."""

import torch

from megatron_allattn.parallel.groups import ALONE
from megatron_allattn.parallel.residual import Residual
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of


def _pass(rank: int, world_size: int, sequence_parallel: bool) -> dict:
    """Enter, work with rank + 1, leave; the gradient of what entered, and of a weight that acts on the stream."""
    residual = Residual(groups_of(2, 1).tensor, sequence_parallel)
    block = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])  # one stream, four positions, one channel
    own = block.chunk(2, dim=1)[rank] if sequence_parallel else block
    hidden, weight = own.clone().requires_grad_(), torch.ones(1, requires_grad=True)
    entered = residual.enter(hidden)
    left = residual.leave(entered * (rank + 1))
    (left * residual.replicated(weight)[0] * left.detach()).sum().backward()
    return {
        "first": residual.first_position(hidden),
        "entered": entered.flatten().tolist(),
        "left": left.flatten().tolist(),
        "gradient": hidden.grad.flatten().tolist(),
        "weight": weight.grad.item(),
    }


def test_whole_and_cut_streams_hold_the_same_values_and_gradients(pools: WorkerPools) -> None:
    # left = (1 + 2) x; its gradient is left itself, (1 + 2) of it come back: 9 x; the weight's is the sum of 9 x²
    block = [1.0, 2.0, 3.0, 4.0]
    left, gradient, weight = [3.0, 6.0, 9.0, 12.0], [9.0, 18.0, 27.0, 36.0], 270.0
    for found in pools(2).run(_pass, False):
        assert found == {"first": 0, "entered": block, "left": left, "gradient": gradient, "weight": weight}
    for rank, found in enumerate(pools(2).run(_pass, True)):
        own = slice(2 * rank, 2 * rank + 2)
        assert found == {
            "first": 2 * rank,
            "entered": block,
            "left": left[own],
            "gradient": gradient[own],
            "weight": weight,
        }


def test_one_rank_alone_has_the_whole() -> None:
    hidden, residual = torch.ones(1, 3, 2), Residual(ALONE)
    assert residual.enter(hidden) is hidden and residual.leave(hidden) is hidden
    assert residual.first_position(hidden) == 0
