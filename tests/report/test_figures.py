"""What pictures show is what the run was: data is read back from axes and compared with the known curves."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from megatron_allattn.report import figures, heads
from megatron_allattn.report.comparison import comparison_pictures
from megatron_allattn.report.run import Run, read_run
from megatron_allattn.report.style import Picture
from tests.report.synthetic import (
    STEPS,
    evaluation,
    known_metrics,
    known_run,
    loss_at,
    run_folder,
    spans_at,
    train,
)

LN2 = math.log(2)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(known_run(tmp_path_factory.mktemp("known") / "known"))


def lines(picture: Picture | None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Every line of a picture by its gid: x and y."""
    assert picture is not None
    found = [line for axes in picture.figure.axes for line in axes.lines]
    return {line.get_gid(): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in found}


def labels(picture: Picture) -> list[str]:
    return [text.get_text() for axes in picture.figure.axes if axes.get_legend() for text in axes.get_legend().texts]


def test_loss_is_the_known_curve_with_a_gap_and_marks(known: Run) -> None:
    picture = figures.loss_picture(known)
    drawn = lines(picture)
    steps = np.arange(1, STEPS + 1)
    expected = np.array([loss_at(step) / LN2 for step in steps])
    expected[29] = np.nan
    for x, y in (drawn["train"],):
        np.testing.assert_array_equal(x, steps)
        np.testing.assert_allclose(y, expected, rtol=1e-14)
    np.testing.assert_array_equal(drawn["valid"][0], [20, 40, 60])
    np.testing.assert_allclose(drawn["valid"][1], [(loss_at(s) + 0.5) / LN2 for s in (20, 40, 60)], rtol=1e-14)
    np.testing.assert_allclose(drawn["test"][1], [(loss_at(60) + 0.5) / LN2], rtol=1e-14)

    for gid, at in (("restart", 20), ("other layout", 40), ("other settings", 50), ("plateau", 60)):
        x, y = drawn[gid]
        np.testing.assert_array_equal(x, [at] * 3)
        np.testing.assert_array_equal(y, [0, 1, np.nan])
    assert drawn["update left out"][0].tolist() == [30]
    assert drawn["loss spike"][0].tolist() == [55]
    assert labels(picture) == [
        *("training", "validation", "test", "restart", "other layout", "other settings", "plateau"),
        *("update left out", "loss spike"),
    ]


def test_the_second_half_has_its_steps_only(known: Run) -> None:
    drawn = lines(figures.late_loss_picture(known))
    np.testing.assert_array_equal(drawn["train"][0], np.arange(30, STEPS + 1))
    assert "restart" not in drawn  # it was at step 20
    assert drawn["other layout"][0].tolist() == [40] * 3


def test_rate_norm_speed_and_memory(known: Run) -> None:
    steps = np.arange(1, STEPS + 1)
    drawn = lines(figures.rate_picture(known))
    np.testing.assert_allclose(drawn["lr"][1], 0.001 * steps, rtol=1e-14)
    np.testing.assert_allclose(drawn["grad_norm"][1], 2.0 / steps, rtol=1e-14)
    drawn = lines(figures.speed_picture(known))
    np.testing.assert_array_equal(drawn["raw-speed"][1], 1000.0 + steps)
    np.testing.assert_array_equal(drawn["memory"][0], [20, 40, 60])
    np.testing.assert_array_equal(drawn["memory"][1], [1, 2, 3])  # GiB


def test_cells_are_layers_by_heads_of_the_newest_evaluation(known: Run) -> None:
    cells = np.arange(6.0).reshape(3, 2)
    expected = {
        "spans": spans_at(60),
        "persistent_share": (cells + 1) / 10,
        "effective_vectors": cells + 1.5,
        "largest_vector": (cells + 2) / 10,
        "dead_vectors": cells,
    }
    ends = {}
    for quantity in (heads.SPANS, *heads.QUANTITIES):
        picture = heads.heads_picture(known, quantity)
        assert picture is not None
        axes = picture.figure.axes[0]
        (image,) = axes.images
        np.testing.assert_allclose(image.get_array(), expected[quantity.field], rtol=1e-14)
        written = {tuple(map(int, text.get_position())): float(text.get_text()) for text in axes.texts}
        assert written == {(h, y): pytest.approx(expected[quantity.field][y, h]) for y in range(3) for h in range(2)}
        assert axes.get_ylim()[0] < axes.get_ylim()[1]  # the first layer is at the bottom
        ends[quantity.field] = image.norm.vmax
        assert picture.title in picture.alt and ": 3 layers × 2 heads. At step 60: from " in picture.alt
        assert picture.alt.split(". ", 1)[1] == picture.caption.removeprefix(f"{quantity.caption} ")
    assert ends.pop("spans") == expected["spans"].max()  # those that have no end of their own end with the largest
    assert ends == {"persistent_share": 1, "largest_vector": 1, "effective_vectors": 8, "dead_vectors": 8}


def test_spans_over_time(known: Run) -> None:
    drawn = lines(heads.spans_picture(known))
    at = np.array([20, 40, 60])
    np.testing.assert_array_equal(drawn["span-max"][0], at)
    np.testing.assert_allclose(drawn["span-max"][1], at + 21)
    np.testing.assert_allclose(drawn["span-mean"][1], at + 10.5)
    np.testing.assert_allclose(drawn["span-median"][1], at + 10.5)
    picture = heads.layers_picture(known)
    assert picture is not None
    found = {mesh.get_gid(): mesh.get_array() for axes in picture.figure.axes for mesh in axes.collections}
    np.testing.assert_allclose(found["mean"], [[s + 10 * layer + 0.5 for s in at] for layer in range(3)])
    np.testing.assert_allclose(found["longest"], [[s + 10 * layer + 1 for s in at] for layer in range(3)])


def test_spans_without_observations_are_those_of_the_steps(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "old", known_metrics()))
    drawn = lines(heads.spans_picture(run))
    np.testing.assert_array_equal(drawn["span-mean"][1], 10.0 + np.arange(1, STEPS + 1))
    np.testing.assert_array_equal(drawn["span-max"][1], 20.0 + np.arange(1, STEPS + 1))
    assert heads.layers_picture(run) is None and heads.heads_picture(run, heads.SPANS) is None


@pytest.mark.parametrize(
    ("recipe", "unit", "papers"),
    [
        ("text8-small", "bpc", {"paper-dev": 1.05, "paper-test": 1.11}),
        ("enwik8-small", "bpc", {"paper-test": 1.01}),
        ("wikitext103", "ppl", {"paper-dev": 19.7, "paper-test": 20.6}),
        ("demo", "bpc", {}),
        ("text8-small", "ppl", {}),  # other data than the recipe's: no number to compare with
    ],
)
def test_the_papers_results_are_lines(tmp_path: Path, recipe: str, unit: str, papers: dict[str, float]) -> None:
    records = [train(step) for step in range(1, 30)]
    if unit == "ppl":
        records = [{k: v for k, v in one.items() if k != "bpc"} | {"ppl": math.exp(one["loss"])} for one in records]
    run = read_run(run_folder(tmp_path / "run", records, recipe=recipe))
    drawn = lines(figures.loss_picture(run))
    assert {gid: set(y) for gid, (_, y) in drawn.items() if gid.startswith("paper")} == {
        gid: {value} for gid, value in papers.items()
    }
    expected = [math.exp(loss_at(s)) if unit == "ppl" else loss_at(s) / LN2 for s in range(1, 30)]
    np.testing.assert_allclose(drawn["train"][1], expected, rtol=1e-12)


def test_a_spike_does_not_press_the_curve_flat_and_is_told(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [train(step) for step in range(1, 401)]
    records[299]["loss"] = 500.0
    records.insert(300, {"kind": "spike", "step": 300, "loss": 500.0, "median": 1.0})
    run = read_run(run_folder(tmp_path / "run", [*records, evaluation("valid", 400)]))
    picture = figures.loss_picture(run)
    drawn = lines(picture)
    assert drawn["raw"][1].max() == pytest.approx(500 / LN2)
    assert drawn["train"][1].max() < 10  # the mean leaves it out
    assert picture.figure.axes[0].get_ylim()[1] < 10
    assert "One step lies above the picture, up to 721.3." in picture.caption


def test_runs_over_each_other_and_side_by_side(tmp_path: Path, known: Run) -> None:
    other = read_run(run_folder(tmp_path / "other", [train(step) for step in range(1, 11)]))
    third = read_run(known_run(tmp_path / "third"))
    pictures = {picture.name: picture for picture in comparison_pictures([known, other, third])}
    drawn = lines(pictures["train"])
    assert set(drawn) == {"run-0", "run-1", "run-2"}
    np.testing.assert_allclose(drawn["run-1"][1], [loss_at(step) / LN2 for step in range(1, 11)])
    assert labels(pictures["train"]) == ["known", "other", "third"]
    assert set(lines(pictures["valid"])) == {"run-0", "run-2"}
    colors = [line.get_color() for line in pictures["train"].figure.axes[0].lines]
    assert len(set(colors)) == 3
    shown = [axes for axes in pictures["spans"].figure.axes if axes.images]
    assert [axes.get_title("left") for axes in shown] == ["known", "third"]
    for axes in shown:
        np.testing.assert_array_equal(axes.images[0].get_array(), spans_at(60))
    assert len({axes.images[0].norm.vmax for axes in shown}) == 1
    means = "On average: known 70.5, third 70.5."  # 60 + (0 + 1 + 10 + 11 + 20 + 21) / 6
    assert pictures["spans"].alt == f"Span of every head in 2 runs, layers × heads side by side. {means}"
    assert pictures["spans"].caption.endswith(f". {means}")


def test_runs_of_different_units_are_in_nats(tmp_path: Path, known: Run) -> None:
    records = [{"kind": "train", "step": step, "loss": 2.0, "ppl": math.exp(2.0)} for step in (1, 2)]
    words = read_run(run_folder(tmp_path / "words", records))
    pictures = {picture.name: picture for picture in comparison_pictures([known, words])}
    assert lines(pictures["train"])["run-1"][1].tolist() == [2.0, 2.0]
    assert lines(pictures["train"])["run-0"][1][0] == loss_at(1)
