"""SIGTERM and SIGUSR1: all ranks stop at one step, which is saved, and the run goes on from there unchanged."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.faults.conftest import PATH, Ended, Runs, ended, until_step
from tests.support.commands import ROOT, Program, environment, outcome, records

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2", "--micro-batch-size", "2")
ZERO3 = ("--zero-stage", "3")
ASYNC = (*TP2, "--async-save", "--save-interval", "1")
ENDLESS = ("--train-iters", "100000", "--attention-dropout", "0.2")
NEVER = "pause@0"
ORDERS = {"SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1, "SIGHUP": signal.SIGHUP}


def stopped(
    runs: Runs,
    flags: Sequence[str],
    number: signal.Signals,
    whom: Sequence[int],
    *,
    count: int = 2,
) -> Ended:
    """A run of which these ranks get a signal once the first has told of step 4."""
    with runs.started(count, 0, NEVER, *ENDLESS, *flags) as programs:
        until_step(4, *programs)
        for rank in whom:
            os.kill(programs[rank].process.pid, number)
        return ended(programs)


def check(runs: Runs, end: Ended, name: str) -> int:
    """That it has stopped as it should; the step."""
    assert set(end.codes) == {3} and end.errors == []
    told = outcome(runs.folder / "run")
    assert (told["outcome"], told["reason"]) == ("stopped", name)
    step = told["step"]
    assert (runs.folder / "run" / "latest").read_text() == f"step_{step:08d}\n"
    assert f"stopped at step {step} by {name}; go on from it with --load run\n" in end.ranks[0].stdout
    return step


def trained(runs: Runs, run: str = "run") -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name != "tokens_per_second"}
        for record in records(runs.folder / run)
    ]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", pytest.param("SIGHUP", marks=pytest.mark.faults)])
@pytest.mark.parametrize(
    ("flags", "whom"),
    [
        (TP2, [1]),
        *(
            pytest.param(*row, marks=pytest.mark.faults)
            for row in ((TP2, [0]), (ZERO3, [0, 1]), (PP2, [1]), (PP2, [0]), (ASYNC, [1]))
        ),
    ],
)
def test_one_signal_stops_all_ranks_at_one_step(runs: Runs, flags: tuple[str, ...], whom: list[int], name: str) -> None:
    step = check(runs, stopped(runs, flags, ORDERS[name], whom), name)
    before = trained(runs)
    assert [record["step"] for record in before] == list(range(1, step + 1))
    more = ("--train-iters", str(step + 3), "--attention-dropout", "0.2", *flags)
    runs.succeeds(2, *more, "--load", "run")
    resumed = [record for record in trained(runs) if record["kind"] == "train"]
    runs.succeeds(2, *more, "--save", "whole")
    assert resumed == [record for record in trained(runs, "whole") if record["kind"] == "train"]


def test_one_process_stops_too(runs: Runs) -> None:
    check(runs, stopped(runs, (), signal.SIGTERM, [0], count=1), "SIGTERM")


@pytest.mark.faults
def test_nohup_is_heeded(runs: Runs) -> None:
    command = ["nohup", sys.executable, str(ROOT / "pretrain.py"), *runs.flags(*ENDLESS)]
    with Program(command, runs.folder, environment(PATH)) as program:
        until_step(2, program)
        os.kill(program.process.pid, signal.SIGHUP)
        until_step(2 + len(re.findall("step +[0-9]+/", program.stdout)), program)
        os.kill(program.process.pid, signal.SIGTERM)
        assert program.wait().returncode == 3
    assert outcome(runs.folder / "run")["reason"] == "SIGTERM"


def test_a_second_signal_changes_nothing(runs: Runs) -> None:
    check(runs, stopped(runs, TP2, signal.SIGTERM, [0, 1, 1, 0, 1]), "SIGTERM")


@pytest.mark.faults
def test_a_signal_in_an_evaluation_leaves_it_to_the_run_that_goes_on(runs: Runs) -> None:
    """The evaluation of step 4 is broken off; its record comes from the second start, and all else is the same."""
    slow = ("--eval-interval", "4", "--train-iters", "8", "--save-interval", "2")
    with runs.started(2, 0, "pause@evaluation", *slow, *TP2) as programs:
        until_step(4, *programs)
        os.kill(programs[1].process.pid, signal.SIGTERM)
        end = ended(programs)
    assert check(runs, end, "SIGTERM") == 4
    assert [record["kind"] for record in trained(runs)] == ["train"] * 4
    runs.succeeds(2, *slow, *TP2, "--load", "run")
    resumed = trained(runs)
    runs.succeeds(2, *slow, *TP2, "--save", "whole")
    assert resumed == trained(runs, "whole")


def test_a_signal_in_a_save(runs: Runs) -> None:
    with runs.started(2, 1, "pause@save", *ENDLESS, *TP2, "--save-interval", "3") as programs:
        until_step(3, *programs)
        os.kill(programs[0].process.pid, signal.SIGUSR1)
        end = ended(programs)
    assert check(runs, end, "SIGUSR1") in (3, 4)


@pytest.mark.faults
def test_a_run_that_does_not_stop_in_its_time_is_ended(runs: Runs) -> None:
    with runs.started(2, 1, "stall@5", *ENDLESS, *TP2, "--stop-deadline-minutes", "0.1") as programs:
        until_step(4, *programs)
        os.kill(programs[0].process.pid, signal.SIGTERM)
        end = ended(programs)
    assert end.codes[0] == 143
    (line,) = end.errors
    assert line.startswith(
        "error: the run was ended by SIGTERM: rank 0 got SIGTERM and had not stopped after 6 s in the "
    )
    assert ", in the step" in line


@pytest.mark.faults
def test_a_signal_where_a_rank_is_gone_is_answered_at_once(runs: Runs) -> None:
    with runs.started(2, 1, "freeze@5", *ENDLESS, *TP2) as programs:
        until_step(4, *programs)
        os.kill(programs[0].process.pid, signal.SIGTERM)
        assert programs[0].wait(60.0).returncode == 143
        assert "error: rank 1 is gone: rank 0 got SIGTERM and had not stopped after 5 s in the " in programs[0].stderr
