"""The Triton backend in Triton's interpreter, against eager: outputs, gradients, dropout masks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence

import pytest
import torch

from megatron_allattn.kernels.compiled import load_library
from megatron_allattn.kernels.registry import choose_backend
from megatron_allattn.parallel.random import keep_mask
from tests.support.attention_problems import CASES, answer, make
from tests.support.template import ROOT

pytest.importorskip("triton")

# of those of every backend; the interpreter takes a second for each, and tests/support/triton_cases.py has more
SOME = (
    "full cache",
    "a window below the span",
    "an empty cache that is masked",
    "no persistent vectors",
    "nothing to look at for the first token",
    "position values, masked",
    "fixed span, masked",
    "dropout, window and mask",
    "one token",
)
KEYS, COLUMNS, PROBABILITIES = [0, 1, -1, 123456789, -(2**31), 2**31 - 1], 64, (0.3, 0.5)


def report_of(cases: Sequence[str]) -> dict:
    """What tests/support/triton_cases.py prints, from a process in which Triton interprets."""
    request = {"cases": list(cases), "probabilities": PROBABILITIES, "keys": KEYS, "columns": COLUMNS}
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-W",
        "ignore::RuntimeWarning",
        ROOT / "tests/support/triton_cases.py",
        json.dumps(request),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def report() -> dict:
    return report_of(SOME)


def test_outputs_and_gradients_equal_those_of_eager(report: dict) -> None:
    compared(report, SOME)


@pytest.mark.layouts
def test_outputs_and_gradients_of_every_case() -> None:
    compared(report_of(list(CASES)), CASES)


def compared(report: dict, cases: Iterable[str]) -> None:
    assert report["differences"].keys() > set(cases)
    wrong = {
        f"{case}: {tensor}": difference
        for case, differences in report["differences"].items()
        for tensor, difference in differences.items()
        if not difference < 1e-5
    }
    assert not wrong
    tensors = {tensor for differences in report["differences"].values() for tensor in differences}
    assert tensors == {
        *("output", "block", "query", "key", "value", "persistent_key", "persistent_value", "span", "position")
    }


@pytest.mark.parametrize(("dtype", "limit"), [("torch.bfloat16", 2e-2), ("torch.float16", 3e-3)])
def test_half_precision_stays_near_float64(report: dict, dtype: str, limit: float) -> None:
    differences = report["half"][dtype]
    assert len(differences) == 9
    assert max(differences.values()) < limit, differences
    assert min(differences.values()) > 1e-5  # numbers of 8 and 11 bits


def test_masks_are_those_of_every_backend_bit_for_bit(report: dict) -> None:
    columns = torch.arange(-COLUMNS, COLUMNS)
    for probability, found in zip(PROBABILITIES, report["masks"], strict=True):
        expected = keep_mask(torch.tensor(KEYS, dtype=torch.int32)[:, None], columns, probability).int()
        by_pairs, by_columns = torch.tensor(found, dtype=torch.int32)
        assert torch.equal(by_pairs, expected)
        assert torch.equal(by_columns, expected)


def test_evaluation_asks_for_no_gradients(report: dict) -> None:
    assert report["evaluated"]["difference"] < 1e-5
    assert report["evaluated"]["requires_grad"] is False


def test_equal_calls_give_equal_bits(report: dict) -> None:
    assert report["repeated"] is True


@pytest.mark.parametrize(
    ("dtype", "head_size", "normalization", "reason"),
    [
        (torch.float64, 64, "span", "it has no float64"),
        (torch.float32, 48, "span", "heads have 48 channels, it has 16, 32, 64, 128"),
        (torch.bfloat16, 64, "window", "it has no --span-normalization window"),
    ],
)
def test_what_it_cannot_do_is_refused_and_auto_says_why(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_size: int, normalization: str, reason: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that the device is no reason
    arguments = (torch.device("cpu"), dtype, head_size, normalization)
    with pytest.raises(
        ValueError, match=f"^--attention-backend triton: {reason}; choose auto or one of blocked, eager$"
    ):
        choose_backend("triton", *arguments)
    chosen = choose_backend("auto", *arguments)
    heads = f"; {load_library()[1]}" if normalization == "span" else ""  # others compute `window`
    assert (chosen.name, chosen.note) == ("blocked", f"blocked (not triton: {reason}{heads})")
    half = choose_backend("auto", torch.device("cpu"), torch.float16, 48)
    assert half.note == (
        "eager (not triton: heads have 48 channels, it has 16, 32, 64, 128; "
        "not blocked: its masks need more bits than float16 has)"
    )


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        choose_backend("triton", torch.device("cpu"), torch.float32, 64)


def test_it_is_chosen_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for choice, note in (("auto", "triton (the fastest where it can run)"), ("triton", "triton (asked for)")):
        chosen = choose_backend(choice, torch.device("cpu"), torch.bfloat16, 128)
        assert (chosen.name, chosen.note) == ("triton", note)


def test_a_layer_with_another_normalization_is_refused() -> None:
    from megatron_allattn.kernels.triton_attention import Triton

    with pytest.raises(ValueError, match="it has no --span-normalization window; choose blocked"):
        answer(Triton(), make(size=16, normalization="window", dtype=torch.float32))
