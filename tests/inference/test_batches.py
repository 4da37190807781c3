"""Prompts of unequal length side by side: each as alone, and as one pass without a cache over all its tokens says.

Of one token, of fewer than the caches hold, and of more; for every variant, normalization and rule for empty caches,
plain and adaptive vocabularies, on one rank and on several.
"""

from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.inference.decoding import continuations, read_prompts
from megatron_allattn.inference.reader import Reader
from megatron_allattn.inference.sampling import Choose, Sampler, Sampling, greedy
from megatron_allattn.kernels import eager
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.adaptive import AdaptiveOutput
from megatron_allattn.parallel.groups import ALONE, Group
from megatron_allattn.parallel.vocabulary import VocabularyParallelOutput
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of
from tests.support.variants import VARIANTS, VOCABULARY, build, model_of

SPAN, COUNT = 12, 50
PROMPTS = [[3], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [(7 * i * i + i) % VOCABULARY for i in range(40)]]
NUMBERS = [(0, 0), (1, 0), (2, 0)]
SAMPLING = Sampling(temperature=0.8, top_k=9, top_p=0.95)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"empty_cache": "mask"},
    "window, masked, position values": {
        "span_normalization": "window",
        "empty_cache": "mask",
        "position_values": "shared",
    },
    "fixed span, masked": {"adaptive_span": False, "empty_cache": "mask"},
    "adaptive vocabulary": {"adaptive_cutoffs": "3,7", "adaptive_div_value": 2},
}


def config_of(variant: str, case: str) -> ModelConfig:
    return model_of(variant, max_attention_span=SPAN, **CASES[case])


def written(network: Network, prompts: list[list[int]], choose: Choose, count: int = COUNT) -> list[list[int]]:
    """What follows each."""
    spans = find_spans(network, local_spans(network))
    reader, log_probs = read_prompts(lambda: Reader(network, spans, 1), prompts, [1] * len(prompts))
    assert log_probs.shape == (len(prompts), VOCABULARY)
    return [list(row) for row in zip(*islice(continuations(reader, log_probs, choose), count), strict=True)]


@cache
def network_of(variant: str = "all-attn", case: str = "plain") -> Network:
    return build(config_of(variant, case), ALONE)


def uncached(network: Network, tokens: list[int]) -> Tensor:
    """Log-probabilities [T, V] of the next token after every one, in one pass over all, through the eager backend."""
    reader = Reader(network, find_spans(network, local_spans(network)), 1, eager.attend)
    return reader(torch.tensor([tokens]))[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_is_what_a_pass_without_a_cache_says(variant: str, case: str) -> None:
    network, seen = network_of(variant, case), []

    def choose(log_probs: Tensor) -> Tensor:
        seen.append(log_probs)
        return greedy(log_probs)

    for row, (prompt, found) in enumerate(zip(PROMPTS, written(network, PROMPTS, choose), strict=True)):
        said = uncached(network, prompt + found)[len(prompt) - 1 : -1]
        assert found == said.argmax(dim=-1).tolist()
        torch.testing.assert_close(torch.stack(seen)[:, row], said, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["plain", "window, masked, position values"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_is_as_alone(case: str, sampled: bool, dtype: torch.dtype) -> None:
    network = build(config_of("all-attn", case), ALONE).to(dtype)

    def choose(*numbers: tuple[int, int]) -> Choose:
        return Sampler(SAMPLING, 4, numbers) if sampled else greedy

    alone = [written(network, [PROMPTS[prompt]], choose((prompt, sample)))[0] for prompt, sample in NUMBERS]
    assert written(network, PROMPTS, choose(*NUMBERS)) == alone
    assert written(network, PROMPTS[::-1], choose(*NUMBERS[::-1])) == alone[::-1]


def test_a_prompt_token_by_token_or_twice() -> None:
    """Read one token at a time it is the same prompt; read twice it is another one."""
    network, prompt = network_of(), PROMPTS[2]
    spans = find_spans(network, local_spans(network))
    reader = Reader(network, spans, 1)
    one_by_one = [reader(torch.tensor([[token]]))[0, 0] for token in prompt]
    torch.testing.assert_close(torch.stack(one_by_one), uncached(network, prompt), rtol=0, atol=1e-12)
    once = list(islice(continuations(reader, one_by_one[-1][None], greedy), COUNT))
    assert [token for [token] in once] == written(network, [prompt], greedy)[0]
    twice = uncached(network, [3, 3])[-1]
    assert not torch.allclose(twice, uncached(network, [3])[-1], atol=1e-3)


def test_copies_beside_other_prompts() -> None:
    network = network_of("all-attn", "masked")
    spans = find_spans(network, local_spans(network))
    reader, log_probs = read_prompts(lambda: Reader(network, spans, 1), PROMPTS, [2, 1, 3])
    found = list(zip(*islice(continuations(reader, log_probs, greedy), COUNT), strict=True))
    first, second, third = map(tuple, written(network, PROMPTS, greedy))
    assert found == [first, first, second, third, third, third]


def test_streams_of_unequal_length_take_no_blocks() -> None:
    network = network_of()
    spans = find_spans(network, local_spans(network))
    reader, _ = read_prompts(lambda: Reader(network, spans, 1), PROMPTS, [1, 1, 1])
    with pytest.raises(AssertionError, match="one token at a time"):
        reader(torch.zeros(3, 2, dtype=torch.int64))


def _written(rank: int, world_size: int, variant: str, case: str, sampled: bool) -> list[list[int]]:
    choose = Sampler(SAMPLING, 4, NUMBERS) if sampled else greedy
    return written(build(config_of(variant, case), groups_of(world_size, 1).tensor), PROMPTS, choose)


@pytest.mark.parametrize("case", ["window, masked, position values", "adaptive vocabulary"])
def test_ranks_that_share_the_heads_write_the_same(pools: WorkerPools, case: str) -> None:
    for sampled in (False, True):
        choose = Sampler(SAMPLING, 4, NUMBERS) if sampled else greedy
        expected = written(network_of("all-attn", case), PROMPTS, choose)
        assert pools(2).run(_written, "all-attn", case, sampled) == [expected] * 2


def _with_likely_padding(group: Group, case: str) -> Network:
    """A network whose padding rows, those that stand for no id, would be by far the likeliest if they counted."""
    network = build(config_of("all-attn", case), group)
    output = network.output
    assert output is not None
    tables = (
        [(output.bias, VOCABULARY)]
        if isinstance(output, VocabularyParallelOutput)
        else [(output.get_parameter(f"bias{k}"), size) for k, size in enumerate(output.clusters.sizes)]
        + [(output.cluster_bias, len(output.clusters) - 1)]
    )
    for bias, size in tables:
        own = len(bias)
        padding = [row for row in range(own) if group.rank * own + row >= size]
        bias.data[padding] = 1e4
    return network


def _written_beside_padding(rank: int, world_size: int, case: str) -> tuple[int, list[list[int]], list[list[int]]]:
    """How many padding rows this rank has, the greedy continuations, and those of uniform draws."""
    network = _with_likely_padding(groups_of(world_size, 1).tensor, case)
    padding = sum(int((parameter == 1e4).sum()) for parameter in network.parameters())
    uniform = Sampler(Sampling(temperature=1e9), 4, NUMBERS)
    return padding, written(network, PROMPTS, greedy, 10), written(network, PROMPTS, uniform, 100)


@pytest.mark.parametrize(
    ("case", "kind"), [("plain", VocabularyParallelOutput), ("adaptive vocabulary", AdaptiveOutput)]
)
def test_padding_of_the_vocabulary_is_never_drawn(pools: WorkerPools, case: str, kind: type) -> None:
    network = network_of("all-attn", case)
    assert isinstance(network.output, kind)
    likeliest = written(network, PROMPTS, greedy, 10)
    for size in (2, 4):
        results = pools(size).run(_written_beside_padding, case)
        assert sum(padding for padding, _, _ in results) > 0
        for _, found, drawn in results:
            assert found == likeliest
            assert {token for row in drawn for token in row} == set(range(VOCABULARY))
