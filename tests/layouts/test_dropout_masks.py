"""Dropout masks for the same (seed, step, layer, stream, head) are the same at every layout, to the bit.

The masks are those that two training steps of the real engines use (tests/support/masks.py): of attention weights by
logical head, of the embedding and of the last hidden states by stream and position. Every rank dumps what it has used;
put together, the dumps are those of one process.
"""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.kernels.blocked import Blocked
from tests.support.masks import UNSEEN, Masks, Watch, joined
from tests.support.pool import WorkerPools
from tests.support.trajectories import MODEL, Case, build, run_config

VOCABULARY, STREAMS, BLOCK, STEPS = 101, 8, 16, 2
TOKENS = np.random.default_rng(5).integers(0, VOCABULARY, STREAMS * BLOCK * 12).astype(np.uint8)
DEEP = replace(MODEL, num_layers=5, embedding_dropout=0.15)
SPAN, VECTORS = DEEP.max_attention_span, DEEP.persistent_memory_size


def _train(rank: int, world_size: int, case: Case) -> tuple[Masks, int]:
    """The masks that this rank uses in two steps, and how often it asked."""
    run = run_config(case, DEEP, STREAMS, BLOCK)
    attend = Blocked(None) if case.backend == "blocked" else None  # PyTorch's operators, whose tiles can be watched
    engine = build(case, VOCABULARY, run, attend)
    streams = TokenStreams(TOKENS, STREAMS, BLOCK, run.training.seed)
    watch = Watch(BLOCK, SPAN, VECTORS, DEEP.hidden_size)
    with watch.watching():
        for step in range(1, STEPS + 1):
            block = streams.next_block(engine.streams)
            engine.train_step(block.inputs, block.targets, step, 0.05, engine.spans())
    return watch.masks, watch.calls


def dumped(pools: WorkerPools, case: Case) -> tuple[list[Masks], Masks, int]:
    """Of every rank, of all together, and how often all asked."""
    found = pools(case.world_size).run(_train, case, timeout=300)
    ranks = [masks for masks, _ in found]
    return ranks, joined(ranks), sum(calls for _, calls in found)


@pytest.fixture(scope="module")
def alone(pools: WorkerPools) -> Any:
    """One process's masks with a backend."""
    return cache(lambda backend: dumped(pools, Case(backend=backend))[1])


def eager(tensor: int, pipeline: int, data: int, accumulation: int, zero: int = 1, **more: Any) -> Case:
    return Case(tensor, data, zero, accumulation, "adagrad", "float32", "deepspeed", pipeline, **more)


FAST = [
    eager(2, 1, 2, 2, 3),
    eager(2, 2, 1, 2, sequence=True, recompute="full"),
    eager(1, 2, 2, 1, 0, recompute="full", layers=(1, 4)),
    eager(2, 1, 1, 2, backend="blocked", recompute="selective"),
]
WIDE = [
    *(
        # every switch at every other layout
        eager(tensor, pipeline, data, accumulation, recompute=again, sequence=tensor > 1 and (accumulation == 2))
        for (tensor, pipeline, data), accumulation in product(product((1, 2, 4), repeat=3), (1, 2))
        for again in ("none", "full")
        if tensor * pipeline * data <= 8
    ),
    *(
        eager(*sizes, 2, backend="blocked", recompute=again)
        for sizes, again in product(((4, 1, 1), (1, 4, 2), (2, 2, 2), (1, 1, 4)), ("none", "selective", "full"))
    ),
    *(eager(2, 1, 2, 2, zero, offload=zero > 0) for zero in range(4)),
    eager(4, 2, 1, 2, sequence=True, shard_caches=True),
    eager(2, 4, 1, 4, layers=(1, 1, 1, 2)),
]


def check(case: Case, pools: WorkerPools, expected: Masks) -> None:
    ranks, whole, _ = dumped(pools, case)
    assert whole.keys() == expected.keys()
    for key, mask in expected.items():
        if case.backend == "eager":
            assert np.array_equal(whole[key], mask), key
            continue
        both = (whole[key] != UNSEEN) & (mask != UNSEEN)  # blocked asks for what heads that it has together look at
        assert np.array_equal(whole[key][both], mask[both]) and both[:, -VECTORS - 32 :].all(), key
    heads = [{key[-1] for key in masks if key[0] == "ATTENTION"} for masks in ranks]
    assert all(len(own) == DEEP.num_attention_heads // case.tensor for own in heads)
    layers = [{key[2] for key in masks if key[0] == "ATTENTION"} for masks in ranks]
    assert all(0 < len(own) < 5 or case.pipeline == 1 for own in layers)


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.layouts) for case in WIDE)], ids=str)
def test_every_layout_drops_what_one_process_drops(case: Case, pools: WorkerPools, alone: Any) -> None:
    check(case, pools, alone(case.backend))


def test_what_is_dumped_are_masks(alone: Any) -> None:
    """All that a step needs, of the right share, and no two of them the same."""
    eager, blocked = alone("eager"), alone("blocked")
    attention = {key: mask for key, mask in eager.items() if key[0] == "ATTENTION"}
    assert len(attention) == STEPS * 5 * STREAMS * 4
    assert {key[0] for key in eager} == {"ATTENTION", "EMBEDDING", "REPRESENTATION"}
    assert len(eager) == len(attention) + 2 * STEPS * STREAMS
    for site, dropped in (("ATTENTION", 0.2), ("EMBEDDING", 0.15), ("REPRESENTATION", 0.15)):
        seen = np.concatenate([mask[mask != UNSEEN] for key, mask in eager.items() if key[0] == site])
        assert set(np.unique(seen)) == {0, 1}
        assert 1 - seen.mean() == pytest.approx(dropped, abs=5 * (dropped * (1 - dropped) / len(seen)) ** 0.5)
    assert len({mask[:, -VECTORS:].tobytes() for mask in attention.values()}) == len(attention)
    for key, mask in blocked.items():  # the backends have the same bits, whatever their tiles
        both = (mask != UNSEEN) & (eager[key] != UNSEEN)
        assert np.array_equal(mask[both], eager[key][both]) and both.any()


def test_recomputation_asks_twice_and_gets_the_same(pools: WorkerPools) -> None:
    """`Watch.put` holds every mask against the one that was there."""
    kept, again = (dumped(pools, Case(recompute=recompute)) for recompute in ("none", "full"))
    assert all(np.array_equal(again[1][key], mask) for key, mask in kept[1].items())
    attention = sum(key[0] == "ATTENTION" for key in kept[1])
    assert again[2] - kept[2] == attention


def test_a_mask_that_changes_is_seen() -> None:
    watch = Watch(4, 8, 2, 3)
    watch.put(("EMBEDDING", 1, 0), 0, 0, np.ones((4, 3), dtype=bool))
    with pytest.raises(AssertionError, match="asked for again, and another"):
        watch.put(("EMBEDDING", 1, 0), 2, 1, np.zeros((1, 1), dtype=bool))
    other = {("EMBEDDING", 1, 0): np.zeros((4, 3), dtype=np.uint8)}
    with pytest.raises(AssertionError, match="ranks differ"):
        joined([watch.masks, other])
