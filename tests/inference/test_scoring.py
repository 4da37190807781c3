"""Every token scored once, with its full context: against one dense pass over the whole text, at any batch and layout.

(Public reports B10: the cache holds the last hidden states in order; B11: positions shifted by the cache; B43: the
value must not change with the evaluation's batch size, and no token may be dropped in silence.)
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from megatron_allattn.config import ModelConfig, UsageError
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.inference.scoring import Score, Stream, code_protocol, cut_streams, score
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.initialization import initialize, load_logical
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE, Groups, single_process_groups
from tests.support.dense import dense_network, reach_of
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of

VOCABULARY, LENGTH = 29, 10_007
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    persistent_memory_size=6,
    max_attention_span=150,
    span_ramp=16,
)
SPANS = ((0.05, 0.31), (0.0, 0.02))  # windows of 86 and 22
REACH = 86 + 22
CPU = torch.device("cpu")


@cache
def text(length: int = LENGTH) -> np.ndarray:
    """Skewed tokens with some order in them."""
    generator = np.random.default_rng(7)
    rare = generator.choice(VOCABULARY, size=length, p=np.arange(1, VOCABULARY + 1) / 435)
    return np.where(generator.random(length) < 0.5, np.arange(length) % VOCABULARY, rare).astype(np.uint16)


@cache
def weights(model: ModelConfig = MODEL) -> dict[str, torch.Tensor]:
    """Weights far from the start: the context matters at every distance."""
    network = Network(model, VOCABULARY, single_process_groups().tensor, FusedOps("torch")).double()
    initialize(network, 11)
    found = {logical.name: 1.5 * parameter.detach() for logical, parameter in network.logical_parameters()}
    for layer, z in enumerate(SPANS if model.adaptive_span else ()):
        found[f"layers.{layer}.span"] = torch.tensor(z, dtype=torch.float64).reshape(2, 1, 1)
    return found


def network_of(groups: Groups, model: ModelConfig = MODEL, dtype: torch.dtype = torch.float64) -> Network:
    network = Network(model, VOCABULARY, groups.tensor, FusedOps("torch")).to(dtype)
    load_logical(network, weights(model))
    return network


@cache
def dense(model: ModelConfig = MODEL, length: int = LENGTH) -> np.ndarray:
    tokens = torch.from_numpy(text(length).astype(np.int64))
    return dense_network(weights(model), model, tokens)[0].numpy()


def scored(
    rank: int,
    world_size: int,
    tensor: int,
    num_streams: int,
    block_length: int,
    dtype: torch.dtype = torch.float64,
    overlap: bool = True,
    keep_nats: bool = True,
) -> Score:
    groups = groups_of(tensor, world_size // tensor) if world_size > 1 else single_process_groups()
    return score(
        network_of(groups, dtype=dtype),
        groups,
        text(),
        num_streams=num_streams,
        block_length=block_length,
        device=CPU,
        overlap=overlap,
        keep_nats=keep_nats,
    )


def check_exact(found: Score, tolerance: float = 1e-12) -> None:
    """Every prediction once, as in one dense pass; and the sums are those of the predictions."""
    expected, targets = dense(), text()[1:]
    assert found.nats is not None
    np.testing.assert_allclose(found.nats, expected, rtol=0, atol=tolerance)
    assert found.predictions == LENGTH - 1
    assert found.mean_nats == pytest.approx(expected.mean(), abs=1e-6, rel=0)
    np.testing.assert_array_equal(found.count_by_id, np.bincount(targets, minlength=VOCABULARY))
    np.testing.assert_allclose(found.nats_by_id, np.bincount(targets, expected, VOCABULARY), atol=LENGTH * tolerance)
    assert (found.lost_context, found.overlap) == (0, REACH)


def test_the_reach_is_the_sum_of_the_windows() -> None:
    assert [reach_of(weights(), MODEL, layer) for layer in range(2)] == [86, 22]


@pytest.mark.parametrize(("streams", "block"), [(1, 64), (4, 64), (16, 64), (16, 8), (3, 37), (5, 700)])
def test_every_token_as_in_one_pass(streams: int, block: int) -> None:
    check_exact(scored(0, 1, 1, streams, block))


@pytest.mark.parametrize(("tensor", "size", "streams"), [(1, 2, 16), (1, 2, 5), (2, 2, 4), (1, 4, 3), (2, 4, 7)])
def test_every_token_at_any_layout(pools: WorkerPools, tensor: int, size: int, streams: int) -> None:
    """Streams do not divide by the data ranks, and there may be fewer streams than ranks."""
    for found in pools(size).run(scored, tensor, streams, 64):
        check_exact(found)


@pytest.mark.parametrize(("streams", "block"), [(1, 64), (4, 37), (16, 8)])
def test_single_precision_keeps_the_value(streams: int, block: int) -> None:
    check_exact(scored(0, 1, 1, streams, block, torch.float32), tolerance=1e-4)


def test_half_precision_is_near() -> None:
    found = scored(0, 1, 1, 16, 64, torch.bfloat16)
    assert found.predictions == LENGTH - 1
    assert 1e-7 < abs(found.mean_nats / dense().mean() - 1) < 0.02


@pytest.mark.parametrize("empty_cache", ["attend", "mask"])
def test_without_overlap_context_is_lost_and_counted(empty_cache: str) -> None:
    """With a fixed span the reach is exact: a prediction has lost context if and only if it has another value."""
    model = replace(MODEL, adaptive_span=False, max_attention_span=20, empty_cache=empty_cache)
    groups, exact = single_process_groups(), dense(model, 1000)
    found = score(
        network_of(groups, model),
        groups,
        text(1000),
        num_streams=4,
        block_length=64,
        device=CPU,
        overlap=False,
        keep_nats=True,
    )
    assert found.nats is not None
    starts = [999 * index // 4 for index in range(1, 4)]  # the first stream starts where the split does
    expected = [position for start in starts for position in range(start, start + 40)]
    assert np.flatnonzero(np.abs(found.nats - exact) > 1e-12).tolist() == expected
    assert (found.predictions, found.lost_context, found.overlap) == (999, 120, 40)


def test_lost_context_is_counted_in_streams_shorter_than_the_reach() -> None:
    streams = cut_streams(100, 10, overlap=0)
    assert [stream.lost_context(40) for stream in streams] == [0] + [10] * 9
    assert [stream.lost_context(40) for stream in cut_streams(100, 10, overlap=40)] == [0] * 10
    assert [stream.lost_context(40) for stream in cut_streams(100, 10, overlap=35)] == [0] * 4 + [5] * 6


@pytest.mark.parametrize(
    "changes",
    [
        {"empty_cache": "mask"},
        {"span_normalization": "window"},
        {"span_normalization": "window", "empty_cache": "mask"},
        {"adaptive_span": False, "max_attention_span": 40},
        {"persistent_memory_size": 0, "variant": "transformer", "feed_forward_size": 24},
        {"persistent_memory_size": 0, "adaptive_span": False, "max_attention_span": 7, "empty_cache": "mask"},
    ],
    ids=lambda changes: ", ".join(changes),
)
@pytest.mark.parametrize(("streams", "block"), [(1, 100), (6, 17)])
def test_other_networks(changes: dict, streams: int, block: int) -> None:
    """Also with more streams than the overlap leaves room for: it is capped at the start of the split."""
    model, groups = replace(MODEL, **changes), single_process_groups()
    found = score(
        network_of(groups, model),
        groups,
        text(400),
        num_streams=streams,
        block_length=block,
        device=CPU,
        keep_nats=True,
    )
    np.testing.assert_allclose(found.nats, dense(model, 400), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"variant": "attn-split"},
        {"variant": "head-split"},
        {"variant": "single-head"},
        {"variant": "ff-attn", "persistent_memory_size": 0, "feed_forward_size": 24},
        {"adaptive_cutoffs": "9,20", "adaptive_div_value": 2},
        {"adaptive_cutoffs": "9,20", "adaptive_div_value": 2, "untie_embeddings_and_output_weights": False},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_every_kind_of_network_is_scored_alike_in_streams(changes: dict) -> None:
    """Against itself in one stream; what each computes is tested where it is defined."""
    network, groups = Network(replace(MODEL, **changes), VOCABULARY, ALONE, FusedOps("torch")), single_process_groups()
    initialize(network.double(), 3)
    one, six = (
        score(network, groups, text(600), num_streams=streams, block_length=block, device=CPU, keep_nats=True)
        for streams, block in ((1, 64), (6, 23))
    )
    assert one.nats is not None and six.nats is not None
    np.testing.assert_allclose(six.nats, one.nats, rtol=0, atol=1e-12)
    assert np.ptp(one.nats) > 0.1


@pytest.mark.parametrize("length", [2, 3, 9])
def test_short_splits(length: int) -> None:
    groups = single_process_groups()
    found = score(network_of(groups), groups, text(length), num_streams=16, block_length=64, device=CPU, keep_nats=True)
    np.testing.assert_allclose(found.nats, dense(length=length), rtol=0, atol=1e-12)
    assert found.num_streams == found.predictions == length - 1


@pytest.mark.parametrize("length", [0, 1])
def test_nothing_to_predict(length: int) -> None:
    groups = single_process_groups()
    with pytest.raises(UsageError, match=rf"split of {length} token\(s\): nothing to predict"):
        score(network_of(groups), groups, text(length), num_streams=1, block_length=8, device=CPU)


def test_progress_counts_blocks() -> None:
    groups, seen = single_process_groups(), []
    score(
        network_of(groups),
        groups,
        text(400),
        num_streams=2,
        block_length=100,
        device=CPU,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]  # 200 predictions and an overlap of 108


def test_streams_cover_the_predictions_once() -> None:
    for count, streams, overlap in ((10, 3, 4), (10, 10, 100), (3, 8, 0), (1, 1, 5), (1000, 7, 64)):
        cut = cut_streams(count, streams, overlap)
        assert [position for stream in cut for position in range(stream.first, stream.stop)] == list(range(count))
        assert all(stream.first - stream.start == min(overlap, stream.first) for stream in cut)
    assert cut_streams(10, 2, 3) == [Stream(0, 0, 5), Stream(2, 5, 10)]


@pytest.mark.parametrize("span", [3, 5, 8])
def test_the_cache_holds_the_last_hidden_states_in_order(span: int) -> None:
    """Segments of 5, the last one of 2, over caches of 3, 5 and 8."""
    model, tokens = replace(MODEL, adaptive_span=False, max_attention_span=span), text(24)
    network = network_of(single_process_groups(), model)
    expected, states = dense_network(weights(model), model, torch.from_numpy(tokens.astype(np.int64)))
    slot = CacheSlot(range(model.num_layers), 1, model.hidden_size, torch.float64, CPU)
    nats = []
    for start in range(0, 22, 5):
        stop = min(start + 5, 22)
        both = torch.from_numpy(tokens[start : stop + 1].astype(np.int64))[None]
        context = BlockContext(windows=find_spans(network, local_spans(network)).windows, cache=slot, dropout_keys=None)
        nats.append(network(both[:, :-1], context, both[:, 1:]).detach())
        slot.commit(stop - start)
        for layer, state in enumerate(states):
            kept = slot.read(layer)
            torch.testing.assert_close(kept[0], state[max(0, stop - span) : stop], rtol=0, atol=1e-12)
            assert not kept.requires_grad
    torch.testing.assert_close(torch.cat(nats, dim=1)[0], expected[:22], rtol=0, atol=1e-12)


def protocol(rank: int, world_size: int, tensor: int, num_streams: int, block_length: int, length: int) -> tuple:
    groups = groups_of(tensor, world_size // tensor) if world_size > 1 else single_process_groups()
    found = code_protocol(
        network_of(groups), groups, text(length), num_streams=num_streams, block_length=block_length, device=CPU
    )
    return found.mean_nats, found.predictions, found.dropped


@pytest.mark.parametrize(
    ("length", "streams", "block", "blocks"), [(1281, 1, 32, 40), (1281, 8, 32, 4), (1288, 8, 32, 5), (1000, 3, 64, 5)]
)
def test_the_codes_protocol_is_that_of_separate_texts(length: int, streams: int, block: int, blocks: int) -> None:
    """Equal streams, each a text of its own; whole blocks with the token after them; the rest is dropped."""
    size = length // streams
    expected = []
    for stream in range(streams):
        own = torch.from_numpy(text(length)[stream * size : stream * size + blocks * block + 1].astype(np.int64))
        assert len(own) == blocks * block + 1 <= size
        assert stream * size + blocks * block + 1 + block > (stream + 1) * size  # another block does not fit
        expected.append(dense_network(weights(), MODEL, own)[0].numpy())
    mean, predictions, dropped = protocol(0, 1, 1, streams, block, length)
    assert mean == pytest.approx(np.mean(expected), rel=1e-12)
    assert (predictions, dropped) == (streams * block * blocks, length - 1 - streams * block * blocks)


@pytest.mark.parametrize(("tensor", "size"), [(1, 2), (2, 2), (1, 4)])
def test_the_codes_protocol_at_any_layout(pools: WorkerPools, tensor: int, size: int) -> None:
    expected = protocol(0, 1, 1, 3, 64, 1000)
    for found in pools(size).run(protocol, tensor, 3, 64, 1000):
        assert found == (pytest.approx(expected[0], rel=1e-12), *expected[1:])


def test_the_codes_protocol_needs_a_block() -> None:
    with pytest.raises(
        UsageError, match="split of 263 tokens: the paper's code needs 264 for a block of 32 in each of 8"
    ):
        protocol(0, 1, 1, 8, 32, 263)
