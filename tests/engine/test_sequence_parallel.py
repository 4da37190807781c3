"""Sequence parallelism and shared caches against a residual stream and caches that are whole on every rank."""

import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_allattn.config import ModelConfig
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.kernels.registry import make_blocked
from megatron_allattn.parallel.residual import Residual
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trajectories import MODEL, Case, build, differences, run_config, trajectory

VOCABULARY = 101
TOKENS = np.random.default_rng(11).integers(0, VOCABULARY, 8 * 32 * 12).astype(np.uint8)
FED = replace(MODEL, variant="transformer", persistent_memory_size=0, feed_forward_size=48)
EXACT = {"first loss": 1e-13, "gradients": 1e-10, "losses": 1e-11, "first norm": 1e-12}


def train(pools: WorkerPools, case: Case, steps: int = 4, model: ModelConfig = MODEL) -> Any:
    return pools(case.world_size).run(trajectory, case, TOKENS, VOCABULARY, steps, model)[0]


VARIANTS = {
    "all-attn": {},
    "transformer": {
        "variant": "transformer",
        "persistent_memory_size": 0,
        "feed_forward_size": 48,
        "feed_forward_dropout": 0.1,
    },
    "ff-attn": {"variant": "ff-attn", "persistent_memory_size": 0, "feed_forward_size": 48},
    "single-head": {"variant": "single-head"},
    "adaptive": {"adaptive_cutoffs": "20,60", "adaptive_div_value": 2, "untie_embeddings_and_output_weights": False},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("case", [Case(2, 1), *rest(Case(4, 1, accumulation=2))], ids=["tp2", "tp4"])
def test_every_variant_is_the_single_process_in_float64(case: Case, changes: dict, pools: WorkerPools) -> None:
    """Dropout at every site, active clipping."""
    model = replace(MODEL, **changes)
    case = replace(case, dtype="float64", sequence=True, shard_caches=case.tensor == 4)
    found = differences(train(pools, case, model=model), train(pools, case.single(), model=model))
    for what, bound in EXACT.items():
        assert found[what] <= bound, (what, found[what])


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 0, 4, "adam", "float32", "deepspeed", 2, (1, 4), 5, sequence=True, shard_caches=True),
        *rest(
            Case(2, 2, 3, 1, "adam", "float32", "deepspeed", sequence=True, shard_caches=True),
            Case(2, 1, 1, 2, "adagrad", "float32", "deepspeed", sequence=True),
            Case(2, 1, 1, 2, "adagrad", "float32", "deepspeed", 2, depth=5, sequence=True),
        ),
    ],
    ids=str,
)
def test_under_deepspeed_and_in_pipelines(case: Case, pools: WorkerPools) -> None:
    found = differences(train(pools, case), train(pools, case.single()))
    for what, bound in {"first loss": 1e-6, "gradients": 1e-5, "losses": 1e-5, "first norm": 1e-6}.items():
        assert found[what] <= bound, (what, found[what])


def _steps(rank: int, world_size: int, case: Case, recompute: str) -> dict[str, Any]:
    """With the blocked backend: losses and norms, what the caches hold, and elements that every slot keeps."""
    engine = build(case, VOCABULARY, run_config(case, MODEL), make_blocked(torch.device("cpu")), recompute)
    streams, results = TokenStreams(TOKENS, 8, 32, 1), []
    for step in range(1, 5):
        block = streams.next_block(engine.streams)
        results.append(engine.train_step(block.inputs, block.targets, step, 0.05, engine.spans()))
    kept = [sum(layer.numel() for layer in slot._current) for slot in engine.slots]
    whole = {name: tensor.numpy() for name, tensor in engine.caches() if tensor is not None}
    engine.load_caches(lambda name: torch.from_numpy(whole[name]), 128)
    again = {name: tensor.numpy() for name, tensor in engine.caches() if tensor is not None}
    assert all(np.array_equal(whole[name], again[name]) for name in whole)
    return {"results": results, "kept": kept, "caches": whole}


@pytest.mark.parametrize("recompute", ["none", *rest("selective", "full")])
@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_shared_caches_change_no_bit_and_take_a_share(engine: str, recompute: str, pools: WorkerPools) -> None:
    """Also where layers are computed again; caches are saved and loaded whole."""
    case = Case(2, 1, int(engine == "deepspeed"), 2, "adagrad", "float32", engine)
    whole = pools(2).run(_steps, case, "none")[0]
    for found in pools(2).run(_steps, replace(case, shard_caches=True), recompute):
        assert found["results"] == whole["results"]
        assert found["kept"] == [elements // 2 for elements in whole["kept"]] and min(found["kept"]) > 0
        for name, cache in whole["caches"].items():
            np.testing.assert_array_equal(found["caches"][name], cache)


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_recomputing_with_a_cut_stream_changes_no_bit(engine: str, pools: WorkerPools) -> None:
    case = Case(2, 1, int(engine == "deepspeed"), 2, "adagrad", "float32", engine, sequence=True)
    kept, again = (pools(2).run(_steps, case, recompute)[0] for recompute in ("none", "full"))
    assert kept["results"] == again["results"]


def _kept(rank: int, world_size: int, reread: bool) -> int:
    """How many gathered caches are kept between forward and backward, once caches are as long as they get."""
    case, gathered = Case(2, 1, shard_caches=True), []
    engine = build(case, VOCABULARY, run_config(case, MODEL), make_blocked(torch.device("cpu")))
    block = TokenStreams(TOKENS, 8, 32, 1).next_block(engine.streams)
    for step in range(1, 5):
        engine.train_step(block.inputs, block.targets, step, 0.0, engine.spans())

    class Watched:
        """The slot, and who of what was read is alive."""

        length = engine.slots[0].length
        written, write = engine.slots[0].written, engine.slots[0].write

        def read(self, layer: int) -> torch.Tensor:
            cached = engine.slots[0].read(layer)
            gathered.append(weakref.ref(cached.untyped_storage()))
            return cached

    (_, context), *_ = engine._micro_batches(5, engine.spans())
    context = replace(context, cache=Watched(), reread_caches=reread)
    nats = engine.network(engine._tensor(block.inputs), context, engine._tensor(block.targets))
    alive = sum(storage() is not None for storage in gathered)
    nats.mean().backward()
    assert len(gathered) == MODEL.num_layers * (2 if reread else 1)
    return alive


def test_gathered_caches_are_not_kept_until_backward(pools: WorkerPools) -> None:
    assert pools(2).run(_kept, True) == [0, 0]
    assert pools(2).run(_kept, False) == [MODEL.num_layers] * 2


def _entered(rank: int, world_size: int, case: Case) -> tuple[int, int]:
    """Of what entered sublayers and the output, how much there is and is kept between forward and backward."""
    engine = build(case, VOCABULARY, run_config(case, FED), make_blocked(torch.device("cpu")))
    block = TokenStreams(TOKENS, 8, 32, 1).next_block(engine.streams)
    (_, context), *_ = engine._micro_batches(1, engine.spans())
    original, entered = Residual.enter, []

    def enter(residual: Residual, hidden: torch.Tensor) -> torch.Tensor:
        found = original(residual, hidden)
        entered.append(weakref.ref(found.untyped_storage()))
        return found

    with patch.object(Residual, "enter", enter):
        nats = engine.network(engine._tensor(block.inputs), context, engine._tensor(block.targets))
        count, alive = len(entered), sum(storage() is not None for storage in entered)
        nats.mean().backward()
    return count, alive


def test_what_is_gathered_is_not_kept_until_backward(pools: WorkerPools) -> None:
    """But for the hidden states of which logits are made."""
    places = 2 * FED.num_layers + 1
    assert pools(2).run(_entered, Case(2, 1, sequence=True)) == [(places, 1)] * 2
    assert pools(2).run(_entered, Case(2, 1)) == [(places, places)] * 2
