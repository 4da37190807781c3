"""The formula for parameters against networks worked out by hand; the networks themselves are in tests/model."""

from typing import Any

import pytest

from megatron_allattn.config import ModelConfig
from megatron_allattn.config.parameters import count_parameters

# One layer of d = 8 with two heads of 4, N = 6, L = 5; a vocabulary of 10.
# Projections 4 · 8², norm 2 · 8, two spans, vectors 2 · 6 · 8; positions 4 · 5; embedding 80; output 80 + 10
LAYER, SPANS, VECTORS, POSITIONS, VOCABULARY = 256 + 16, 2, 96, 20, 170


def count(vocab_size: int = 10, **settings: Any) -> tuple[int, int]:
    base = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "persistent_memory_size": 6}
    found = count_parameters(ModelConfig(**(base | {"max_attention_span": 5} | settings)), vocab_size)
    return found.total, found.persistent


@pytest.mark.parametrize("variant", ["all-attn", "attn-split", "single-head"])
def test_variants_of_equal_size(variant: str) -> None:
    assert count(variant=variant) == (LAYER + SPANS + VECTORS + POSITIONS + VOCABULARY, VECTORS)
    assert count(variant=variant, num_layers=3) == (3 * (LAYER + SPANS + VECTORS) + POSITIONS + VOCABULARY, 3 * VECTORS)


def test_a_fixed_span_has_no_parameter() -> None:
    assert count(adaptive_span=False) == (LAYER + VECTORS + POSITIONS + VOCABULARY, VECTORS)
    assert count(persistent_memory_size=0) == (LAYER + SPANS + POSITIONS + VOCABULARY, 0)


def test_half_of_the_heads() -> None:
    """The one head of the context has 4 rows of W_k and W_v, the other one all of the 6 vectors that remain."""
    assert count(variant="head-split") == (LAYER - 64 + 1 + VECTORS // 2 + POSITIONS + VOCABULARY, VECTORS // 2)


def test_feed_forward_sublayers() -> None:
    """A second norm; the ReLU one has biases of 12 and 8."""
    without = {"persistent_memory_size": 0, "feed_forward_size": 12}
    rest = LAYER + SPANS + POSITIONS + VOCABULARY + 16 + 2 * 12 * 8
    assert count(variant="transformer", **without) == (rest + 12 + 8, 0)
    assert count(variant="ff-attn", **without) == (rest, 2 * 12 * 8)


def test_vocabularies() -> None:
    """Clusters of 3, 4 and 3 words of widths 8, 4 and 2: 46 numbers in vectors, 8 · 14 in projections, 2 · 9 for the
    clusters, 10 biases.
    """
    rest = LAYER + SPANS + VECTORS + POSITIONS
    assert count(untie_embeddings_and_output_weights=False)[0] == rest + 80 + 10
    adaptive = {"adaptive_cutoffs": "3,7", "adaptive_div_value": 2}
    assert count(**adaptive)[0] == rest + 2 * (46 + 112) + 18 + 10
    assert count(**adaptive, untie_embeddings_and_output_weights=False)[0] == rest + 46 + 112 + 18 + 10
