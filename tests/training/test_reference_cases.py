"""Case files as docs/reference_cases.md describes them, written by an implementation of our own (tests/support)."""

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_allattn.config import UsageError
from megatron_allattn.parallel.groups import single_process_groups
from megatron_allattn.training.reference import CaseReport, verify_case
from megatron_allattn.training.reference_case import read_case
from tests.support.pool import WorkerPools
from tests.support.recorder import record_case, record_curve
from tests.support.trajectories import groups_of

CPU = torch.device("cpu")
BASE = {
    "vocab": 31,
    "d": 32,
    "heads": 4,
    "layers": 2,
    "N": 6,
    "span": 24,
    "adapt_span": True,
    "ramp": 6,
    "span_loss": 1e-3,
    "block": 8,
    "batch": 2,
    "steps": 3,
    "optim": "adagrad",
    "lr": 0.07,
    "clip": 0.03,
}
ADAM = {"optim": "adam", "lr": 2.5e-3, "clip": 1.0}
ADAPTIVE = {"adapt_io": True, "cutoffs": [8, 15], "divval": 2, "tied": True}
CASES = {
    "adam": ADAM,
    "adam without clip, warm-up": ADAM | {"clip": None, "warmup": 5},
    "adagrad without clip": {"clip": 0},
    "tied": ADAM | {"tied": True},
    "a window shorter than the span": {"span": 100, "block": 16},
    "adaptive untied, fixed span": ADAM | ADAPTIVE | {"tied": False, "adapt_span": False},
    "adaptive, four clusters, feed-forward": ADAPTIVE | {"cutoffs": [5, 6, 30], "divval": 3, "N": 0, "ff": 20},
    "adaptive untied, one tail, equal widths": ADAM | ADAPTIVE | {"cutoffs": [20], "divval": 1, "tied": False},
}


def _replay(rank: int, world_size: int, path: Path) -> CaseReport:
    groups = groups_of(world_size, 1) if world_size > 1 else single_process_groups()
    return verify_case(read_case(path, world_size), groups, CPU, torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_another_implementation_agrees(tmp_path: Path, name: str, pools: WorkerPools) -> None:
    """Far below the limits: of two exact implementations nothing but rounding remains."""
    path = record_case(tmp_path / "case.npz", BASE | CASES[name], kinds=("log_probs", "nll"))
    for report in (_replay(0, 1, path), pools(2).run(_replay, path)[0]):
        assert report.passed
        assert report.differences.keys() == {"losses", "log_probs", "nll", "gradients", "weights"}
        assert max(value for what, value in report.differences.items() if what != "weights") < 1e-9
        assert report.differences["weights"] < 5e-8  # most of it without a clip: see the comment at the limits


@pytest.mark.parametrize("changes", [{}, {"divval": 1}], ids=["as recorded", "other widths"])
def test_four_ranks_share_clusters_they_do_not_divide(tmp_path: Path, changes: dict, pools: WorkerPools) -> None:
    path = record_case(tmp_path / "case.npz", BASE | ADAPTIVE | {"cutoffs": [3, 4, 9]} | changes, kinds=("nll",))
    report = pools(4).run(_replay, path)[0]
    assert report.differences.keys() == {"losses", "nll", "gradients", "weights"}
    assert max(report.differences.values()) < 1e-9


@pytest.mark.parametrize("name", ["adam without clip, warm-up", "adaptive untied, fixed span", "adagrad without clip"])
def test_a_curve_agrees_to_its_exact_steps_and_in_the_mean(tmp_path: Path, name: str) -> None:
    config = BASE | CASES[name] | {"steps": 14}
    report = _replay(0, 1, record_curve(tmp_path / "curve.npz", config))
    adaptive = bool(config.get("adapt_io"))
    assert report.limits["losses"] == (1e-4 if adaptive else 1e-7)
    assert report.passed
    assert ("span_mean" in report.differences) is config["adapt_span"]
    assert ("mean_loss_beyond" in report.differences) is adaptive  # the others are exact for a hundred steps
    assert max(report.differences.values()) < 1e-8


def rewrite(path: Path, **arrays: np.ndarray | None) -> Path:
    """The case with some arrays (`__` for /) replaced, or left out where None."""
    with np.load(path) as archive:
        content = {name: archive[name] for name in archive.files}
    content.update({name.replace("__", "/"): array for name, array in arrays.items()})
    np.savez(path, **{name: array for name, array in content.items() if array is not None})
    return path


def without_unreached(path: Path) -> list[str]:
    """Leave out clusters' gradients that are zero, as autograd does where nothing hits a cluster; their names."""
    with np.load(path) as archive:
        zero = [name for name in archive.files if "/grad/" in name and ".cluster" in name and not archive[name].any()]
    rewrite(path, **dict.fromkeys(zero, None))
    return zero


def test_gradients_of_clusters_that_nothing_hits_may_be_left_out(tmp_path: Path) -> None:
    """One stream of two tokens a step cannot hit four clusters."""
    config = BASE | ADAPTIVE | {"cutoffs": [8, 15, 20], "batch": 1, "block": 2, "tied": False}
    path = record_case(tmp_path / "case.npz", config, kinds=("nll",))
    left_out = without_unreached(path)
    assert {name.rpartition(".")[2] for name in left_out} == {"weight", "projection", "bias"}
    assert _replay(0, 1, path).passed
    with np.load(path) as archive:
        reached = next(name for name in archive.files if "/grad/output.cluster" in name and "logits" not in name)
    report = _replay(0, 1, rewrite(path, **{reached.replace("/", "__"): None}))  # it was not zero
    assert not report.passed and report.differences["gradients"] > 1


def test_other_gradients_may_not(tmp_path: Path) -> None:
    path = record_case(tmp_path / "case.npz", BASE | ADAPTIVE, kinds=("nll",))
    for name in ("step0/grad/output.cluster_logits.bias", "step0/updated/output.cluster1.bias"):
        with pytest.raises(UsageError, match=rf"1 array differs .* first {name}: expected .*, found none"):
            read_case(rewrite(record_case(path, BASE | ADAPTIVE, kinds=("nll",)), **{name.replace("/", "__"): None}))


@pytest.mark.parametrize(
    ("arrays", "what"),
    [({"step1__nll": 1e-4}, "nll"), ({"step2__grad__embedding.cluster1.projection": 1e-4}, "gradients")],
    ids=["nll", "gradient"],
)
def test_a_small_difference_in_an_adaptive_case_is_found(tmp_path: Path, arrays: dict, what: str) -> None:
    path = record_case(tmp_path / "case.npz", BASE | ADAPTIVE | ADAM, kinds=("nll",))
    ((name, relative),) = arrays.items()
    with np.load(path) as archive:
        array = archive[name.replace("__", "/")]
    array.flat[5] += relative * np.abs(array).max()
    report = _replay(0, 1, rewrite(path, **{name: array}))
    assert not report.passed
    assert {key for key, limit in report.limits.items() if report.differences[key] > limit} == {what}


def test_what_makes_a_case_is_asked_for_by_name(tmp_path: Path) -> None:
    for config, message in (
        (
            BASE | {"momentum": 0.9, "amsgrad": True},
            "its configuration has amsgrad, momentum, which nothing here stands for",
        ),
        (
            {key: value for key, value in BASE.items() if key != "clip"} | {"clip": None, "batch": "2"},
            "case.npz: batch 2: ",
        ),
        (BASE | {"lr": -1}, "case.npz: lr -1.0: must be above 0"),
        (BASE | {"heads": 5}, "case.npz: .*heads.* 5"),
        (BASE | ADAPTIVE | {"cutoffs": [8, 31]}, "case.npz: cutoffs 8,31: each must be below"),
    ):
        path = record_case(tmp_path / "case.npz", BASE)
        with pytest.raises(UsageError, match=message):
            read_case(rewrite(path, config=np.array(json.dumps(config))))


def test_neither_log_probs_nor_nll_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"3 arrays differ .* first step0/log_probs: expected \(2, 8, 31\), found none"
    ):
        read_case(record_case(tmp_path / "case.npz", BASE, kinds=()))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": np.zeros((2, 25))}, "its tokens are of type float64, not integers"),
        ({"tokens": np.full((2, 25), 31)}, "its tokens are not all in 0 … 30"),
        ({"config": np.array("{'vocab': 31}")}, "its configuration is not JSON"),
        ({"config": np.array("[31]")}, "its configuration is not a JSON object"),
        ({"config": None}, "it has no configuration"),
        ({"init__output.bias": np.full(31, np.nan)}, "init/output.bias holds NaN or infinity"),
        ({"init__layers.0.span": np.full((4, 1, 1), 1.5)}, "init/layers.0.span holds spans outside 0 … 1"),
        (
            {"init__output.bias": np.array([{}])},
            r"case.npz: not a reference case \(its init/output.bias holds Python objects, which are pickled and may be",
        ),
    ],
)
def test_the_reason_is_the_right_one(tmp_path: Path, arrays: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_case(rewrite(record_case(tmp_path / "case.npz", BASE), **arrays))


def test_a_file_in_a_case_that_is_no_array(tmp_path: Path) -> None:
    path = record_case(tmp_path / "case.npz", BASE)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "recorded today")
    with pytest.raises(UsageError, match=r"case.npz: not a reference case \(its notes.txt is no array\); give a case"):
        read_case(path)


def test_a_pipe_in_the_place_of_a_case_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "case.npz")
    with pytest.raises(UsageError, match="is not a regular file"):
        read_case(tmp_path / "case.npz")
