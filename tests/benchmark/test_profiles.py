"""Span profiles: what comes with the package, fitting to a model, files of one's own, a run's checkpoint."""

import json
import os
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_allattn.benchmark.profiles import SpanProfile, packaged, parse_profile, read_profile
from megatron_allattn.config import UsageError
from megatron_allattn.model.span import span_in_tokens
from tests.support.commands import corpus
from tests.support.runs import untrained_run

SMALL = SpanProfile("small", "for tests", 4, ((4, 10, 20), (8, 30, 100)))
GOOD: dict[str, Any] = {
    "format": "megatron-allattn-spans",
    "version": 1,
    "about": "for tests",
    "ramp": 4,
    "tokens": [[4, 10.5], [20, 30]],
}


def test_those_of_the_package_have_the_documented_mean_and_maximum() -> None:
    found = {name: read_profile(name) for name in packaged()}
    assert {name: (one.mean, one.longest) for name, one in found.items()} == {
        "facts": (162.0, 1519),
        "fresh": (32.0, 32),
        "half-way": (100.0, 2048),
        "late": (300.0, 8192),
    }
    for one in found.values():
        assert [len(row) for row in one.tokens] == [8] * 18
    assert found["fresh"].z(8192) == ((0.0,) * 8,) * 18


@pytest.mark.parametrize("name", packaged())
def test_writing_gives_the_file(name: str) -> None:
    file = resources.files("megatron_allattn.benchmark") / "profiles" / f"{name}.json"
    assert read_profile(name).to_json() == file.read_text(encoding="utf-8")


def test_z_is_what_a_run_logs_the_tokens_of() -> None:
    z = torch.tensor(SMALL.z(100), dtype=torch.float64)
    assert torch.equal(z, torch.tensor([[0, 0.06, 0.16], [0.04, 0.26, 1.0]], dtype=torch.float64))
    assert torch.allclose(span_in_tokens(z, 100, 4), torch.tensor(SMALL.tokens, dtype=torch.float64))


def test_a_profile_that_fits_is_left_as_it_is() -> None:
    assert SMALL.fit(2, 3, 100) == SMALL


def test_other_numbers_of_layers_and_heads_are_taken_at_equal_places() -> None:
    found = SMALL.fit(4, 2, 100)
    assert found.tokens == ((4, 20), (4, 20), (8, 100), (8, 100))
    assert found.notes == ("small has 2 × 3 heads: taken at equal places for 4 × 2",)
    assert SMALL.fit(1, 1, 100).tokens == ((30,),)


def test_what_a_model_cannot_see_is_cut_and_told() -> None:
    found = SMALL.fit(2, 3, 25)
    assert found.tokens == ((4, 10, 20), (8, 25, 25))
    assert found.notes == ("2 heads of small look further than the maximum span 25: cut to it",)
    assert found.z(25)[1] == (0.16, 1.0, 1.0)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD))
    found = read_profile(str(path))
    assert found == SpanProfile("mine", "for tests", 4, ((4, 10.5), (20, 30)))
    assert parse_profile("", "mine", found.to_json()) == found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "spans"}, "is no object of format megatron-allattn-spans, version 1"),
        ({"version": 2}, "is no object of format megatron-allattn-spans, version 1"),
        ({"spans": []}, "has unknown keys spans"),
        ({"about": 3}, "about is not text"),
        ({"ramp": 0}, "ramp is not a whole number above 0"),
        ({"ramp": True}, "ramp is not a whole number above 0"),
        ({"tokens": []}, "tokens is not a list of layers, each a list of heads"),
        ({"tokens": [[], []]}, "tokens is not a list of layers, each a list of heads"),
        ({"tokens": [[5, 6], [7]]}, "its layers differ in their number of heads"),
        ({"tokens": [[5], [3]]}, "layer 1 has 3, not a number from ramp 4 up"),
        ({"tokens": [[5], ["7"]]}, "layer 1 has '7', not a number from ramp 4 up"),
        ({"tokens": [[float("nan")]]}, "layer 0 has nan, not a number from ramp 4 up"),
    ],
)
def test_a_file_that_is_no_profile(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_profile("mine.json", "mine", json.dumps(GOOD | change))
    assert str(error.value) == f"--span-profile mine.json: {reason}; see docs/performance.md for the format"


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^--span-profile nothing: cannot be read \(No such file or directory\); give "
    ):
        read_profile("nothing")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"cannot be read \(it is not text\)"):
        read_profile(str(tmp_path / "binary.json"))
    os.mkfifo(tmp_path / "pipe")  # that nobody writes to
    with pytest.raises(UsageError, match=r"^--span-profile \S+pipe: is not a regular file; give one of "):
        read_profile(str(tmp_path / "pipe"))
    with pytest.raises(UsageError, match=r"mine.json: is not JSON \(Expecting value"):
        parse_profile("mine.json", "mine", "")
    with pytest.raises(UsageError, match=r"^--span-profile .*no checkpoint to load"):
        read_profile(str(tmp_path))


def test_the_newest_checkpoint_of_a_run(tmp_path: Path) -> None:
    weights = untrained_run(tmp_path, corpus(tmp_path), steps=(3, 7))
    found = read_profile(str(tmp_path))
    spans = [tensor.flatten() for name, tensor in weights.items() if name.endswith(".span")]
    expected = span_in_tokens(torch.stack(spans), 80, 8)
    assert torch.allclose(torch.tensor(found.tokens, dtype=torch.float64), expected.double())
    assert (found.name, found.ramp, found.notes) == (tmp_path.name, 8, ())
    assert found.about == "step 7 of a run at a maximum of 80"
    assert replace(found, name="x").fit(2, 2, 80).tokens == found.tokens
