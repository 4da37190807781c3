"""Scores that the paper's published code recorded for its own checkpoints, and that a difference does not pass."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_allattn.config import UsageError
from megatron_allattn.inference.recorded import read_recorded, verify_recorded
from megatron_allattn.parallel.groups import single_process_groups
from megatron_allattn.training.reference import CaseReport
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.template import ROOT
from tests.support.trajectories import groups_of

CASES = ROOT / "tests/data/reference"
# What our float64 gets; the recorded numbers are float32. In float32 we are no farther away.
REACHED = {"mean_nll": 2e-8, "nll": 1e-6, "code_protocol": 2e-8, "greedy": 0.0, "greedy_margin": 1e-6}
CPU = torch.device("cpu")


def verify(path: Path, dtype: torch.dtype = torch.float64) -> CaseReport:
    return verify_recorded(read_recorded(path), single_process_groups(), CPU, dtype)


@cache
def recorded(name: str) -> CaseReport:
    return verify(CASES / f"adaptive_span_{name}.pt")


def check(report: CaseReport, name: str) -> None:
    quantities = {"mean_nll", "nll", "code_protocol"} | ({"greedy", "greedy_margin"} if name == "char" else set())
    assert report.differences.keys() == report.limits.keys() == quantities
    assert all(value <= REACHED[what] for what, value in report.differences.items()), report.line()
    assert report.passed


@pytest.mark.parametrize("name", ["char", "word"])
def test_one_process(name: str) -> None:
    report = recorded(name)
    check(report, name)
    assert report.limits == {
        what: limit
        for what, limit in {
            "mean_nll": 2e-7,
            "nll": 5e-6,
            "code_protocol": 2e-7,
            "greedy": 0.0,
            "greedy_margin": 1e-5,
        }.items()
        if what in report.differences
    }


@pytest.mark.parametrize("name", ["char", "word"])
def test_single_precision(name: str) -> None:
    check(verify(CASES / f"adaptive_span_{name}.pt", torch.float32), name)


@pytest.mark.parametrize("backend", ["eager", "blocked"])
@pytest.mark.parametrize("name", ["char", "word"])
def test_every_backend(name: str, backend: str) -> None:
    case = read_recorded(CASES / f"adaptive_span_{name}.pt")
    check(verify_recorded(case, single_process_groups(), CPU, torch.float64, backend), name)


def test_the_normalization_over_spans_is_near_where_the_mask_hides_little() -> None:
    """In the model of words, whose scores are large, one row in 150 gives the first softmax to positions that the mask
    then hides and leaves less than the 1e-8 for the rest: there it is another function."""
    reports = {}
    for name in ("char", "word"):
        case = read_recorded(CASES / f"adaptive_span_{name}.pt", normalization="span")
        first, second = (
            verify_recorded(case, single_process_groups(), CPU, torch.float64, backend)
            for backend in ("eager", "blocked")
        )
        assert first.differences == pytest.approx(second.differences, rel=1e-5, abs=1e-12)
        reports[name] = first
    check(reports["char"], "char")
    assert reports["word"].differences["mean_nll"] == pytest.approx(4.1e-3, rel=0.02)


def _verify(rank: int, world_size: int, path: str) -> CaseReport:
    return verify_recorded(read_recorded(Path(path), world_size), groups_of(world_size, 1), CPU, torch.float64)


@pytest.mark.parametrize("name", ["char", *rest("word")])
def test_tensor_parallel(pools: WorkerPools, name: str) -> None:
    for report in pools(2).run(_verify, str(CASES / f"adaptive_span_{name}.pt")):
        check(report, name)
        for what, difference in report.differences.items():
            assert difference == pytest.approx(recorded(name).differences[what], abs=1e-11)


def changed(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "char") -> Path:
    """A copy of a case whose JSON is changed."""
    content = json.loads((CASES / f"adaptive_span_{name}.json").read_bytes())
    change(content)
    (folder / "case.json").write_text(json.dumps(content))
    return Path(shutil.copy(CASES / f"adaptive_span_{name}.pt", folder / "case.pt"))


def _scale(key: str, *, inside: str | None = None, by: float = 1e-6) -> Callable[[dict[str, Any]], object]:
    """A number that is off by a little."""

    def change(content: dict[str, Any]) -> None:
        place = content[inside] if inside else content
        place[key] = (1 + by) * place[key]

    return change


def _shift(key: str, index: int) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        content[key][index] += 5e-5

    return change


def _other_token(content: dict[str, Any]) -> None:
    content["greedy"]["tokens"][-1] = 3


def _ramp(content: dict[str, Any]) -> None:
    content["config"]["span_ramp"] = 17


def _all(*changes: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda content: [change(content) for change in changes]


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (_all(_scale("mean_nll"), _other_token), {"mean_nll", "greedy"}),
        (_all(_scale("batch_1", inside="code_protocol"), _shift("first_ten_nll", 3)), {"code_protocol", "nll"}),
        (
            _all(_scale("batch_8", inside="code_protocol"), _scale("smallest_margin", inside="greedy", by=1e-3)),
            {"code_protocol", "greedy_margin"},
        ),
        (_shift("last_ten_nll", 9), {"nll"}),
        (_ramp, {"mean_nll", "nll", "code_protocol", "greedy_margin"}),
    ],
)
def test_a_small_difference_is_found(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], differing: set[str]
) -> None:
    report = verify(changed(tmp_path, change), torch.float64)
    assert not report.passed and report.line().startswith("FAIL case: ")
    assert {what for what, limit in report.limits.items() if report.differences[what] > limit} == differing


def test_a_case_may_have_less(tmp_path: Path) -> None:
    def only_the_mean(content: dict[str, Any]) -> None:
        kept = {key: content[key] for key in ("tokens", "block", "mean_nll")}
        content.clear()
        content.update(kept, config={"span_ramp": 16}, code_protocol={"batch_1": 2.5898747235536574})

    report = verify(changed(tmp_path, only_the_mean))
    assert report.passed and report.differences.keys() == {"mean_nll", "code_protocol"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("tokens"), "case.json: lacks or adds tokens"),
        (lambda c: c.update(more=1), "case.json: lacks or adds more"),
        (lambda c: c.pop("config"), "case.json: has no config with a span_ramp"),
        (lambda c: c["config"].pop("span_ramp"), "case.json: has no config with a span_ramp"),
        (lambda c: c["config"].update(span_ramp="16"), "--span-ramp 16: must be an integer"),
        (lambda c: c["config"].update(num_layers=2), "case.json: says num_layers 2, the checkpoint 3"),
        (lambda c: c["config"].update(adaptive_io=True), "case.json: says adaptive_io True, the checkpoint False"),
        (lambda c: c["vocabulary"].pop(), "has a vocabulary of 60 tokens, the checkpoint one of 61"),
        (lambda c: c.update(block=0), "block is 0, expected a number from 1"),
        (lambda c: c.update(mean_nll=None), "mean_nll holds None, expected a number"),
        (lambda c: c["tokens"].append(61), "tokens holds 61, which is not in 0 … 60"),
        (lambda c: c.update(tokens=[1]), "tokens is not a list of at least 11 tokens"),
        (lambda c: c.update(first_ten_nll=2.0), "first_ten_nll is not a list"),
        (lambda c: c["last_ten_nll"].append("1"), "last_ten_nll holds '1', expected a number"),
        (lambda c: c["code_protocol"].update(batches=1.0), "code_protocol batches: expected batch_1, batch_8"),
        (lambda c: c["greedy"].pop("tokens"), "lacks or adds greedy tokens"),
        (lambda c: c["greedy"].update(prompt=[]), "greedy prompt is not a list of at least 1 tokens"),
    ],
)
def test_a_case_that_cannot_be_scored_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = changed(tmp_path, change)
    with pytest.raises(UsageError) as refusal:
        read_recorded(path)
    assert message in str(refusal.value), refusal.value
    assert str(tmp_path) in str(refusal.value)


def test_the_json_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda content: None, "word")
    with pytest.raises(UsageError, match=r"case.pt: --tensor-model-parallel-size 3: must divide"):
        read_recorded(path, tensor_size=3)
    (tmp_path / "case.json").write_text("{")
    with pytest.raises(UsageError, match=r"case.json: is not JSON"):
        read_recorded(path)
    (tmp_path / "case.json").unlink()
    with pytest.raises(
        UsageError, match=r"case.json: cannot be read \(No such file or directory\); give the JSON file"
    ):
        read_recorded(path)
    shutil.copy(CASES / "adaptive_span_char.json", tmp_path / "case.json")
    with pytest.raises(UsageError, match=r"has a vocabulary of 61 tokens, the checkpoint one of 4716"):
        read_recorded(path)
