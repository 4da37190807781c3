"""Layout-free randomness: the hash against Python integers, and that masks are as random as they should be."""

import math

import pytest
import torch

from megatron_allattn.config.model import DROPOUT_UNITS
from megatron_allattn.parallel.random import (
    DropoutKeys,
    Site,
    drop_threshold,
    keep_mask,
    keep_scale,
    mix,
    mix_tensor,
    pair_keys,
    row_keys,
    scramble_,
    tensor_generator,
)
from tests.support.slow_attention import (
    ATTENTION_SITE,
    EMBEDDING_SITE,
    FEED_FORWARD_SITE,
    REPRESENTATION_SITE,
    hash_bits,
    keep_factor,
    lowbias32,
    scramble,
)

# Published with the function: the values of lowbias32 at 0, 1, 2, 3
PUBLISHED = [0, 1753845952, 3507691905, 1408362973]


def unsigned(bits: torch.Tensor) -> list[int]:
    return [value & 0xFFFFFFFF for value in bits.flatten().tolist()]


def some_numbers() -> torch.Tensor:
    """Of 32 bits: the ends of the range, those of its halves, and 500 others."""
    edges = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x7FFF, -0x8000], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    return torch.cat([edges, torch.randint(-(2**31), 2**31 - 1, (500,), generator=generator).to(torch.int32)])


def test_mix_has_the_published_values() -> None:
    assert [mix(value) for value in range(4)] == PUBLISHED
    assert [lowbias32(value) for value in range(4)] == PUBLISHED


def test_mix_of_a_tensor_equals_mix_of_its_numbers() -> None:
    values = some_numbers()
    before = values.clone()
    assert unsigned(mix_tensor(values)) == [lowbias32(value) for value in values.tolist()]
    assert torch.equal(values, before)


def test_scramble_by_hand() -> None:
    # 1 · 0x7FEB352D is positive: >> 15 brings in zeros. 2 · it has the sign bit: ones come in.
    assert scramble(0) == 0
    assert scramble(1) == (0x7FEB352D ^ 0xFFD6) * 0x846CA68B % 2**32
    assert scramble(2) == (0xFFD66A5A ^ 0xFFFFFFAC) * 0x846CA68B % 2**32


def test_scramble_of_a_tensor_equals_that_of_its_numbers() -> None:
    values = some_numbers()
    expected = [scramble(value & 0xFFFFFFFF) for value in values.tolist()]
    assert unsigned(scramble_(values, torch.empty_like(values))) == expected


def test_pair_keys() -> None:
    pairs = [0, 1, 2, 4095, 2**30 - 1, -1, -2, -4096]
    assert unsigned(pair_keys(torch.tensor(pairs))) == [lowbias32(p * 0x9E3779B9 + 1) for p in pairs]


@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1, 2**32, 2**63 - 1])
def test_the_bits_of_an_element_equal_the_documented_hash(seed: int) -> None:
    parts = torch.tensor([5, 2**31 - 1], dtype=torch.int32)
    rows = row_keys(seed, Site.EMBEDDING, 2**32 + 7, parts[:, None], torch.arange(3, dtype=torch.int32))
    assert rows.shape == (2, 3)
    columns = torch.arange(-4, 4)
    expected = [
        [[hash_bits(seed, (EMBEDDING_SITE, 2**32 + 7, part, position), column) for column in columns.tolist()]
         for position in range(3)]
        for part in parts.tolist()
    ]  # fmt: skip
    bits = rows[..., None] ^ pair_keys(columns >> 1)
    assert unsigned(scramble_(bits, torch.empty_like(bits))) == torch.tensor(expected).flatten().tolist()
    assert expected[0][0][0::2] == expected[0][0][1::2]  # columns −4 and −3, … , 2 and 3 share theirs


@pytest.mark.parametrize("probability", [0.0, 2**-14, 0.1, 0.25, 0.5, 0.9, 1 - 2**-14])
def test_an_element_is_kept_when_its_bits_reach_the_probability(probability: float) -> None:
    rows, columns = row_keys(7, 1, torch.arange(50, dtype=torch.int32)), torch.arange(-31, 40)
    expected = [[keep_factor(7, (1, r), c, probability) > 0 for c in columns.tolist()] for r in range(50)]
    assert keep_mask(rows[:, None], columns, probability).tolist() == expected


def test_probabilities_are_rounded_to_units_of_2_to_minus_14() -> None:
    assert [drop_threshold(p) for p in (0.0, 1e-6, 2**-15 * 1.01, 0.25, 0.3, 1 - 2**-14)] == [
        0,
        0,
        1,
        4096,
        4915,  # 0.3 is 4915.2 units
        2**14 - 1,
    ]
    assert DROPOUT_UNITS == 2**14  # what the configuration, which must not import torch, refuses by
    assert keep_scale(0.25) == 4 / 3
    assert keep_scale(0.3) == 2**14 / (2**14 - 4915)
    assert keep_scale(1 - 2**-14) == 2**14


def unit(probability: float) -> float:
    """The probability that is used, a whole number of 2⁻¹⁴."""
    return round(probability * 2**14) / 2**14


@pytest.mark.parametrize("probability", [0.02, 0.2, 0.5, 0.85])
@pytest.mark.parametrize("first", [0, -500], ids=["vectors", "distances and vectors"])
def test_the_share_of_kept_elements(probability: float, first: int) -> None:
    rows, columns = row_keys(99, 1, torch.arange(1000, dtype=torch.int32)), torch.arange(first, first + 1000)
    kept = keep_mask(rows[:, None], columns, probability).double()
    probability = unit(probability)
    variance = probability * (1 - probability)
    for part in (kept, kept[:, 0::2], kept[:, 1::2]):  # all columns, and either one of a pair
        assert abs(part.mean().item() - (1 - probability)) < 4 * math.sqrt(variance / part.numel())
    # every row and every column has its own share: 1000 numbers whose spread is the binomial one
    for dim in (0, 1):
        spread = kept.mean(dim=dim).std().item() / math.sqrt(variance / 1000)
        assert 0.9 < spread < 1.1


def test_the_numbers_of_14_bits_are_uniform() -> None:
    """Both columns of a pair take every sixteenth of the range equally often, and every pair of sixteenths."""
    rows, pairs = row_keys(5, 1, torch.arange(1024, dtype=torch.int32)), torch.arange(-256, 256)
    bits = rows[:, None] ^ pair_keys(pairs)
    bits = scramble_(bits, torch.empty_like(bits))
    even, odd = bits & 0x3FFF, bits >> 16 & 0x3FFF
    for field in (even, odd):
        assert_uniform(torch.bincount((field >> 10).flatten(), minlength=16))
        assert_uniform(torch.bincount((field & 15).flatten(), minlength=16))
    assert_uniform(torch.bincount(((even >> 10) * 16 + (odd >> 10)).flatten(), minlength=256))
    assert_uniform(torch.bincount(((even & 15) * 16 + (odd & 15)).flatten(), minlength=256))


def assert_uniform(counts: torch.Tensor) -> None:
    """χ² of equal shares, within five deviations on either side: its cube root is nearly normal (Wilson, Hilferty)."""
    expected = counts.sum().item() / len(counts)
    found, freedom = ((counts - expected) ** 2 / expected).sum().item(), len(counts) - 1
    spread = 2 / (9 * freedom)
    assert abs((found / freedom) ** (1 / 3) - (1 - spread)) < 5 * math.sqrt(spread), found


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Of two masks of equal shape, in deviations of what chance gives."""
    a, b = first.double().flatten() - first.double().mean(), second.double().flatten() - second.double().mean()
    return ((a * b).mean() / (a.std() * b.std())).item() * math.sqrt(a.numel())


BLOCK = {"seed": 5, "step": 3, "layer": 2, "stream": 4, "head": 1, "query": 0, "column": -128}


def block_mask(probability: float, **change: int) -> torch.Tensor:
    """The mask of 8 streams, 4 heads, 32 queries, 256 columns; change: of where these begin."""
    at = {**BLOCK, **change}
    streams = torch.arange(at["stream"], at["stream"] + 8, dtype=torch.int32)
    heads = torch.arange(at["head"], at["head"] + 4, dtype=torch.int32)
    queries = torch.arange(at["query"], at["query"] + 32, dtype=torch.int32)
    rows = DropoutKeys(at["seed"], at["step"], streams).attention_rows(at["layer"], heads, queries)
    return keep_mask(rows[..., None], torch.arange(at["column"], at["column"] + 256), probability)


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5])
def test_neighbours_are_independent(probability: float) -> None:
    """Shifting any one identity gives a mask that agrees with the first as often as chance does."""
    first = block_mask(probability)
    assert first.shape == (8, 4, 32, 256)
    for name, value in BLOCK.items():
        for step in (1, 2, 3, 64):
            found = correlation(first, block_mask(probability, **{name: value + step}))
            assert abs(found) < 5, f"{name} + {step}: {found}"


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5])
def test_the_two_columns_of_a_pair_are_independent_and_so_are_pairs(probability: float) -> None:
    mask = block_mask(probability)
    even, odd = mask[..., 0::2], mask[..., 1::2]
    assert abs(correlation(even, odd)) < 5
    for step in (1, 2, 5):
        for first in (even, odd):
            for second in (even, odd):
                assert abs(correlation(first[..., step:], second[..., :-step])) < 5


def test_rows_differ_in_as_many_elements_as_chance_has_it() -> None:
    """No two rows have equal or opposite masks, though keys are combined with columns by exclusive or."""
    rows = row_keys(3, 1, torch.arange(600, dtype=torch.int32))
    signs = keep_mask(rows[:, None], torch.arange(-256, 256), 0.5).double() * 2 - 1
    products = (signs @ signs.T).triu(diagonal=1)
    assert products.abs().max().item() < 6 * math.sqrt(512)  # 180,000 pairs, each N(0, 512)
    assert products[products != 0].std().item() == pytest.approx(math.sqrt(512), rel=0.02)


def test_a_head_and_stream_have_the_same_mask_wherever_they_are_computed() -> None:
    queries, columns = torch.arange(6, dtype=torch.int32), torch.arange(-3, 7)
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
            [[keep_factor(17, (number, 30, s, p), c, probability) for c in range(5)] for p in range(3)] for s in streams
        ]
        torch.testing.assert_close(keys.dropout(x, site, probability), torch.tensor(expected, dtype=torch.float64))


def test_dropout_of_feed_forward_units_follows_the_documented_hash() -> None:
    streams, layer, probability = [9, 2], 3, 0.4
    keys = DropoutKeys(17, 30, torch.tensor(streams, dtype=torch.int32))
    row = [(FEED_FORWARD_SITE, 30, layer, s) for s in streams]
    expected = [[[keep_factor(17, (*r, p), unit, probability) for unit in range(7, 12)] for p in range(3)] for r in row]
    x = torch.ones(2, 3, 5, dtype=torch.float64)
    found = keys.dropout(x, Site.FEED_FORWARD, probability, layer=layer, first_channel=7)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_dropout_of_attention_weights_follows_the_documented_hash() -> None:
    streams, heads, columns, layer = [9, 2], [1, 3, 5], [-200, -1, 0, 5, 201], 4
    keys = DropoutKeys(17, 30, torch.tensor(streams, dtype=torch.int32))
    expected = [
        [[[keep_factor(17, (ATTENTION_SITE, 30, layer, s, h, q), c, 0.25) for c in columns] for q in range(2)]
         for h in heads]
        for s in streams
    ]  # fmt: skip
    a = torch.ones(2, 3, 2, 5, dtype=torch.float64)
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
