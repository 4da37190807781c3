"""Training starts without torch's compiler, which takes as long to load as everything else together."""

import sys
from pathlib import Path

import pytest

from tests.support.commands import PRETRAIN, TINY, corpus, run


@pytest.mark.parametrize("flags", [("--zero-stage", "1"), ("--zero-stage", "0", "--optimizer", "adagrad", "--bf16")])
def test_the_compiler_is_not_loaded(flags: tuple[str, ...], tmp_path: Path) -> None:
    data = corpus(tmp_path)
    command = [sys.executable, "-X", "importtime", PRETRAIN, *TINY, "--train-iters", "1", "--data-path", str(data)]
    done = run(*command, *flags, folder=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and {"torch", "deepspeed"} <= imported
    assert imported.isdisjoint({"torch._dynamo", "torch._inductor", "sympy"})
