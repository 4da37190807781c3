"""Every recipe's network exists and has the parameters that the configuration's formula says, here without memory."""

from typing import Any

import pytest
import torch

from megatron_allattn.config import RECIPES, ModelConfig
from megatron_allattn.config.parameters import Parameters, count_parameters
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model import accounting
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE


def built(model: ModelConfig, vocab_size: int) -> Parameters:
    with torch.device("meta"):
        found = accounting.count_parameters(Network(model, vocab_size, ALONE, FusedOps("torch")))
    return Parameters(total=found.total, persistent=found.persistent)


@pytest.mark.parametrize("name", RECIPES)
def test_networks_of_recipes(name: str) -> None:
    recipe = RECIPES[name]
    assert built(recipe().model, recipe.vocab_size) == recipe.parameters


@pytest.mark.parametrize("variant", ["all-attn", "attn-split", "head-split", "single-head", "ff-attn", "transformer"])
@pytest.mark.parametrize("adaptive", [{}, {"adaptive_cutoffs": "5,9,30", "adaptive_div_value": 3}], ids=["plain", "ad"])
@pytest.mark.parametrize("untied", [True, False], ids=["untied", "tied"])
def test_every_variant_and_vocabulary(variant: Any, adaptive: Any, untied: bool) -> None:
    """Sizes that have no common factor, so that no two terms of the formula can stand for each other."""
    inner = {"persistent_memory_size": 0, "feed_forward_size": 11} if variant in ("ff-attn", "transformer") else {}
    for adaptive_span in (True, False):
        model = ModelConfig(
            variant=variant,
            num_layers=3,
            hidden_size=42,
            num_attention_heads=6,
            max_attention_span=13,
            adaptive_span=adaptive_span,
            untie_embeddings_and_output_weights=untied,
            **({"persistent_memory_size": 17} | inner | adaptive),
        )
        assert built(model, 37) == count_parameters(model, 37)
