"""Continuations: each token given all before it, whatever the blocks, the number of samples and the layout."""

from functools import cache
from itertools import islice

import pytest
import torch
from torch import Tensor

from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.inference import decoding
from megatron_allattn.inference.decoding import continuations, read_prompts
from megatron_allattn.inference.reader import Reader
from megatron_allattn.inference.sampling import Sampler, Sampling, greedy
from megatron_allattn.kernels import eager
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE, Group
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of
from tests.support.variants import build, model_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
COUNT = 30
TWO = [(0, 0), (0, 1)]  # samples
SAMPLING = Sampling(temperature=0.8, top_k=9, top_p=0.95)


@cache
def network_of(group: Group = ALONE) -> Network:
    return build(model_of("all-attn", max_attention_span=12), group)


def reader_of(network: Network) -> Reader:
    return Reader(network, find_spans(network, local_spans(network)), 1)


def written(choose, num_samples: int = 1, network: Network | None = None) -> list[list[int]]:
    """The tokens of every sample."""
    reader, log_probs = read_prompts(lambda: reader_of(network or network_of()), [PROMPT], [num_samples])
    steps = continuations(reader, log_probs, choose)
    return [list(sample) for sample in zip(*islice(steps, COUNT), strict=True)]


def log_probs_after(tokens: list[int]) -> Tensor:
    """In one pass over all tokens, through the eager backend over hidden states; [1, V]."""
    network = network_of()
    reader = Reader(network, find_spans(network, local_spans(network)), 1, eager.attend)
    return reader(torch.tensor([tokens]), last_only=True)[:, 0]


def test_the_likeliest_token_given_all_before_it() -> None:
    [found] = written(greedy)
    for number in range(COUNT):
        assert found[number] == log_probs_after(PROMPT + found[:number]).argmax().item()


def test_every_choice_is_made_from_what_the_model_says() -> None:
    seen = []

    def choose(log_probs: Tensor) -> Tensor:
        seen.append(log_probs)
        return torch.tensor([len(seen) % 13])

    [found] = written(choose)
    assert len(seen) == COUNT  # and not one more than is asked for
    for number in range(COUNT):
        torch.testing.assert_close(seen[number], log_probs_after(PROMPT + found[:number]), rtol=0, atol=1e-12)


def test_a_sample_does_not_depend_on_the_others() -> None:
    one, three = written(Sampler(SAMPLING, 4)), written(Sampler(SAMPLING, 4, [(0, 0), (0, 1), (0, 2)]), 3)
    assert three[0] == one[0]
    assert len(set(map(tuple, three))) == 3
    for sample in three:  # each was drawn given its own tokens
        for number in (1, COUNT - 1):
            draw = log_probs_after(PROMPT + sample[:number]).topk(9).indices[0].tolist()
            assert sample[number] in draw


@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_prompt_is_read_in_blocks_of_any_length(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = written(greedy)
    monkeypatch.setattr(decoding, "PROMPT_BLOCK", size)
    assert written(greedy) == expected


def _written(rank: int, world_size: int, sampled: bool) -> list[list[int]]:
    choose = Sampler(SAMPLING, 4, TWO) if sampled else greedy
    return written(choose, 2, network_of(groups_of(world_size, 1).tensor))


@pytest.mark.parametrize("sampled", [False, True])
def test_ranks_that_share_the_heads_write_the_same(pools: WorkerPools, sampled: bool) -> None:
    expected = written(Sampler(SAMPLING, 4, TWO) if sampled else greedy, 2)
    assert pools(2).run(_written, sampled) == [expected] * 2
    assert pools(4).run(_written, sampled) == [expected] * 4


def test_nothing_to_continue() -> None:
    with pytest.raises(AssertionError, match="something to continue"):
        read_prompts(lambda: reader_of(network_of()), [PROMPT, []], [1, 1])
