"""Heads on any rank: nothing that a run computes or saves depends on where they are, and balanced ones cost less."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_allattn.benchmark.profiles import read_profile
from megatron_allattn.checkpoint import folder, save
from megatron_allattn.config import ModelConfig
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.engine.balance import balance_heads
from megatron_allattn.engine.drift import check_replicas
from megatron_allattn.engine.interface import Engine
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.compiled import load_library
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.placement import loads
from megatron_allattn.parallel.collectives import all_gather, gather_objects
from megatron_allattn.parallel.logical import Placement, in_order
from tests.model.test_placement import splits
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trajectories import MODEL, Case, build, run_config

VOCABULARY = 101
TOKENS = np.random.default_rng(7).integers(0, VOCABULARY, 8 * 32 * 12).astype(np.uint8)
LAYERS, HEADS, LONGEST = 3, 8, 1024
TAILED = replace(MODEL, num_attention_heads=HEADS, max_attention_span=LONGEST)


def spread(layer: int, heads: int, ranks: int) -> Placement:
    """Heads far from each other on every rank, differently in every layer."""
    order = [(head * 3 + layer + 1) % heads for head in range(heads)] if heads % 3 else list(range(heads))[::-1]
    return tuple(tuple(order[rank::ranks]) for rank in range(ranks))


def train(engine: Engine, streams: TokenStreams, first: int, count: int, lr: float = 0.02) -> list[float]:
    losses = []
    for step in range(first, first + count):
        block = streams.next_block(engine.streams)
        losses.append(engine.train_step(block.inputs, block.targets, step, lr, engine.spans()).loss)
    return losses


def held(engine: Engine) -> dict[str, bytes]:
    """All weights and optimizer state as logical tensors."""
    named = chain(((logical.name, tensor) for logical, tensor in engine.weights()), engine.optimizer_state())
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in named}


def _moved(rank: int, world_size: int, case: Case, model: ModelConfig, move: bool) -> list[float]:
    """Losses of two steps, and of two more after heads have moved, and been moved once more."""
    engine = build(case, VOCABULARY, run_config(case, model))
    streams, heads, ranks = TokenStreams(TOKENS, 8, 32, 1), model.num_context_heads, case.tensor
    losses = train(engine, streams, 1, 2)
    before, spans = held(engine), engine.spans()
    placements = [spread(layer, heads, ranks) for layer in range(model.num_layers)]
    if move:
        engine.place_heads(placements)
        assert engine.network.placements != tuple(in_order(heads, ranks) for _ in placements)
        assert held(engine) == before
        after = engine.spans()
        assert spans.windows == after.windows and torch.equal(spans.tokens, after.tokens)
        for layer, placement in enumerate(placements):
            every = list(chain.from_iterable(gather_objects(spans.look_back[layer], engine.groups.tensor)))
            assert after.look_back[layer] == tuple(every[head] for head in placement[engine.groups.tensor.rank])
        check_replicas(engine)
    losses += train(engine, streams, 3, 1)
    if move:
        engine.place_heads([spread(layer + 1, heads, ranks) for layer in range(model.num_layers)])
    return losses + train(engine, streams, 4, 1)


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 1, 0, 1, "adagrad", "float64", "plain"),
        Case(2, 2, 2, 2, "adam", "float32", "deepspeed"),
        *rest(
            Case(2, 1, 1, 2, "adam", "float32", "deepspeed", pipeline=2),
            Case(2, 2, 0, 2, "adam", "bfloat16", "plain"),
            Case(4, 1, 0, 1, "adam", "float32", "deepspeed"),
            Case(2, 2, 1, 1, "adagrad", "float32", "deepspeed"),
            Case(2, 2, 3, 1, "adagrad", "bfloat16", "deepspeed", sequence=True, shard_caches=True),
        ),
    ],
    ids=str,
)
def test_moving_heads_keeps_every_bit_of_state_and_the_losses(case: Case, pools: WorkerPools) -> None:
    """Dropout of 0.2 on attention: equal losses are equal masks."""
    bound = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 2e-3}[case.dtype]
    moved, stayed = (pools(case.world_size).run(_moved, case, MODEL, move)[0] for move in (True, False))
    assert moved[:2] == stayed[:2]
    np.testing.assert_allclose(moved, stayed, rtol=bound)


@pytest.mark.parametrize("variant", ["head-split", *rest("attn-split", "ff-attn", "no persistent vectors")])
def test_every_variant_whose_heads_are_cut(variant: str, pools: WorkerPools) -> None:
    fields: dict[str, Any] = {"variant": variant}
    if variant == "ff-attn":
        fields |= {"persistent_memory_size": 0, "feed_forward_size": 48, "feed_forward_dropout": 0.1}
    if variant == "no persistent vectors":
        fields = {"persistent_memory_size": 0}
    model, case = replace(MODEL, num_attention_heads=8, **fields), Case(4, dtype="float64")
    moved, stayed = (pools(4).run(_moved, case, model, move)[0] for move in (True, False))
    assert moved[:2] == stayed[:2]
    np.testing.assert_allclose(moved, stayed, rtol=1e-12)


def _saved(rank: int, world_size: int, run: Path, move: bool) -> None:
    engine = build(Case(4, optimizer="adam"), VOCABULARY)
    streams = TokenStreams(TOKENS, 8, 32, 1)
    train(engine, streams, 1, 2)
    if move:
        engine.place_heads([spread(layer, 4, 4) for layer in range(MODEL.num_layers)])
    save.save(run, 2, engine, {})


def test_a_checkpoint_does_not_show_where_heads_were(pools: WorkerPools, tmp_path: Path) -> None:
    files = {}
    for name, move in (("stayed", False), ("moved", True)):
        pools(4).run(_saved, tmp_path / name, move)
        step, _ = folder.find_latest(tmp_path / name)
        files[name] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in step.glob("*.safetensors")}
    assert files["stayed"] == files["moved"] and len(files["stayed"]) == 3


def tail(name: str) -> torch.Tensor:
    """z of the last layers of a profile, [layers, heads]."""
    profile = read_profile(name).fit(18, HEADS, LONGEST)
    return torch.tensor(profile.z(LONGEST)[9 : 9 + LAYERS])


def with_spans(engine: Engine, z: torch.Tensor) -> None:
    weights = {logical.name: tensor for logical, tensor in engine.weights()}
    weights |= {f"layers.{layer}.span": spans.view(-1, 1, 1) for layer, spans in enumerate(z)}
    engine.load(weights.__getitem__)


def logits(engine: Engine, tokens: torch.Tensor, cache: Any) -> np.ndarray:
    """Of every token of a block, [B, M, V], without dropout."""
    network, spans = engine.network, engine.spans()
    context = BlockContext(spans.windows, cache, dropout_keys=None, look_back=spans.look_back)
    with torch.no_grad():
        hidden = network.run_layers(network.embed(tokens, context), context)
        local = F.linear(network.residual.enter(hidden), network.output.weight)
    return torch.cat(all_gather(local, network.group), dim=-1)[..., :VOCABULARY].numpy()


def _counted(rank: int, world_size: int, profile: str, compiled: bool, balanced: bool) -> dict[str, Any]:
    """What the backend counts in a step of every rank's heads, logits, and losses of the next steps."""
    case, library = Case(world_size, optimizer="adam"), load_library()[0] if compiled else None
    assert library is not None or not compiled
    attend = Blocked(library)
    engine = build(case, VOCABULARY, run_config(case, TAILED), attend)
    with_spans(engine, tail(profile))
    streams = TokenStreams(TOKENS, 8, 32, 1)
    told = balance_heads(engine) if balanced else None
    losses = train(engine, streams, 1, 1, 0.0)
    attend.scored.clear()
    losses += train(engine, streams, 2, 1, 0.0)
    counted = gather_objects(attend.scored.by_layer(), engine.groups.tensor)
    block = streams.next_block(range(8))
    found = logits(engine, torch.from_numpy(block.inputs.astype(np.int64)), engine.slots[0])
    engine.slots[0]._next = [None] * LAYERS
    losses += train(engine, streams, 4, 3)
    return {
        "counted": [[counted[rank][layer] for rank in range(world_size)] for layer in range(LAYERS)],
        "placements": engine.network.placements,
        "logits": found,
        "losses": losses,
        "told": told,
    }


def per_head(counted: Sequence[Sequence[int]], placement: Placement) -> list[int]:
    costs = [0] * HEADS
    for own, heads in zip(counted, placement, strict=True):
        for cost, head in zip(own, heads, strict=True):
            costs[head] = cost
    return costs


@pytest.mark.parametrize(("profile", "compiled"), [("late", True), ("half-way", False)])
def test_balanced_heads_lower_the_slowest_ranks_work(profile: str, compiled: bool, pools: WorkerPools) -> None:
    """To within a tenth of the best split of what the backend counts; results stay."""
    if compiled and load_library()[0] is None:
        pytest.skip(load_library()[1])
    everywhere, stayed = (pools(4).run(_counted, profile, compiled, balanced) for balanced in (True, False))
    balanced, plain = everywhere[0], stayed[0]
    slowest = {"balanced": 0, "in order": 0, "best": 0}
    for layer in range(LAYERS):
        work, before = balanced["counted"][layer], plain["counted"][layer]
        costs = per_head(work, balanced["placements"][layer])
        assert costs == per_head(before, in_order(HEADS, 4))  # a head costs the same wherever it is
        slowest["balanced"] += max(map(sum, work))
        slowest["in order"] += max(map(sum, before))
        slowest["best"] += min(max(loads(costs, split)) for split in splits(HEADS, 4))
        assert max(map(sum, work)) <= 1.1 * min(max(loads(costs, split)) for split in splits(HEADS, 4))
        assert max(map(sum, work)) <= max(map(sum, before))
    assert slowest["balanced"] < 0.95 * slowest["in order"], slowest
    assert np.abs(balanced["logits"] - plain["logits"]).max() <= 1e-6
    assert np.abs(plain["logits"]).max() > 0.5
    np.testing.assert_allclose(balanced["losses"], plain["losses"], rtol=1e-6)
    told, total = balanced["told"], sum(sum(map(sum, layer)) for layer in balanced["counted"])
    assert all(rank["told"] == told and rank["placements"] == balanced["placements"] for rank in everywhere)
    assert told.before == pytest.approx(slowest["in order"] / total) and told.moved == LAYERS
    assert told.after == pytest.approx(slowest["balanced"] / total)
    shares = ", ".join(f"{name} {100 * work / total:.1f} %" for name, work in slowest.items())
    apart = np.abs(balanced["logits"] - plain["logits"]).max()
    print(f"\n{profile}: the slowest rank's share of what the backend counts: {shares}; logits within {apart:.1e}")


def _balanced_twice(rank: int, world_size: int, case: Case) -> tuple[Any, ...]:
    run = run_config(case, TAILED)
    engine = build(case, VOCABULARY, run)
    fresh = str(balance_heads(engine))
    with_spans(engine, tail("late"))
    first, second = balance_heads(engine), balance_heads(engine)
    check_replicas(engine)
    return fresh, engine.network.placements, first, second


def test_stages_and_replicas_agree_and_what_is_balanced_stays(pools: WorkerPools) -> None:
    found = pools(4).run(_balanced_twice, Case(2, 1, 1, 2, "adam", "float32", "deepspeed", pipeline=2))
    assert all(rank == found[0] for rank in found)
    fresh, placements, first, second = found[0]
    assert fresh == "0 layers moved, the slowest rank's share of attention 50.0 % → 50.0 % (even: 50.0 %)"
    assert len(placements) == LAYERS and first.after < first.before
    assert second.before == second.after == first.after and second.moved == 0
