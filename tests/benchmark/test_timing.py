"""The order of alternated runs, and what is said of their results."""

import pytest
import torch

from megatron_allattn.benchmark.timing import Summary, alternate, ratios, seconds, summarize


def test_every_round_runs_every_case_once_and_starts_with_another() -> None:
    order: list[str] = []

    def case(name: str):
        def run() -> int:
            order.append(name)
            return len(order)

        return run

    found = alternate({name: case(name) for name in "abc"}, runs=3, warmup=1)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert found == {"a": [6, 8, 10], "b": [4, 9, 11], "c": [5, 7, 12]}


def test_without_warm_up_every_run_counts() -> None:
    assert alternate({"one": lambda: 1}, runs=2, warmup=0) == {"one": [1, 1]}


def test_summary() -> None:
    found = summarize([4.0, 1.0, 2.0])
    assert found == Summary(median=2.0, lowest=1.0, highest=4.0, runs=3)
    assert found.spread == 1.5
    assert found.to_dict() == {"median": 2.0, "lowest": 1.0, "highest": 4.0, "runs": 3, "spread": 1.5}
    assert summarize([1.0, 2.0]).median == 1.5


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios([10.0, 30.0, 20.0], [1.0, 10.0, 5.0]).median == 4.0  # of 10, 3 and 4; of the medians it were 4 too
    assert ratios([10.0, 1.0, 20.0], [1.0, 2.0, 10.0]).median == 2.0  # of 10, ½ and 2; of the medians it were 5
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_seconds_of_an_action_that_runs_once() -> None:
    runs: list[int] = []
    assert seconds(lambda: runs.append(1), torch.device("cpu")) > 0
    assert runs == [1]
