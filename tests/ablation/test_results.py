"""Results by hand: last losses, spread, what is seen of the paper's sentences, table and figure."""

import json
import math
from pathlib import Path

import pytest

from megatron_allattn.ablation.cells import Cell, Version
from megatron_allattn.ablation.figure import draw
from megatron_allattn.ablation.results import (
    CLAIMS,
    Result,
    Summary,
    as_json,
    judge,
    read_result,
    summarize,
    table,
)
from megatron_allattn.config import UsageError

BASE, SPLIT, NONE = Version("all-attn", 64, ()), Version("attn-split", None, ()), Version("n0", 0, ())


def run(folder: Path, outcome: str | None, *records: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    if outcome is not None:
        (folder / "outcome.json").write_text(json.dumps({"outcome": outcome, "step": 9, "reason": ""}))
    return folder


def results() -> list[Result]:
    values = {BASE: (2.0, 2.2, 2.1), SPLIT: (2.4, 2.5, 2.6), NONE: (2.05, 2.25)}
    return [
        Result(Cell(version, seed), "bpc", {"valid": value, "test": value + 1})
        for version, found in values.items()
        for seed, value in enumerate(found, start=1)
    ]


def test_the_last_evaluation_of_a_run_that_is_done(tmp_path: Path) -> None:
    cell = Cell(BASE, 1)
    early, late = {"kind": "valid", "step": 3, "bpc": 3.0}, {"kind": "valid", "step": 9, "bpc": 2.5}
    test, train = {"kind": "test", "step": 9, "bpc": 2.75}, {"kind": "train", "step": 9, "bpc": 1.0}
    found = read_result(cell, run(tmp_path / "a", "done", early, late, train, test))
    assert found == Result(cell, "bpc", {"valid": 2.5, "test": 2.75})
    assert read_result(cell, run(tmp_path / "b", "stopped", early)) is None
    assert read_result(cell, run(tmp_path / "c", None, early)) is None
    words = read_result(cell, run(tmp_path / "d", "done", {"kind": "valid", "step": 9, "loss": 3.0, "ppl": 20.0}))
    assert words == Result(cell, "ppl", {"valid": 20.0})
    lost = read_result(cell, run(tmp_path / "e", "done", {"kind": "valid", "step": 9, "bpc": None}))
    assert lost is not None and lost.values == {"valid": math.inf}
    with pytest.raises(UsageError, match="has no evaluation"):
        read_result(cell, run(tmp_path / "f", "done", train))


def test_mean_and_spread() -> None:
    base, split, none = summarize(results(), "valid")
    assert (base.name, base.vectors, base.mean, base.deviation) == (
        "all-attn",
        64,
        pytest.approx(2.1),
        pytest.approx(0.1),
    )
    assert split.told() == "2.5000 ± 0.1000"
    assert none.deviation == pytest.approx(math.sqrt(2 * 0.1**2)) and none.vectors == 0
    assert Summary("a", None, (2.0,)).deviation is None and Summary("a", None, (2.0,)).told() == "2.0000"
    assert summarize(results(), "test")[0].mean == pytest.approx(3.1)


def test_what_is_seen_of_a_sentence() -> None:
    """2.5 against 2.1: 0.4, whose standard error is √(0.01/3 + 0.01/3) = 0.0816."""
    found = summarize(results(), "valid")
    joint, heads, *_, crucial = CLAIMS
    assert judge(joint, found) == "+0.4000 ± 0.0816: seen"
    assert judge(crucial, found) == "+0.0500 ± 0.1155: within the spread"
    assert judge(heads, found) is None  # nobody ran single-head
    turned = [Summary("all-attn", 64, (2.6, 2.6)), Summary("attn-split", None, (2.0, 2.2))]
    assert judge(joint, turned) == "-0.5000 ± 0.1000: the opposite was seen"
    assert (
        judge(joint, [Summary("all-attn", 64, (2.0,)), Summary("attn-split", None, (2.5,))]) == "+0.5000, of one seed"
    )


def test_table_and_json() -> None:
    text = table(results(), {"all-attn": 1000, "attn-split": 1000, "n0": 600}.__getitem__, 3)
    lines = text.splitlines()
    assert lines[2] == "| all-attn | 1,000 | 3 of 3 | 2.1000 ± 0.1000 | 3.1000 ± 0.1000 |"
    assert lines[3].startswith("| n0 | 600 | 2 of 3 | ") and lines[4].startswith("| attn-split | ")
    assert sum("persistent vectors are crucial" in line for line in lines) == 1
    assert "single-head" not in text
    assert json.loads(as_json(results()))[3] == {
        "version": "attn-split",
        "vectors": None,
        "seed": 1,
        "unit": "bpc",
        "valid": 2.4,
        "test": 3.4,
    }


def test_the_figure_shows_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    from matplotlib.figure import Figure

    original = Figure.savefig

    def keep(self: Figure, *args: object, **more: object) -> None:
        figures.append(self)
        original(self, *args, **more)

    monkeypatch.setattr(Figure, "savefig", keep)
    draw(tmp_path / "a.png", summarize(results(), "valid"), "bpc", "a title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    left, right = figures[0].axes
    line, *points = left.lines
    assert line.get_ydata().tolist() == pytest.approx([2.15, 2.1])  # N = 0, then 64
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["0", "64"]
    assert [sorted(one.get_ydata()) for one in points] == [[2.05, 2.25], [2.0, 2.1, 2.2]]
    assert [bar.get_height() for bar in right.patches] == pytest.approx([2.1, 2.5])
    assert [sorted(one.get_ydata()) for one in right.lines] == [[2.0, 2.1, 2.2], [2.4, 2.5, 2.6]]
