"""launch/submit.py: checked, printed, and submitted only when asked."""

import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_allattn.cluster.jobs.arguments import submitted
from tests.support.commands import ROOT, TINY

SUBMIT = runpy.run_path(str(ROOT / "launch" / "submit.py"))
SIZE = ("--nodes", "2", "--gpus-per-node", "2")
RUN = (*TINY, "--vocab-size", "64", "--tokenizer-type", "null", "--data-path", "corpus", "--save", "run")
NO_DATA = "--data-path corpus: corpus.bin is not there; prepare it first"
PAGE = (ROOT / "docs" / "cookbook" / "slurm.md").read_text()
Submit = Callable[..., tuple[str, str]]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Submit:
    """What it prints, on both streams. sbatch: a script that stands in for it; without one there is none."""
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{path}:/nowhere")
    monkeypatch.setenv("PYTHON", sys.executable)

    def call(*words: str, code: int = 0, sbatch: str | None = None) -> tuple[str, str]:
        if sbatch is not None:
            (path / "sbatch").write_text(sbatch)
            (path / "sbatch").chmod(0o755)
        capfd.readouterr()
        assert SUBMIT["main"](list(words)) == code
        return capfd.readouterr()

    return call


def test_it_is_a_dry_run_unless_asked(submit: Submit, tmp_path: Path) -> None:
    output, errors = submit(*SIZE, "--partition=long", *RUN, "--tensor-model-parallel-size", "2", "--dry-run")
    assert errors == "" and output.endswith("# not submitted: add --submit\n")
    assert "# no save was measured yet: told to stop 660 s before its end\n" in output
    assert "# met: 4 ranks, " in output and "the step ends on every rank\n" in output
    assert f"# {NO_DATA}\n" in output
    assert "\n#SBATCH --nodes=2\n" in output and "\n#SBATCH --partition=long\n" in output
    assert f'\narguments=({shlex.join([*RUN, "--tensor-model-parallel-size", "2"])} "$@")\n' in output
    assert sorted(os.listdir(tmp_path)) == ["bin"]


def test_it_submits_the_script_that_it_leaves_in_the_run_folder(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/pace.json").write_text('{"saves": [{"step": 1, "seconds": 400.5, "processes": 4}]}')
    output, errors = submit(*SIZE, *RUN, "--submit", sbatch='#!/bin/sh\necho "Submitted batch job $1"\n')
    assert "#SBATCH --signal=B:USR1@900\n" in output
    assert (
        "# the longest save has taken 400.5 s and the longest step 0.0 s: told to stop 900 s before its end\n" in output
    )
    assert (
        "# the longest save has taken 400.5 s and the longest step 0.0 s: --stop-deadline-minutes 10 may end" in output
    )
    assert output.endswith("Submitted batch job run/jobs/job.sbatch\n") and errors == ""
    script = (tmp_path / "run/jobs/job.sbatch").read_text()
    assert script in output and script.startswith("#!/usr/bin/env bash\n")


def test_the_jobs_python_is_the_one_that_has_checked_it(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "/elsewhere/bin/python")
    told = f"the job would run /elsewhere/bin/python, not {sys.executable}: activate this one's environment first"
    assert told in submit(*SIZE, *RUN)[0]
    _, errors = submit(*SIZE, *RUN, "--submit", sbatch="#!/bin/sh\nexit 0\n", code=2)
    assert errors.startswith(f"error: --submit: {told}")


def test_a_job_without_its_data_is_not_submitted(submit: Submit, tmp_path: Path) -> None:
    _, errors = submit(*SIZE, *RUN, "--submit", sbatch="#!/bin/sh\nexit 0\n", code=2)
    assert errors == f"error: {NO_DATA}\n" and not (tmp_path / "run").exists()


def test_a_refusal_of_sbatch_is_its_exit_code(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").touch()
    refusal = "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n"
    _, errors = submit(*SIZE, *RUN, "--submit", sbatch=refusal, code=1)
    assert errors == "sbatch: error: invalid partition\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*SIZE, *RUN, "--submit"), "--submit sbatch: there is no such program here"),
        ((*SIZE, *RUN, "--submit", "--dry-run"), "--submit: contradicts --dry-run"),
        ((*SIZE, *RUN, "--tensor-model-parallel-size", "8"), "--tensor-model-parallel-size 8"),
        ((*SIZE, *RUN, "--micro-batch-size", "3"), "--global-batch-size"),
        ((*SIZE, *RUN, "--num-layer", "3"), "--num-layer: unknown flag; did you mean --num-layers?"),
        ((*SIZE, *RUN[:-2]), "--save '': a job that lives again needs a run folder"),
        ((*SIZE, *RUN, "--gpu", "h99"), "--gpu h99"),
        ((*SIZE, *RUN, "--time", "10"), "--time 10: is 600 s, and the job would be told to stop 660 s before"),
        ((*SIZE, *RUN, "--nodes", "3"), "flag --nodes: is given twice"),
        (("--nodes", "0", *RUN), "argument --nodes: '0': must be an integer from 1"),
        ((*SIZE, *RUN, "--partition", "a b"), "--partition a b: must be one word"),
    ],
)
def test_what_is_refused(submit: Submit, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    output, errors = submit(*words, code=2)
    assert errors.startswith(f"error: {message}") and errors.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["bin"] and "Submitted" not in output


def test_the_cookbooks_commands() -> None:
    """Those of docs/cookbook/slurm.md, for the job that it speaks of."""
    commands = re.findall(r"^    python launch/submit\.py (.*)$", PAGE, re.M)
    assert len(commands) == 2 and commands[1] == f"{commands[0]} --submit"
    parser = SUBMIT["_parser"]()
    own, others = parser.split(shlex.split(commands[1]))
    options, _ = SUBMIT["options_of"](parser.parse_args(own), submitted(others))
    assert (options.nodes, options.gpus_per_node, options.time) == (8, 8, "24:00:00")
    assert others == ["--recipe", "enwik8-large", "--save", "runs/enwik8-large"]
    by_hand = re.search(r"`sbatch launch/pretrain\.sbatch (.*?)`", PAGE, re.S)
    assert by_hand is not None and by_hand[1].split() == others
