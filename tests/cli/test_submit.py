"""launch/submit.py: checked, printed, and submitted only when asked."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, TINY, environment

SUBMIT = str(ROOT / "launch" / "submit.py")
SIZE = ("--nodes", "2", "--gpus-per-node", "2")
RUN = (*TINY, "--vocab-size", "64", "--tokenizer-type", "null", "--data-path", "corpus", "--save", "run")
PAGE = (ROOT / "docs" / "cookbook" / "slurm.md").read_text()


def submit(folder: Path, *words: str, code: int = 0, sbatch: str | None = None) -> tuple[str, str]:
    """What it prints, on both streams. sbatch: a script that stands in for it; without one there is none."""
    path = folder / "bin"
    path.mkdir(exist_ok=True)
    if sbatch is not None:
        (path / "sbatch").write_text(sbatch)
        (path / "sbatch").chmod(0o755)
    env = environment({"PATH": f"{path}:/nowhere"})
    done = subprocess.run(
        [sys.executable, SUBMIT, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_it_is_a_dry_run_unless_asked(tmp_path: Path) -> None:
    output, errors = submit(tmp_path, *SIZE, "--partition=long", *RUN, "--tensor-model-parallel-size", "2", "--dry-run")
    assert errors == "" and output.endswith("# not submitted: add --submit\n")
    assert "# no save was measured yet: told to stop 660 s before its end\n" in output
    assert "# met: 4 ranks, " in output and "the step ends on every rank\n" in output
    assert "\n#SBATCH --nodes=2\n" in output and "\n#SBATCH --partition=long\n" in output
    assert f'\narguments=({shlex.join([*RUN, "--tensor-model-parallel-size", "2"])} "$@")\n' in output
    assert sorted(os.listdir(tmp_path)) == ["bin"]


def test_it_submits_the_script_that_it_leaves_in_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/pace.json").write_text('{"saves": [{"step": 1, "seconds": 400.5, "processes": 4}]}')
    output, errors = submit(tmp_path, *SIZE, *RUN, "--submit", sbatch='#!/bin/sh\necho "Submitted batch job $1"\n')
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


def test_a_refusal_of_sbatch_is_its_exit_code(tmp_path: Path) -> None:
    refusal = "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n"
    _, errors = submit(tmp_path, *SIZE, *RUN, "--submit", sbatch=refusal, code=1)
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
def test_what_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    output, errors = submit(tmp_path, *words, code=2)
    assert errors.startswith(f"error: {message}") and errors.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["bin"] and "Submitted" not in output


def test_the_cookbooks_commands(tmp_path: Path) -> None:
    """Those of docs/cookbook/slurm.md, for the job that it speaks of."""
    commands = re.findall(r"^    python launch/submit\.py (.*)$", PAGE, re.M)
    assert len(commands) == 2 and commands[1] == f"{commands[0]} --submit"
    output, _ = submit(tmp_path, *shlex.split(commands[0]))
    assert "\n#SBATCH --nodes=8\n" in output and "--recipe enwik8-large" in output
    by_hand = re.search(r"`sbatch launch/pretrain\.sbatch (.*?)`", PAGE, re.S)
    assert by_hand is not None and by_hand[1].split() == commands[0].split()[6:]
