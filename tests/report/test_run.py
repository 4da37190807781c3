"""Reading run folders: of any age and in any state; what is no record is told with its line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_allattn.config import UsageError
from megatron_allattn.config.parameters import count_parameters
from megatron_allattn.report import facts
from megatron_allattn.report.run import read_run
from tests.report.synthetic import (
    MODEL,
    START,
    evaluation,
    heads_at,
    known_metrics,
    known_observations,
    known_run,
    run_folder,
    train,
    write_lines,
)
from tests.support.commands import corpus
from tests.support.runs import untrained_run


def test_a_finished_run(tmp_path: Path) -> None:
    run = read_run(known_run(tmp_path / "books"))
    assert run.name == "books" and run.metrics.unit == "bpc" and run.metrics.last_step == 60
    assert run.outcome is not None and run.outcome.how == "done"
    assert [start.step for start in run.observations.restarts] == [20, 40]
    assert run.observations.layout_changes == (
        (40, "2 × cpu: TP 2 × PP 1 × DP 1, ZeRO 1, fp32", "4 × cpu: TP 2 × PP 1 × DP 2, ZeRO 1, fp32"),
    )
    assert {kind: steps.tolist() for kind, steps in run.metrics.marks.items()} == {
        "skip": [30],
        "spike": [55],
        "override": [50],
        "plateau": [60],
    }
    assert np.isnan(run.metrics.loss.values[29]) and len(run.metrics.loss.known) == 59
    tokens = run.config.training.global_batch_size * run.config.training.seq_length
    assert run.seconds_in_steps == pytest.approx(sum(tokens / (1000 + step) for step in range(1, 61)))
    table = dict(facts.table(run))
    assert table["best validation"] == table["last validation"] == ["2.2586 bpc at step 60"]
    assert table["restarts"] == ["2"] and table["updates left out"] == ["1"] and table["loss spikes"] == ["1"]
    assert table["outcome"] == ["done: step 60 was the last"]
    assert table["steps, tokens"] == ["60 of 1,000, 6k tokens"]
    assert len(table["layout"]) == 2 and table["peak memory"] == ["3.00 GiB (GPU) on the rank that needs most"]
    told, more = facts.happened(run)
    assert [event.kind for event in told] == ["restart", "skip", "other layout", "override", "spike", "plateau"]
    assert more == 0 and facts.missing(run, {"loss", "spans", "spans_layers", "persistent_share"}) == []


def test_the_checkpoint_tells_the_vocabulary(tmp_path: Path) -> None:
    weights = untrained_run(tmp_path / "run", corpus(tmp_path))
    run = read_run(tmp_path / "run")
    assert run.parameters is not None and run.parameters.total == sum(map(torch.numel, weights.values()))


def test_without_a_checkpoint_the_recipes_vocabulary_is_taken_and_said(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "run", recipe="demo"))
    count = count_parameters(run.config.model, 256)
    assert facts.parameters(run).startswith(f"{count.total:,} with the recipe's vocabulary of 256, ")
    assert facts.parameters(read_run(run_folder(tmp_path / "own"))) == "known once there is a checkpoint"


def test_half_of_a_last_line_is_left_out(tmp_path: Path) -> None:
    folder = known_run(tmp_path / "run")
    for name in ("metrics.jsonl", "observations.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"kind": "train", "st')
    run = read_run(folder)
    assert run.metrics.last_step == 60 and run.observations.heads[-1].step == 60


def test_an_empty_and_an_old_run(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "empty"))
    assert run.metrics.last_step == 0 and run.outcome is None and not run.observations.there
    lines = facts.missing(run, set())
    assert "metrics.jsonl has no training step yet" in lines[0]
    assert "there is no observations.jsonl (older versions write none)" in lines[1]
    old = read_run(run_folder(tmp_path / "old", [train(1), train(2)]))
    assert dict(facts.table(old))["restarts"] == ["not recorded"]
    assert dict(facts.table(old))["outcome"] == ["no outcome yet (it runs, or was killed without a word)"]


def test_lives_under_slurm_are_restarts_where_nothing_else_tells(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", known_metrics())
    lives = [{"kind": "begin", "life": n, "job": "7", "restart": n - 1, "step": 20 * (n - 1)} for n in (1, 2, 3)]
    write_lines(folder / "jobs" / "lives.jsonl", [*lives[:1], {"kind": "end", "life": 1, "step": 20}, *lives[1:]])
    assert [start.step for start in read_run(folder).observations.restarts] == [20, 40]


def test_what_a_resumed_run_measures_again_counts_once(tmp_path: Path) -> None:
    again = heads_at(40) | {"spans": [[1, 1], [1, 1], [1, 1]]}
    observations = [START, heads_at(20), heads_at(40), heads_at(60), START | {"step": 20}, again]
    found = read_run(run_folder(tmp_path / "run", [], observations)).observations
    assert [one.step for one in found.heads] == [20, 40] and found.heads[-1].spans.max() == 1
    twice = read_run(run_folder(tmp_path / "twice", [], [heads_at(20), again | {"step": 20}])).observations
    assert [one.spans.max() for one in twice.heads] == [1]


def test_overflows_of_float16_count_as_left_out(tmp_path: Path) -> None:
    records = [train(step, skipped=skipped, grad_norm=None) for step, skipped in ((1, 1), (2, 1), (3, 2), (4, 2))]
    run = read_run(run_folder(tmp_path / "run", records))
    assert run.metrics.marks["skip"].tolist() == [1, 3] and facts.skipped(run) == 2


def test_what_variants_do_not_have_is_null(tmp_path: Path) -> None:
    null = dict.fromkeys(("persistent_share", "effective_vectors", "largest_vector", "dead_vectors"))
    run = read_run(run_folder(tmp_path / "run", [train(1)], [heads_at(1) | null]))
    assert run.observations.heads[0].persistent_share is None
    (line,) = [line for line in facts.missing(run, {"loss", "spans", "spans_layers"}) if "persistent" in line]
    assert "not measured in networks of the variant all-attn" in line


def test_unknown_kinds_are_counted_and_left_out(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "run", [train(1), {"kind": "weather", "sun": True}]))
    assert run.metrics.unknown == {"weather": 1} and run.metrics.last_step == 1


METRICS, OBSERVATIONS = "metrics.jsonl", "observations.jsonl"


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        (METRICS, "[1]", "line 1 holds no object"),
        (METRICS, '{"kind": 3}', "line 1 has kind 3, expected a text"),
        (METRICS, '{"kind": "train", "loss": 1}', "line 1 has step None, expected a whole number"),
        (METRICS, '{"kind": "train", "step": true, "loss": 1}', "line 1 has step True, expected a whole number"),
        (METRICS, '{"kind": "train", "step": 1}', "line 1 has no loss"),
        (METRICS, '{"kind": "train", "step": 1, "loss": "x"}', "line 1 has loss 'x', expected a number"),
        (METRICS, '{"kind": "train", "step": 1, "loss": 1' + "0" * 400 + "}", "expected a number"),
        (METRICS, '{"kind": "skip", "step": 1}', "line 1 has reason None, expected a text"),
        (METRICS, '{"kind": "override", "step": 1, "changes": 3}', "has changes 3, expected an object"),
        (METRICS, '{"kind": "override", "step": 1, "changes": {"a": 3}}', "has a change 3, expected what was"),
        (METRICS, "{", "is not JSON"),
        (OBSERVATIONS, '{"kind": "heads", "step": 1}', "line 1 has no spans"),
        (OBSERVATIONS, '{"kind": "heads", "step": 1, "spans": [[1], [1, 2]]}', "layers of unequal numbers of heads"),
        (OBSERVATIONS, '{"kind": "heads", "step": 1, "spans": [3]}', "expected a list of numbers for every layer"),
        (
            OBSERVATIONS,
            '{"kind": "heads", "step": 1, "spans": [[1, 2]]}\n{"kind": "heads", "step": 2, "spans": [[1]]}',
            "line 2 has spans of 1 layers of 1 heads, others are of 1 layers of 2",
        ),
        (
            OBSERVATIONS,
            '{"kind": "heads", "step": 1, "spans": [[1, 2]], "dead_vectors": [[1], [2]]}',
            "line 1 has dead_vectors of 2 layers of 1 heads, others are of 1 layers of 2",
        ),
        (OBSERVATIONS, '{"kind": "start", "step": 1}', "has world_size None, expected a whole number"),
        (OBSERVATIONS, '{"kind": "memory", "step": 1, "peak_bytes": -1}', "has peak_bytes -1"),
    ],
)
def test_what_is_no_record_is_named(tmp_path: Path, name: str, line: str, told: str) -> None:
    folder = run_folder(tmp_path / "run", [], [])
    (folder / name).write_text(line + "\n")
    with pytest.raises(UsageError) as error:
        read_run(folder)
    assert told in str(error.value) and name in str(error.value)


@pytest.mark.parametrize(
    "records", [[train(5), train(4)], [train(5), train(5)], [evaluation("valid", 9), evaluation("valid", 3)]]
)
def test_steps_that_go_back_are_refused(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="line 2 is of step"):
        read_run(run_folder(tmp_path / "run", records))


def test_numbers_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / METRICS).write_text(
        '{"kind": "train", "step": 1, "loss": NaN}\n{"kind": "train", "step": 2, "loss": Infinity}\n'
    )
    run = read_run(folder)
    assert all(map(math.isnan, run.metrics.loss.values)) and run.metrics.loss.last is None


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "has no config.json"), ("[]", "holds no object"), ('{"model": {"depth": 3}}', "unknown key")],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None, told: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=told):
        read_run(tmp_path)


def test_a_folder_that_is_not_there_and_a_wrong_outcome(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder; name the --save folder of a run"):
        read_run(tmp_path / "nothing")
    folder = run_folder(tmp_path / "run")
    (folder / "outcome.json").write_text(json.dumps({"outcome": 3}))
    with pytest.raises(UsageError, match="has outcome 3, expected one of done"):
        read_run(folder)


def test_model_line() -> None:
    assert facts.model_line(MODEL) == "all-attn: 3 layers × 2 heads, d = 16, N = 8, adaptive span up to 256"


def test_events_beyond_the_table_are_counted(tmp_path: Path) -> None:
    spikes = [{"kind": "spike", "step": step, "loss": 9.0, "median": 1.0} for step in range(1, 501)]
    told, more = facts.happened(read_run(run_folder(tmp_path / "run", spikes, known_observations())))
    assert len(told) == 200 and more == 500 + 2 - 200
