"""The programs with an output that goes away (`| head`), that is full, or that is closed from the start."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import PRETRAIN, ROOT, TINY, corpus, environment, outcome, records

STEPS = 12
RUN = [PRETRAIN, *TINY, "--train-iters", str(STEPS), "--eval-iters", "1", "--log-interval", "1", "--data-path", "byte1"]


def shell(folder: Path, *words: str, then: str) -> tuple[int, str, str]:
    """Exit code of a Python program, whose output a shell treats in this way, what came through, and its stderr."""
    line = f"{shlex.join([sys.executable, *words])} {then}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment(), capture_output=True, timeout=200)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a run whose reader left after the first line, and what it said on stderr."""
    folder = tmp_path_factory.mktemp("trained")
    corpus(folder)
    code, out, err = shell(folder, *RUN, "--save", "run", then="| head -n 1")
    assert (code, out.split()[0]) == (0, "model")
    return folder, err


def check_whole(run_folder: Path) -> None:
    kinds = [record["kind"] for record in records(run_folder)]
    assert kinds == [*["train"] * STEPS, "valid", "test"]
    assert outcome(run_folder)["outcome"] == "done"
    assert (run_folder / "checkpoints" / f"step_{STEPS:08d}" / "COMPLETE").is_file()
    assert not (run_folder / "lock").exists()


def test_a_run_outlives_its_reader(trained: tuple[Path, str]) -> None:
    folder, err = trained
    assert err == "warning: standard output failed and gets no more lines (Broken pipe)\n"
    check_whole(folder / "run")


def test_a_run_without_any_output(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    assert shell(folder, *RUN, "--save", "silent", then=">&- 2>&-") == (0, "", "")
    check_whole(folder / "silent")


@pytest.mark.parametrize("flags", [["--recipe", "list"], ["--help"]])
def test_what_pretrain_prints(tmp_path: Path, flags: list[str]) -> None:
    code, out, err = shell(tmp_path, PRETRAIN, *flags, then="| head -n 1")
    assert (code, out.count("\n"), err) == (0, 1, "")
    assert shell(tmp_path, PRETRAIN, *flags, then="> /dev/full") == (
        *(1, ""),
        "error: standard output: No space left on device\n",
    )


@pytest.mark.parametrize(
    "words",
    [
        ["inspect_checkpoint.py", "run"],
        ["evaluate.py", "--load", "run", "--no-code-protocol", "--split-name", "test"],
        ["verify_reference.py", str(ROOT / "tests" / "data" / "reference" / "all_attention.npz")],
    ],
    ids=lambda words: words[0],
)
def test_tools(trained: tuple[Path, str], words: list[str]) -> None:
    folder, tool = trained[0], [str(ROOT / "tools" / words[0]), *words[1:]]
    assert shell(folder, *tool, then="> /dev/full") == (1, "", "error: standard output: No space left on device\n")


def test_a_tool_outlives_its_reader(trained: tuple[Path, str]) -> None:
    tool = [str(ROOT / "tools" / "inspect_checkpoint.py"), "run", "--json"]
    assert shell(trained[0], *tool, then="| true") == (0, "", "")
