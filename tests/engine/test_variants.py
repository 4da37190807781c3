"""Every variant of the ablation under DeepSpeed, tensor- and data-parallel: the training of one plain process.

All-attention itself is in tests/layouts.
"""

import numpy as np
import pytest
import torch

from megatron_allattn.engine.interface import Spans
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trajectories import Case, build, differences, run_config, trajectory
from tests.support.variants import dropout_of, model_of

VOCAB = 61
TOKENS = np.random.default_rng(7).integers(0, VOCAB, 8 * 32 * 6).astype(np.uint8)
BOUNDS = {"first loss": 1e-6, "gradients": 1e-5, "losses": 1e-5, "first norm": 1e-5}


@pytest.mark.parametrize(
    "variant", ["transformer", *rest("head-split", "attn-split", "single-head", "ff-attn", "no-persistent")]
)
def test_every_zero_stage_equals_plain_training(variant: str, pools: WorkerPools) -> None:
    model = model_of(variant, max_attention_span=80, span_ramp=8, span_loss=1e-4, **dropout_of(variant))
    single = pools(1).run(trajectory, Case(), TOKENS, VOCAB, 2, model)[0]
    for zero in (1, 2, 3):
        case = Case(2, 2, zero, 1, "adagrad", "float32", "deepspeed")
        found = pools(4).run(trajectory, case, TOKENS, VOCAB, 2, model)[0]
        for what, difference in differences(found, single).items():
            assert difference <= BOUNDS[what], f"ZeRO {zero}: {what} differs by {difference:.1e}"


def _spans(rank: int, world_size: int, adaptive: bool) -> Spans:
    case = Case(2)
    model = model_of("head-split", max_attention_span=80, adaptive_span=adaptive)
    engine = build(case, VOCAB, run_config(case, model))
    for layer, z in enumerate(engine.network.span_parameters()):
        z.data.copy_(torch.tensor([0.1, 0.2]).view(2, 1, 1) + 0.4 * rank + 0.05 * layer)
    return engine.spans()


def test_only_heads_that_attend_to_the_context_have_a_span(pools: WorkerPools) -> None:
    """Two of four on each rank, in the order of heads over all ranks."""
    for adaptive, fixed in zip(pools(2).run(_spans, True), pools(2).run(_spans, False), strict=True):
        expected = torch.tensor([[0.1, 0.2, 0.5, 0.6], [0.15, 0.25, 0.55, 0.65]])
        torch.testing.assert_close(adaptive.z, expected)
        torch.testing.assert_close(adaptive.tokens, expected.double() * 80 + 3, rtol=1e-6, atol=0)
        assert fixed.z is None and fixed.tokens.tolist() == [[80.0] * 4] * 2
