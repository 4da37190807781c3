"""Which tokens may be drawn, worked out by hand, and how often they are."""

import pytest
import torch
from torch import Tensor

from megatron_allattn.inference.sampling import Sampler, Sampling, candidates, greedy

P = (0.1, 0.4, 0.05, 0.3, 0.15)  # by id; from the likeliest: 1, 3, 4, 0, 2


def log_probs(*rows: tuple[float, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log().to(dtype)


def distribution(sampling: Sampling, p: tuple[float, ...] = P) -> list[float]:
    """Probability of every id."""
    found, ids = candidates(log_probs(p), sampling)
    assert found.dtype == torch.float64 and found.shape == ids.shape
    return torch.zeros(1, len(p), dtype=torch.float64).scatter_add_(1, ids, found)[0].tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), P),
        (Sampling(temperature=0.5), [x / 0.285 for x in (0.01, 0.16, 0.0025, 0.09, 0.0225)]),
        (Sampling(top_k=1), (0, 1, 0, 0, 0)),
        (Sampling(top_k=2), (0, 4 / 7, 0, 3 / 7, 0)),
        (Sampling(top_k=5), P),
        (Sampling(top_k=9), P),
        (Sampling(top_p=0.3), (0, 1, 0, 0, 0)),
        (Sampling(top_p=0.41), (0, 4 / 7, 0, 3 / 7, 0)),
        (Sampling(top_p=0.71), (0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85)),
        (Sampling(top_p=1.0), P),
        # of the three likeliest, 0.4 / 0.85 is 0.47: two of them reach one half
        (Sampling(top_k=3, top_p=0.5), (0, 4 / 7, 0, 3 / 7, 0)),
        # squared and scaled: 0.561, 0.316, … : the first alone reaches 0.56, not 0.57
        (Sampling(temperature=0.5, top_p=0.56), (0, 1, 0, 0, 0)),
        (Sampling(temperature=0.5, top_p=0.57), (0, 0.64, 0, 0.36, 0)),
    ],
    ids=str,
)
def test_what_may_be_drawn(sampling: Sampling, expected: tuple[float, ...]) -> None:
    assert distribution(sampling) == pytest.approx(list(expected), abs=1e-12)


def test_a_high_or_low_temperature_is_uniform_or_greedy() -> None:
    assert distribution(Sampling(temperature=1e9)) == pytest.approx([0.2] * 5, abs=1e-8)
    for low in (1e-9, 1e-308, 5e-324):
        assert distribution(Sampling(temperature=low)) == [0, 1, 0, 0, 0]
        assert distribution(Sampling(temperature=low, top_k=3)) == [0, 1, 0, 0, 0]


def test_draws_follow_the_probabilities() -> None:
    """20,000 draws: a frequency is off by 0.01 with a probability below 0.01."""
    draw, rows = Sampler(Sampling(), 5, [(0, 0), (0, 1)]), log_probs(P, P[::-1], dtype=torch.float32)
    found = torch.stack([draw(rows) for _ in range(20_000)])
    for sample, expected in enumerate((P, P[::-1])):
        frequencies = found[:, sample].bincount(minlength=5) / len(found)
        assert frequencies.tolist() == pytest.approx(list(expected), abs=0.01)
    together = ((found[:, 0] == 1) & (found[:, 1] == 3)).double().mean().item()
    assert together == pytest.approx(0.16, abs=0.01)  # the samples are independent


def test_what_cannot_be_is_never_drawn() -> None:
    rows = log_probs((0.0, 0.5, 0.0, 0.5, 0.0))
    draw = Sampler(Sampling(), seed=1)
    assert {draw(rows).item() for _ in range(200)} == {1, 3}
    draw = Sampler(Sampling(top_k=2), seed=1)
    assert {draw(log_probs(P)).item() for _ in range(200)} == {1, 3}


def test_a_sample_is_a_function_of_seed_prompt_and_number() -> None:
    def draws(seed: int, *samples: tuple[int, int]) -> list[list[int]]:
        draw = Sampler(Sampling(), seed, samples)
        return torch.stack([draw(log_probs(*[P] * len(samples))) for _ in range(50)], dim=1).tolist()

    several = [(0, 0), (0, 1), (1, 0), (1, 1), (11, 1), (1, 11)]
    together = draws(7, *several)
    assert together == [draws(7, sample)[0] for sample in several]
    assert draws(7, *several[::-1]) == together[::-1]
    assert len({tuple(sample) for sample in (*together, draws(8, (0, 0))[0])}) == 7


def test_greedy_takes_the_likeliest() -> None:
    assert greedy(log_probs(P, P[::-1])).tolist() == [1, 3]
