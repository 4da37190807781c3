"""Layout-free randomness: the hash against Python integers, and that masks are as random as they should be."""

import math

import pytest
import torch

from megatron_allattn.parallel.random import (
    DropoutKeys,
    Site,
    column_keys,
    keep_mask,
    mix,
    mix_tensor,
    row_keys,
    tensor_generator,
)
from tests.support.slow_attention import (
    ATTENTION_SITE,
    EMBEDDING_SITE,
    FEED_FORWARD_SITE,
    REPRESENTATION_SITE,
    hash_bits,
    lowbias32,
)

# Published with the function: the values of lowbias32 at 0, 1, 2, 3
PUBLISHED = [0, 1753845952, 3507691905, 1408362973]


def unsigned(bits: torch.Tensor) -> list[int]:
    return [value & 0xFFFFFFFF for value in bits.flatten().tolist()]


def test_mix_has_the_published_values() -> None:
    assert [mix(value) for value in range(4)] == PUBLISHED
    assert [lowbias32(value) for value in range(4)] == PUBLISHED


def test_mix_of_a_tensor_equals_mix_of_its_numbers() -> None:
    edges = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x7FFF, -0x8000], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    some = torch.randint(-(2**31), 2**31 - 1, (500,), generator=generator).to(torch.int32)
    values = torch.cat([edges, some])
    before = values.clone()
    assert unsigned(mix_tensor(values)) == [lowbias32(value) for value in values.tolist()]
    assert torch.equal(values, before)


def test_column_keys() -> None:
    columns = [0, 1, 2, 8191, 2**31 - 1]
    assert unsigned(column_keys(torch.tensor(columns))) == [lowbias32(c * 0x9E3779B9 + 1) for c in columns]


@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1, 2**32, 2**63 - 1])
def test_the_bits_of_an_element_equal_the_documented_hash(seed: int) -> None:
    parts = torch.tensor([5, 2**31 - 1], dtype=torch.int32)
    rows = row_keys(seed, Site.EMBEDDING, 2**32 + 7, parts[:, None], torch.arange(3, dtype=torch.int32))
    assert rows.shape == (2, 3)
    expected = [
        [[hash_bits(seed, (EMBEDDING_SITE, 2**32 + 7, part, position), column) for column in range(4)]
         for position in range(3)]
        for part in parts.tolist()
    ]  # fmt: skip
    found = mix_tensor(rows[..., None] + column_keys(torch.arange(4)))
    assert unsigned(found) == torch.tensor(expected).flatten().tolist()


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.25, 0.5, 0.9])
def test_an_element_is_kept_when_its_bits_reach_the_probability(probability: float) -> None:
    rows, columns = row_keys(7, 1, torch.arange(50, dtype=torch.int32)), column_keys(torch.arange(40))
    expected = [[hash_bits(7, (1, r), c) / 2**32 >= probability for c in range(40)] for r in range(50)]
    assert keep_mask(rows[:, None], columns, probability).tolist() == expected


@pytest.mark.parametrize("probability", [0.02, 0.2, 0.5, 0.85])
def test_the_share_of_kept_elements(probability: float) -> None:
    rows, columns = row_keys(99, 1, torch.arange(1000, dtype=torch.int32)), column_keys(torch.arange(1000))
    kept = keep_mask(rows[:, None], columns, probability).double()
    deviation = math.sqrt(probability * (1 - probability) / kept.numel())
    assert abs(kept.mean().item() - (1 - probability)) < 4 * deviation
    # every row and every column has its own share: 1000 numbers whose spread is the binomial one
    for dim in (0, 1):
        spread = kept.mean(dim=dim).std().item() / math.sqrt(probability * (1 - probability) / 1000)
        assert 0.9 < spread < 1.1


def test_neighbours_are_independent() -> None:
    """Shifting any one identity by one gives a mask that agrees with the first as often as chance does."""
    keys = {"seed": 5, "step": 3, "layer": 2, "stream": 4, "head": 1, "query": 0, "column": 0}

    def mask(**change: int) -> torch.Tensor:
        at = {**keys, **change}
        streams = torch.arange(at["stream"], at["stream"] + 8, dtype=torch.int32)
        heads = torch.arange(at["head"], at["head"] + 4, dtype=torch.int32)
        queries = torch.arange(at["query"], at["query"] + 32, dtype=torch.int32)
        rows = DropoutKeys(at["seed"], at["step"], streams).attention_rows(at["layer"], heads, queries)
        columns = column_keys(torch.arange(at["column"], at["column"] + 64))
        return keep_mask(rows[..., None], columns, 0.5)

    first = mask()
    assert first.shape == (8, 4, 32, 64)
    deviation = 0.5 / math.sqrt(first.numel())
    for name, value in keys.items():
        for step in (1, 2, 64):
            agreement = (first == mask(**{name: value + step})).double().mean().item()
            assert abs(agreement - 0.5) < 5 * deviation, f"{name} + {step}: {agreement}"


def test_a_head_and_stream_have_the_same_mask_wherever_they_are_computed() -> None:
    queries, columns = torch.arange(6, dtype=torch.int32), column_keys(torch.arange(10))
    everything = DropoutKeys(1, 2, torch.arange(4, dtype=torch.int32))
    heads = torch.arange(4, dtype=torch.int32)
    whole = keep_mask(everything.attention_rows(0, heads, queries)[..., None], columns, 0.3)
    part = DropoutKeys(1, 2, torch.tensor([3, 1], dtype=torch.int32)).attention_rows(0, heads[2:], queries)
    assert torch.equal(keep_mask(part[..., None], columns, 0.3), whole[[3, 1], 2:])


def test_dropout_of_hidden_states_follows_the_documented_hash() -> None:
    streams, probability = [9, 2], 0.4
    keys = DropoutKeys(17, 30, torch.tensor(streams, dtype=torch.int32))
    x = torch.ones(2, 3, 5, dtype=torch.float64)
    for site, number in ((Site.EMBEDDING, EMBEDDING_SITE), (Site.REPRESENTATION, REPRESENTATION_SITE)):
        expected = [
            [[(hash_bits(17, (number, 30, s, p), c) >= probability * 2**32) / 0.6 for c in range(5)] for p in range(3)]
            for s in streams
        ]
        torch.testing.assert_close(keys.dropout(x, site, probability), torch.tensor(expected, dtype=torch.float64))


def test_dropout_of_feed_forward_units_follows_the_documented_hash() -> None:
    streams, layer, probability = [9, 2], 3, 0.4
    keys = DropoutKeys(17, 30, torch.tensor(streams, dtype=torch.int32))
    row = [(FEED_FORWARD_SITE, 30, layer, s) for s in streams]
    expected = [
        [[(hash_bits(17, (*r, p), unit) >= probability * 2**32) / 0.6 for unit in range(7, 12)] for p in range(3)]
        for r in row
    ]
    x = torch.ones(2, 3, 5, dtype=torch.float64)
    found = keys.dropout(x, Site.FEED_FORWARD, probability, layer=layer, first_channel=7)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_dropout_of_attention_weights_follows_the_documented_hash() -> None:
    streams, heads, columns, layer = [9, 2], [1, 3, 5], [6, 5, 200], 4
    keys = DropoutKeys(17, 30, torch.tensor(streams, dtype=torch.int32))
    expected = [
        [[[(hash_bits(17, (ATTENTION_SITE, 30, layer, s, h, q), c) >= 2**30) / 0.75 for c in columns] for q in range(2)]
         for h in heads]
        for s in streams
    ]  # fmt: skip
    a = torch.ones(2, 3, 2, 3, dtype=torch.float64)
    found = keys.attention_dropout(a, layer, torch.tensor(heads, dtype=torch.int32), torch.tensor(columns), 0.25)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_no_dropout_returns_the_tensor_itself() -> None:
    x, keys = torch.ones(1, 2, 3), DropoutKeys(1, 1, torch.zeros(1, dtype=torch.int32))
    assert keys.dropout(x, Site.EMBEDDING, 0.0) is x
    assert keys.attention_dropout(x, 0, torch.zeros(1), torch.arange(3), 0.0) is x


def test_dropout_keeps_the_type_and_passes_the_gradient_of_what_is_kept() -> None:
    x = torch.full((2, 4, 64), 1.5, dtype=torch.bfloat16, requires_grad=True)
    y = DropoutKeys(1, 1, torch.arange(2, dtype=torch.int32)).dropout(x, Site.EMBEDDING, 0.25)
    assert y.dtype == torch.bfloat16
    assert set(y.detach().flatten().tolist()) == {0.0, 2.0}
    y.sum().backward()
    assert torch.equal(x.grad, torch.where(y > 0, torch.tensor(1 / 0.75, dtype=torch.bfloat16), 0).to(torch.bfloat16))


def test_generators_depend_on_seed_and_name_alone() -> None:
    def draw(seed: int, name: str) -> list[float]:
        return torch.rand(4, generator=tensor_generator(seed, name)).tolist()

    assert draw(1, "layers.0.key.weight") == draw(1, "layers.0.key.weight")
    names = [(1, "a"), (1, "b"), (2, "a"), (1, "2/a"), (12, "/a")]
    assert len({tuple(draw(*name)) for name in names}) == len(names)
