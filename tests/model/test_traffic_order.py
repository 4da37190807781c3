"""The order of gradients against autograd's own."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.network import Network
from megatron_allattn.model.traffic_order import gradient_order
from megatron_allattn.parallel.groups import ALONE

VOCABULARY = 101
MODEL = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, persistent_memory_size=12, span_ramp=8)
FEEDS = {"persistent_memory_size": 0, "feed_forward_size": 16}
ADAPTIVE = {"adaptive_cutoffs": "20,50", "adaptive_div_value": 2}
MODELS = [
    MODEL,
    replace(MODEL, persistent_memory_size=0),
    replace(MODEL, adaptive_span=False),
    replace(MODEL, untie_embeddings_and_output_weights=False),
    replace(MODEL, **ADAPTIVE),
    replace(MODEL, **ADAPTIVE, untie_embeddings_and_output_weights=False),
    *(replace(MODEL, variant=variant) for variant in ("attn-split", "head-split", "single-head")),
    *(replace(MODEL, variant=variant, **FEEDS) for variant in ("ff-attn", "transformer")),
]


@pytest.mark.parametrize("backend", ["eager", "blocked"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.variant)
def test_order_of_gradients(model: ModelConfig, backend: str) -> None:
    attend = {"eager": eager.attend, "blocked": Blocked(None)}[backend]
    network = Network(model, VOCABULARY, ALONE, FusedOps("torch"), attend)
    names, order = {}, []
    for logical, parameter in network.logical_parameters():
        names[parameter] = logical.name
        nn.init.normal_(parameter, std=0.1)
        parameter.register_post_accumulate_grad_hook(lambda done: order.append(names[done]))
    slot = CacheSlot(range(3), 2, model.hidden_size, torch.float32, torch.device("cpu"))
    windows = (model.max_attention_span,) * 3
    tokens = torch.arange(2 * 60).view(2, 60) % VOCABULARY
    network(tokens, BlockContext(windows, slot, None), tokens).mean().backward()
    predicted = [names[one] for one in gradient_order(network, eager=backend == "eager")]
    assert sorted(order) == sorted(predicted) == sorted(names.values())
    assert list(map(_of_one_node, order)) == list(map(_of_one_node, predicted))


def _of_one_node(name: str) -> str:
    """The cross-entropy of an adaptive output has more parameters than autograd keeps in their order."""
    adaptive = name.startswith("output.cluster") and not name.endswith("projection")
    return "some of the output" if adaptive else name
