"""What a converted checkpoint computes, from the files as they were written and by none of the code that reads them."""

import json
import re
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.network import Network
from megatron_allattn.model.partition import Part
from megatron_allattn.parallel.groups import ALONE
from tests.support.dense import dense_network
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of

_OF_THE_PAPERS_CODE = {
    r"key_pe": "position.key",
    r"in_emb\.weight": "embedding.weight",
    r"out_emb\.(weight|bias)": r"output.\1",
    r"layers\.(\d+)\.attn\.proj_val\.weight": r"layers.\1.value.weight",
    r"layers\.(\d+)\.attn\.proj_(query|key|out)\.weight": r"layers.\1.\2.weight",
    r"layers\.(\d+)\.attn\.attn\.persistent_memory\.key": r"layers.\1.persistent.key",
    r"layers\.(\d+)\.attn\.attn\.persistent_memory\.val": r"layers.\1.persistent.value",
    r"layers\.(\d+)\.attn\.attn\.adaptive_span\._mask\.current_val": r"layers.\1.span",
    r"layers\.(\d+)\.(norm1)\.(weight|bias)": r"layers.\1.\2.\3",
}


def nats(weights: dict[str, Tensor], model: ModelConfig, tokens: Tensor) -> Tensor:
    """Of tokens[1:], [T − 1], in float64, by the equations."""
    return dense_network(weights, model, tokens)[0]


def written_nats(name: str, out: Path, model: ModelConfig, tokens: Tensor, pools: WorkerPools) -> Tensor:
    """The same of the file or folder `out` of a format."""
    if name == "safetensors":
        return nats(safetensors.torch.load_file(out), model, tokens)
    if name == "adaptive-span":
        return nats(_of_the_papers_code(out), model, tokens)
    if name == "deepspeed-universal":
        return _of_universal(out / (out / "latest_universal").read_text() / "zero", model, tokens)
    if name == "huggingface":
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).double().eval()
        with torch.no_grad():
            return _chosen(theirs(tokens[None, :-1]).logits.log_softmax(-1), tokens)
    assert name == "shards"
    layout = json.loads((out / "layout.json").read_text())
    ranks, stages = (layout[f"{which}_model_parallel_size"] for which in ("tensor", "pipeline"))
    found = pools(ranks).run(_of_shards, str(out), stages, model, tokens.tolist())
    assert all(one == found[0] for one in found)
    return torch.tensor(found[0], dtype=torch.float64)


def _chosen(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    return -log_probabilities[0].gather(1, tokens[1:, None])[:, 0]


def _of_the_papers_code(out: Path) -> dict[str, Tensor]:
    found = {}
    for key, tensor in torch.load(out, weights_only=True)["model"].items():
        for pattern, name in _OF_THE_PAPERS_CODE.items():
            if match := re.fullmatch(rf"(?:module\.)?{pattern}", key):
                found[match.expand(name)] = tensor
    return found


def _context(network: Network) -> BlockContext:
    """Over whole windows, which changes no value where every head's span is its own."""
    model = network.config
    slot = CacheSlot(network.part.layers, 1, model.hidden_size, torch.float64, torch.device("cpu"))
    return BlockContext((model.max_attention_span,) * model.num_layers, slot, dropout_keys=None)


def _of_universal(zero: Path, model: ModelConfig, tokens: Tensor) -> Tensor:
    """Parameters by the names of their folders, as DeepSpeed finds them."""
    vocab_size = torch.load(zero / "output.bias/fp32.pt")["param"].numel()
    network = Network(model, vocab_size, ALONE, FusedOps("torch")).double().requires_grad_(False)
    network.load_state_dict({path.parent.name: torch.load(path)["param"] for path in zero.glob("*/fp32.pt")})
    return _chosen(network(tokens[None, :-1], _context(network)), tokens)


def _of_shards(rank: int, world_size: int, out: str, stages: int, model: ModelConfig, tokens: list[int]) -> list[float]:
    """One tensor-parallel rank, whose stages run one after the other, each with its own file and nothing else."""
    group, ids = groups_of(world_size, 1).tensor, torch.tensor(tokens)
    vocab_size = json.loads((Path(out) / "layout.json").read_text())["description"]["vocab_size"]
    hidden: Any = None
    for stage in range(stages):
        folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
        own = safetensors.torch.load_file(Path(out) / folder / "model.safetensors")
        layers = sorted({int(name.split(".")[1]) for name in own if name.startswith("layers.")})
        part = Part(range(layers[0], layers[-1] + 1), model.num_layers)
        network = Network(model, vocab_size, group, FusedOps("torch"), part=part).double().requires_grad_(False)
        parameters = {logical.name: parameter for logical, parameter in network.logical_parameters()}
        assert {name: tuple(one.shape) for name, one in parameters.items()} == {
            name: tuple(one.shape) for name, one in own.items()
        }
        for name, parameter in parameters.items():
            parameter.copy_(own[name])
        context = _context(network)
        hidden = network.run_layers(network.embed(ids[None, :-1], context) if stage == 0 else hidden, context)
    found: list[float] = network.read_out(hidden, context, ids[None, 1:])[0].tolist()
    return found
