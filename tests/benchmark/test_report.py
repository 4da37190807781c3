"""Tables, JSON files and plots."""

import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from megatron_allattn.benchmark import plots, report
from megatron_allattn.benchmark.machine import describe
from megatron_allattn.benchmark.sweep import sweep_results
from megatron_allattn.config import UsageError
from megatron_allattn.config.checks import check_output


def test_table() -> None:
    assert report.table(("name", "ms"), [("a", "1.0"), ("longer", "12.5")]) == (
        "| name   |   ms |\n| ------ | ---: |\n| a      |  1.0 |\n| longer | 12.5 |"
    )


def test_json(tmp_path: Path) -> None:
    report.write_json(tmp_path / "a.json", "step", {"share": 1 / 3})
    assert json.loads((tmp_path / "a.json").read_text()) == {"benchmark": "step", "version": 1, "share": 1 / 3}
    report.write_json(None, "step", {})


def test_a_disk_that_is_full_after_hours_of_measuring() -> None:
    check_output("--json", Path("/dev/full"))
    with pytest.raises(
        UsageError, match=r"^--json /dev/full: cannot be written \(No space .*; what was measured is above"
    ):
        report.write_json(Path("/dev/full"), "step", {})


def test_what_was_measured_on() -> None:
    machine = describe(torch.device("cpu"), 2)
    assert machine["threads"] == 2 and machine["torch"] == torch.__version__ and machine["gemm_size"] == 2048
    rates = {name: {"median": value} for name, value in (("float32", 180.4), ("bfloat16", 400.0), ("copy", 12.34))}
    first, second = report.machine_lines(machine, rates)
    assert first.startswith(machine["device"]) and f"2 of {machine['cores']} cores" in first
    assert second == (
        "GEMM of at most 2048 × 2048 × 2048, GFLOP/s: float32 180, bfloat16 400; copy 12.3 GB/s read and written"
    )
    assert len(report.machine_lines(machine, None)) == 1


def test_plots_of_both_sweeps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = {
        "mean-span": {name: sweep_results({100: 0.1, 200: 0.2, 300: 0.31}) for name in ("blocked", "eager")},
        "max-span": {"blocked": sweep_results({300: 0.2, 600: 0.2, 900: 0.21})},
    }
    plots.plot_sweeps(tmp_path / "cost.svg", found, "a title")
    text = (tmp_path / "cost.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for words in ("a title", *plots.LABELS.values(), "blocked: R² 0.9992", "blocked: flat within 5.0 %"):
        assert f"<!-- {words} -->" in text


def test_without_matplotlib_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plots.check_plotting("--plot", None)
    with pytest.raises(UsageError) as error:
        plots.check_plotting("--plot", Path("a.svg"))
    assert str(error.value) == "--plot a.svg: plots need matplotlib; pip install matplotlib, or leave the flag out"
