"""pretrain.py's arguments in each life of a job."""

from pathlib import Path

import pytest

from megatron_allattn.checkpoint.folder import begin, commit
from megatron_allattn.cluster.jobs.arguments import submitted
from megatron_allattn.config import UsageError, parse


def test_a_life_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    run = str(tmp_path / "a $run")
    for words in (["--save", run], [f"--save={run}"], ["--save", run, "--load", run], [f"--load={run}", "--save", run]):
        found = submitted(["--num-layers", "3", *words]).of_life(660)
        checkpoint = parse(found)[0].checkpoint
        assert checkpoint.goes_on and checkpoint.save == Path(run)
        assert found[:2] == ("--num-layers", "3")


def test_another_run_to_start_from_holds_until_there_is_a_checkpoint(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    job = submitted(["--load", str(other), "--save", str(run), "--bf16"])
    assert job.of_life(660) == job.arguments
    commit(begin(run, 5), 5)
    assert job.of_life(None) == ("--save", str(run), "--bf16", "--load", str(run))


@pytest.mark.parametrize(("signal", "minutes"), [(None, 10), (660, 10), (630, 10), (600, 9.5), (120, 1.5), (40, 1 / 3)])
def test_a_save_is_given_up_before_the_time_is_up(tmp_path: Path, signal: int | None, minutes: float) -> None:
    """So that the job is requeued, and does not end at its time limit."""
    words = ["--save", str(tmp_path / "run")]
    found = parse(submitted(words).of_life(signal))[0].checkpoint.stop_deadline_minutes
    assert found == pytest.approx(minutes, rel=1e-4)
    own = parse(submitted([*words, "--stop-deadline-minutes", "7"]).of_life(signal))[0]
    assert own.checkpoint.stop_deadline_minutes == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bf16"], "--save '': a job that lives again needs a run folder that all nodes see; give --save DIR"),
        (["--save", "a\\b"], "srun cannot write the ranks' output below such a name"),
        (["--save", "a\nb"], "srun cannot write the ranks' output below such a name"),
        (["--save", "run", "--lr", "fast"], "--lr fast: must be a number"),
        (["--save", "run", "--sve", "x"], "--sve: unknown flag; did you mean --save"),
    ],
)
def test_mistakes_are_told_before_anything_is_queued(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        submitted(words)
    assert message in str(error.value)
