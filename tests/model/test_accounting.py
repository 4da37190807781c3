"""Parameters and memory, by hand."""

from dataclasses import replace

import pytest
import torch

from megatron_allattn.config import ModelConfig
from megatron_allattn.config.recipes import RECIPES
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.accounting import cache_bytes, count_by_part, count_parameters, state_bytes
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE, Group

CONFIG = ModelConfig(
    num_layers=3, hidden_size=8, num_attention_heads=2, persistent_memory_size=5, max_attention_span=7, span_ramp=2
)


def count(config: ModelConfig, vocab_size: int, group: Group = ALONE):
    with torch.device("meta"):
        return count_parameters(Network(config, vocab_size, group, FusedOps("torch")))


def test_parameters_by_hand() -> None:
    found = count(CONFIG, 11)
    persistent = 3 * 2 * (2 * 5 * 4)  # layers · (keys and values) · heads · N · head size
    layer = 4 * 8 * 8 + 2 + 2 * 8  # projections, spans, norm
    assert found.persistent == persistent == 240
    assert found.total == 11 * 8 + 4 * 7 + 3 * layer + persistent + 11 * 8 + 11
    assert found.local == found.total


def test_a_shard_counts_its_own_and_the_logical_total() -> None:
    found = count(CONFIG, 11, Group(ranks=(0, 1), rank=0, handle=None))
    layer = 4 * 8 * 8 // 2 + 1 + 2 * 8 + 2 * 5 * 4
    assert found.total == count(CONFIG, 11).total
    assert found.local == 6 * 8 + 4 * 7 + 3 * layer + 6 * 8 + 6  # 11 rows are 6 + 5 and one of padding


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_parts_of_an_adaptive_vocabulary_by_hand(tied: bool) -> None:
    """11 words cut into 3, 4 and 4, of widths 8, 4 and 2; one rank of two holds 2, 2 and 2 of them and one tail."""
    model = replace(CONFIG, adaptive_cutoffs="3,7", adaptive_div_value=2, untie_embeddings_and_output_weights=not tied)
    with torch.device("meta"):
        parts = count_by_part(Network(model, 11, Group((0, 1), 0, None), FusedOps("torch")))
    tables, shards = [(3 * 8, 8 * 8), (4 * 4, 8 * 4), (4 * 2, 8 * 2)], [2 * 8, 2 * 4, 2 * 2]
    for k, ((words, projection), shard) in enumerate(zip(tables, shards, strict=True)):
        found, bias = parts[f"embedding.cluster{k}"], parts[f"output.cluster{k}"]
        assert (found.total, found.local) == (words + projection, shard + projection)
        own = 0 if tied else words + projection
        assert (bias.total, bias.local) == (own + (3, 4, 4)[k], (0 if tied else shard + projection) + 2)
    assert (parts["output.cluster_logits"].total, parts["output.cluster_logits"].local) == (2 * 9, 9)
    assert (parts["position"].total, parts["layers"].persistent) == (4 * 7, 240)
    with torch.device("meta"):
        whole = count_parameters(Network(model, 11, ALONE, FusedOps("torch")))
    assert sum(part.total for part in parts.values()) == whole.total


@pytest.mark.parametrize(("recipe", "vocab_size", "millions"), [
    ("enwik8-small", 205, 39), ("enwik8-large", 205, 114), ("text8-small", 27, 38), ("text8-large", 27, 114),
])  # fmt: skip
def test_recipes_have_the_papers_parameter_counts(recipe: str, vocab_size: int, millions: int) -> None:
    found = count(RECIPES[recipe]().model, vocab_size).total
    assert round(found / 1e6) == millions


@pytest.mark.parametrize(
    ("stage", "data_size", "half", "moments", "expected"),
    [
        (0, 1, False, 1, 4 + 4 + 4),
        (0, 4, False, 2, 4 + 4 + 8),
        (1, 4, False, 2, 4 + 4 + 2),
        (2, 4, False, 2, 4 + 1 + 2),
        (3, 4, False, 2, 1 + 1 + 2),
        (0, 1, True, 2, 2 + 2 + 12),  # the 16 bytes per parameter of mixed-precision Adam
        (1, 4, True, 2, 2 + 2 + 3),
        (3, 4, True, 2, 0.5 + 0.5 + 3),
    ],
)
def test_bytes_per_parameter(stage: int, data_size: int, half: bool, moments: int, expected: float) -> None:
    found = state_bytes(1000, zero_stage=stage, data_size=data_size, half=half, moments=moments)
    assert found == int(1000 * expected)


def test_bytes_of_caches() -> None:
    assert cache_bytes([128, 64], streams=3, hidden_size=10, element_bytes=2) == (128 + 64) * 3 * 10 * 2
