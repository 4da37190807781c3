"""Networks of every kind through kept keys and values, against the eager backend over hidden states."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig, UsageError
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.inference.reader import Reader, named_attend
from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.compiled import load_library
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of
from tests.support.variants import VARIANTS, VOCABULARY, build, model_of

BLOCKS = (9, 1, 1, 30, 1, 2, *(1,) * 6)
CASES = {
    "plain": {},
    "window": {"span_normalization": "window"},
    "masked, position values": {"empty_cache": "mask", "position_values": "shared"},
    "window, masked, position values": {
        "span_normalization": "window",
        "empty_cache": "mask",
        "position_values": "shared",
    },
    "fixed span": {"adaptive_span": False, "empty_cache": "mask"},
}


def config_of(variant: str, case: str) -> ModelConfig:
    return model_of(variant, max_attention_span=24, **CASES[case])


@cache
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, sum(BLOCKS)), generator=torch.Generator().manual_seed(1))


def read(network: Network, attend=None, targets: bool = False) -> Tensor:
    """Log-probabilities of all blocks [B, T, V], or nats of the tokens themselves [B, T]."""
    reader = Reader(network, find_spans(network, local_spans(network)), 2, attend)
    blocks = tokens().split(list(BLOCKS), dim=1)
    return torch.cat([reader(block, block if targets else None) for block in blocks], dim=1)


@cache
def truth(variant: str, case: str) -> Tensor:
    return read(build(config_of(variant, case), ALONE), eager.attend)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_that_of_training(variant: str, case: str) -> None:
    network = build(config_of(variant, case), ALONE)
    torch.testing.assert_close(read(network), truth(variant, case), rtol=0, atol=1e-12)
    network.fold_scales()
    torch.testing.assert_close(read(network), truth(variant, case), rtol=0, atol=1e-12)


def _read_shard(rank: int, world_size: int, variant: str, case: str) -> Tensor:
    return read(build(config_of(variant, case), groups_of(world_size, 1).tensor))


@pytest.mark.parametrize("case", ["plain", "window, masked, position values"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_over_two_ranks(pools: WorkerPools, variant: str, case: str) -> None:
    for found in pools(2).run(_read_shard, variant, case):
        torch.testing.assert_close(found, truth(variant, case), rtol=0, atol=1e-12)


def test_the_last_position_and_targets() -> None:
    network, reference = build(config_of("all-attn", "plain"), ALONE), truth("all-attn", "plain")
    nats = read(network, targets=True)
    torch.testing.assert_close(nats, -reference.gather(2, tokens()[..., None])[..., 0], rtol=0, atol=1e-12)
    reader, end = Reader(network, find_spans(network, local_spans(network)), 2), 0
    for block in tokens().split(list(BLOCKS), dim=1):
        end += block.shape[1]
        last = reader(block, last_only=True)
        torch.testing.assert_close(last, reference[:, end - 1 : end], rtol=0, atol=1e-12)


@pytest.mark.parametrize("attend", [None, eager.attend, Blocked(*load_library())], ids=["cached", "eager", "blocked"])
def test_a_trained_network_is_read_without_dropout_and_without_gradient(attend) -> None:
    network = build(model_of("all-attn", attention_dropout=0.5, embedding_dropout=0.5), ALONE)
    one, two = read(network, attend), read(network, attend)
    assert torch.equal(one, two) and not one.requires_grad


def test_streams_are_repeated() -> None:
    network = build(config_of("all-attn", "plain"), ALONE)
    reader = Reader(network, find_spans(network, local_spans(network)), 2)
    ends = [sum(BLOCKS[:number]) for number in range(len(BLOCKS) + 1)]
    for number, (start, stop) in enumerate(pairwise(ends)):
        if number == 3:
            reader.repeat(2)
        block = tokens()[:, start:stop]
        expected = truth("all-attn", "plain")[:, start:stop]
        if number >= 3:
            block, expected = (one.repeat_interleave(2, dim=0) for one in (block, expected))
        torch.testing.assert_close(reader(block), expected, rtol=0, atol=1e-12)


def test_backends_by_name() -> None:
    model = config_of("all-attn", "plain")
    assert named_attend("cached", model, torch.device("cpu"), torch.float32) is None
    assert named_attend("eager", model, torch.device("cpu"), torch.float32) is eager.attend
    for name, rule in (("fast", "known are .*"), ("triton", "it runs on NVIDIA GPUs, not on cpu")):
        with pytest.raises(UsageError, match=f"^--attention-backend {name}: {rule}; choose cached or eager$"):
            named_attend(name, model, torch.device("cpu"), torch.float32)
