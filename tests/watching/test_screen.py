"""What is shown of a run, at every size: the numbers of its records, in lines that fit."""

import json
from pathlib import Path

import pytest

from megatron_allattn.watching import view as view_module
from megatron_allattn.watching.screen import lines
from megatron_allattn.watching.view import View
from tests.support.watched import append, begin, end, train

START = {"kind": "start", "step": 0, "world_size": 4, "tensor": 2, "pipeline": 1, "data": 2, "zero_stage": 1}


def text(view: View, width: int = 200, height: int | None = None, *, plain: bool = False, keys: bool = False) -> str:
    view.look_at_all()
    return "\n".join(line.plain for line in lines(view, width, height, plain=plain, keys=keys))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """100 steps of 400, evaluated twice, with a skipped step, a spike and a restart."""
    run = begin(tmp_path / "run", steps=50)
    append(run, {"kind": "valid", "step": 50, "loss": 1.25, "bpc": 1.8034, "tokens": 99})
    append(run, {"kind": "spike", "step": 50, "loss": 9.0, "median": 1.0})
    append(run, *(train(step, skipped=1) for step in range(51, 101)))
    append(run, {"kind": "valid", "step": 100, "loss": 1.5, "bpc": 2.1640, "tokens": 99})
    start = START | {"device": "cpu", "precision": "bf16"}
    memory = {"kind": "memory", "step": 100, "peak_bytes": 3 * 2**30, "device": "host"}
    append(run, start, start | {"step": 60}, memory, name="observations.jsonl")
    return run


def test_all_of_it(folder: Path) -> None:
    shown = text(View(folder)).splitlines()
    assert shown[0] == f"enwik8-small · {folder}"
    assert shown[1] == "running"
    assert shown[2] == "step 100 of 400 · 25 % · 1m15s left without evaluations"  # 300 steps of a quarter of a second
    assert shown[3] == "━" * 15 + "─" * 45
    rest = {line[:7].strip(): line[8:] for line in shown[4:] if line[:7].strip().isalpha()}
    assert rest == {
        "layout": "TP 2 · PP 1 · DP 2 · ZeRO 1 · bf16 · processes 4 · cpu",
        "loss": "5.0000 → 1.0400 · lowest 1.0400",
        "train": "loss 1.0400 · bpc 1.5004 · lr 1.00e-02 · grad norm 0.5",
        "valid": "loss 1.5000 · bpc 2.1640 · step 100 · best 1.2500 at step 50",
        "spans": "mean 18 · longest 213",
        "speed": "2,048 tokens/s · 0.25 s a step · 51,200 tokens so far",
        "memory": "3.00 GiB at most",
        "events": "skipped 1 · spikes 1 · restarts 1",
    }


def test_new_records_and_the_end_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "STANDING_SECONDS", 0.0)
    view = View(folder)
    assert "step 100 of 400" in text(view)
    append(folder, train(101, loss=None, grad_norm=None))
    append(folder, {"kind": "plateau", "step": 101, "lr": 0.001, "best": 1.0, "last_step": 151, "reason": "r"})
    shown = text(view)
    assert "step 101 of 151 · 67 %" in shown and "plateau at step 101 · lr 1.00e-03 since" in shown
    end(folder, step=151)
    assert "done at step 151: reached --train-iters" in text(view)
    assert "left" not in text(view)


def test_a_run_that_goes_on_from_an_earlier_step_is_read_anew(folder: Path) -> None:
    view = View(folder)
    text(view)
    kept = (folder / "metrics.jsonl").read_text().splitlines()[:20]
    (folder / "new").write_text("\n".join(kept) + "\n")
    (folder / "new").replace(folder / "metrics.jsonl")
    shown = text(view)
    assert "step 20 of 400" in shown and "valid" not in shown and "spikes 0" in shown
    assert shown == text(View(folder))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("width", "height"), [(40, 24), (40, 12), (40, 5), (80, 24), (60, 16), (300, 50)])
def test_it_fits(folder: Path, width: int, height: int, plain: bool) -> None:
    shown = text(View(folder), width, height, plain=plain, keys=True).splitlines()
    assert len(shown) <= height and max(map(len, shown)) <= width
    assert "step 100 of 400" in "\n".join(shown) and shown[-1] == "q closes this view, not the run"
    if height >= 24:
        assert any(line.startswith("loss") for line in shown) and any(line.startswith("events") for line in shown)
        assert any("█" in line or "#" in line for line in shown)


def test_little_is_known_of_a_run_that_begins(tmp_path: Path) -> None:
    shown = text(View(begin(tmp_path / "run"))).splitlines()
    assert shown[1:] == [
        "starting: no record yet",
        "step 0 of 400 · 0 %",
        "─" * 60,
        "layout  TP 2 · PP 1 · ZeRO 1 · fp32",
    ]


def test_odd_files_are_told_and_the_rest_is_shown(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"modle": {}}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no record\n")
    odd = {"loss": "x", "tokens": None, "tokens_per_second": True, "span_mean": [], "grad_norm": float("inf")}
    append(folder, train(101) | odd)
    shown = text(View(folder))
    assert "step 101" in shown and "note: configuration modle: unknown key" in shown
    assert "note: metrics.jsonl: 1 line is no record" in shown
    assert "loss not finite" in shown and "\x1b" not in shown


def test_what_a_terminal_could_act_on_is_escaped(tmp_path: Path) -> None:
    run = begin(tmp_path / "r\x1b[2Jun", steps=1)
    end(run, "failed", 1, "bad \x1b]0;title\x07 [red]end")
    shown = text(View(run))
    assert "\x1b" not in shown and "\x07" not in shown and "[red]end" in shown
