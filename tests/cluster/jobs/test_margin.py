"""How early a job is told to stop, from what its saves and steps took."""

import json
from pathlib import Path

import pytest

from megatron_allattn.cluster.jobs import margin
from megatron_allattn.cluster.jobs.margin import Measured, measured
from megatron_allattn.config import UsageError
from megatron_allattn.training.pace import longest_save, longest_step, record_save


def test_saves_are_recorded_and_old_ones_forgotten(tmp_path: Path) -> None:
    assert longest_save(tmp_path) is None
    record_save(tmp_path, 10, 99.0, 64)
    for step in range(16):
        assert longest_save(tmp_path) == 99.0
        record_save(tmp_path, 20 + step, 1.0 + step, 64)
    assert longest_save(tmp_path) == 16.0
    saves = json.loads((tmp_path / "pace.json").read_text())["saves"]
    assert saves[-1] == {"step": 35, "seconds": 16.0, "processes": 64} and len(saves) == 16


@pytest.mark.parametrize("text", ["", "[]", '{"saves": 3}', '{"saves": [3, {"seconds": "long"}]}'])
def test_a_file_of_others_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "pace.json").write_text(text)
    assert longest_save(tmp_path) is None
    record_save(tmp_path, 1, 2.0, 1)
    assert longest_save(tmp_path) == 2.0


def test_the_longest_step(tmp_path: Path) -> None:
    assert longest_step(tmp_path) is None
    steps = [{"kind": "train", "step": step, "tokens": 100 * step, "tokens_per_second": 50.0} for step in (1, 2, 3)]
    steps[1]["tokens_per_second"] = 8.0
    lines = [*steps, {"kind": "valid", "step": 3, "tokens": 7}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert longest_step(tmp_path) == 12.5


@pytest.mark.parametrize(
    ("save", "step", "seconds"),
    [(0.1, 0.1, 120), (20.0, 9.9, 120), (20.0, 10.0, 120), (20.0, 10.3, 180), (300.0, 0.0, 660), (301.0, 30.0, 780)],
)
def test_margin(save: float, step: float, seconds: int) -> None:
    """2 × (save + step) + 60, to the next minute."""
    assert Measured(save=save, step=step).margin == seconds


def test_what_was_measured_in_a_run(tmp_path: Path) -> None:
    assert measured(tmp_path) is None
    record_save(tmp_path, 1, 30.0, 1)
    assert measured(tmp_path) == Measured(save=30.0, step=0.0)
    (tmp_path / "metrics.jsonl").write_text("no record\n")
    assert measured(tmp_path) == Measured(save=30.0, step=0.0)


def test_what_is_said_of_the_margin() -> None:
    slow = Measured(save=400.0, step=5.0)  # 870, so 900 s
    assert margin.notes(None, margin.DEFAULT, 10) == []
    assert margin.notes(Measured(save=4.0, step=5.0), margin.DEFAULT, 10) == []
    (nothing,) = margin.notes(None, None, 10)
    assert "there is no --signal=B:USR1@SECONDS" in nothing
    late, cut = margin.notes(slow, margin.DEFAULT, 10)
    assert late.startswith("the longest save has taken 400.0 s and the longest step 5.0 s: --signal=B:USR1@660 may be")
    assert "ask for 900 s" in late
    assert cut.endswith("--stop-deadline-minutes 10 may end a run before it is saved; give 15")
    assert margin.notes(slow, 900, 15) == []
    assert margin.notes(None, 660, 10, 1320) == []
    (short,) = margin.notes(None, 660, 10, 1319)
    assert short == "of the 1319 s of its time (--time) the job keeps 660 s for its end: give it more"


def test_a_job_that_would_be_told_to_stop_at_once() -> None:
    margin.check_time(660, 661, "11:01")
    with pytest.raises(
        UsageError, match=r"^--time 11: is 660 s, and the job would be told to stop 660 s before its end"
    ):
        margin.check_time(660, 660, "11")


def test_the_shipped_default_is_enough_for_the_deadline_of_a_run() -> None:
    """--stop-deadline-minutes leaves a run ten minutes."""
    assert margin.DEFAULT >= 600 + margin.CLOCK
