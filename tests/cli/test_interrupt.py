"""Ctrl-C while a program loads torch, which takes seconds: one line and exit code 1, as later on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import PRETRAIN, ROOT, environment


@pytest.mark.parametrize(
    "words",
    [
        [PRETRAIN, "--train-iters", "1"],
        ["tools/evaluate.py", "--load", "run"],
        ["tools/generate.py", "--load", "run", "--prompt", "a"],
        ["tools/benchmark.py", "layer"],
        ["tools/verify_reference.py", "case.npz"],
        ["tools/convert_checkpoint.py", "--from", "adaptive-span", "a.pt", "--output", "run"],
    ],
    ids=lambda words: Path(words[0]).stem,
)
def test_while_torch_is_loaded(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=tmp_path, env=environment(path), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: interrupted\n")
