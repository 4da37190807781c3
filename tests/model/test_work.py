"""Counted work against PyTorch's own counter on the real network, and by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.network import Network
from megatron_allattn.model.work import Work, flops_by_part, step_flops
from megatron_allattn.parallel.groups import ALONE
from megatron_allattn.parallel.random import DropoutKeys

BATCH, BLOCK, VOCABULARY = 2, 80, 101
MODEL = ModelConfig(
    num_layers=2, hidden_size=48, num_attention_heads=4, persistent_memory_size=24, max_attention_span=128, span_ramp=8
)
NO_MEMORY = replace(MODEL, persistent_memory_size=0)
REACH = [[9, 41, 128, 17], [9, 9, 60, 33]]  # of windows 128 and 64


def inplace_flops(out: list[int], a: list[int], b: list[int], *_: object, **__: object) -> int:
    """addmm_ and baddbmm_ by the shapes of their factors; the counter knows only the forms that give a new tensor."""
    return 2 * int(np.prod(a)) * b[-1]


COUNTED = {torch.ops.aten.addmm_: inplace_flops, torch.ops.aten.baddbmm_: inplace_flops}


def count(model: ModelConfig, backend: str, training: bool, reach: list[list[int]], recompute: str = "none") -> int:
    """What PyTorch counts in a forward pass, and a backward pass, over the real network with full caches."""
    attend = {"eager": eager.attend, "blocked": Blocked(None)}[backend]  # compiled heads are no operators
    network = Network(model, VOCABULARY, ALONE, FusedOps("torch"), attend, recompute)
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        parameter.data.normal_(0.0, 0.1, generator=generator)
    slot = CacheSlot(range(model.num_layers), BATCH, model.hidden_size, torch.float32, torch.device("cpu"))
    length = model.max_attention_span
    slot.restore([torch.zeros(BATCH, length, model.hidden_size)] * model.num_layers, length)
    windows = tuple(model.max_attention_span if max(layer) > 65 else 64 for layer in reach)
    keys = DropoutKeys(1, 1, torch.arange(BATCH, dtype=torch.int32)) if training else None
    context = BlockContext(windows, slot, keys, look_back=tuple(map(tuple, reach)))
    tokens = torch.arange(BATCH * BLOCK).view(BATCH, BLOCK) % VOCABULARY
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter, torch.set_grad_enabled(training):
        loss = network(tokens, context, tokens).mean()
        if training:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("training", [True, False], ids=["step", "forward"])
@pytest.mark.parametrize("backend", ["eager", "blocked"])
@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        replace(MODEL, position_values="shared", attention_dropout=0.1),
        replace(MODEL, span_normalization="window"),
        NO_MEMORY,
        replace(MODEL, variant="attn-split"),
        replace(MODEL, variant="single-head"),
        replace(NO_MEMORY, variant="ff-attn", feed_forward_size=30),
        replace(NO_MEMORY, variant="transformer", feed_forward_size=30),
    ],
    ids=["all-attn", "shared", "window", "no memory", "attn-split", "single-head", "ff-attn", "transformer"],
)
def test_executed_work_is_what_pytorch_counts(model: ModelConfig, backend: str, training: bool) -> None:
    found = step_flops(model, VOCABULARY, BATCH, BLOCK, REACH, backend, training)
    assert found.executed == count(model, backend, training, REACH)


@pytest.mark.parametrize(
    ("backend", "recompute"), [("blocked", "selective"), ("blocked", "full"), ("eager", "full")], ids=str
)
@pytest.mark.parametrize("model", [MODEL, replace(MODEL, variant="attn-split")], ids=["all-attn", "attn-split"])
def test_recomputed_work_is_counted(model: ModelConfig, backend: str, recompute: str) -> None:
    found = step_flops(model, VOCABULARY, BATCH, BLOCK, REACH, backend, recompute=recompute)
    assert found.executed == count(model, backend, True, REACH, recompute)


def test_head_split_and_fixed_spans() -> None:
    halves = [[9, 128], [33, 60]]
    split = replace(MODEL, variant="head-split")
    assert step_flops(split, VOCABULARY, BATCH, BLOCK, halves, "blocked").executed == count(
        split, "blocked", True, halves
    )
    fixed, whole = replace(MODEL, adaptive_span=False), [[128] * 4] * 2
    for backend in ("eager", "blocked"):
        found = step_flops(fixed, VOCABULARY, BATCH, BLOCK, whole, backend)
        assert found.executed == count(fixed, backend, True, whole)


def test_an_adaptive_vocabulary() -> None:
    model = replace(MODEL, adaptive_cutoffs="20,60", adaptive_div_value=2)
    ids = torch.arange(BATCH * BLOCK) % VOCABULARY
    clusters = torch.bucketize(ids, torch.tensor(model.cutoffs), right=True)
    hits = [Counter(clusters.tolist())[k] for k in range(3)]
    found = step_flops(model, VOCABULARY, BATCH, BLOCK, REACH, "blocked", cluster_tokens=hits)
    assert found.executed == count(model, "blocked", True, REACH)
    with pytest.raises(ValueError, match="3 clusters share 160 tokens"):
        step_flops(model, VOCABULARY, BATCH, BLOCK, REACH, "blocked")


def test_needed_work_by_hand() -> None:
    """Of one layer of 2 heads that see 3 and 5 positions, 4 wide, with 6 vectors each; 1 stream of 10 tokens."""
    model = replace(
        MODEL, num_layers=1, hidden_size=8, num_attention_heads=2, persistent_memory_size=6, max_attention_span=5
    )
    for training, times, weights_only in ((False, 1, 1), (True, 3, 2)):
        parts = flops_by_part(model, 7, 1, 10, [[3, 5]], "eager", training)
        assert {name: work.model for name, work in parts.items()} == {
            "output": times * 2 * 10 * 8 * 7,
            "block": times * 3 * 2 * 10 * 8 * 8,
            "cached": weights_only * 2 * 2 * (3 + 5) * 8 * 4,
            "attention": times * 2 * 10 * 4 * (3 * (3 + 5) + 2 * (6 + 6)),
            "out": times * 2 * 10 * 8 * 8,
        }


def test_the_needed_work_is_the_same_for_every_backend_and_recomputation() -> None:
    counts = [
        step_flops(MODEL, VOCABULARY, BATCH, BLOCK, REACH, backend, recompute=recompute).model
        for backend in ("eager", "blocked", "triton")
        for recompute in ("none", "selective", "full")
    ]
    assert len(set(counts)) == 1


def test_parts_add_up_and_spans_must_fit() -> None:
    parts = flops_by_part(MODEL, VOCABULARY, BATCH, BLOCK, REACH, "blocked")
    assert sum(parts.values(), Work(0, 0)) == step_flops(MODEL, VOCABULARY, BATCH, BLOCK, REACH, "blocked")
    with pytest.raises(ValueError, match=r"look_back \[4\]: 2 layers × 4 heads"):
        step_flops(MODEL, VOCABULARY, BATCH, BLOCK, REACH[:1], "blocked")
    with pytest.raises(ValueError, match="backend fast: known are"):
        step_flops(MODEL, VOCABULARY, BATCH, BLOCK, REACH, "fast")
