"""The tools in the process of the test."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

Tool = Callable[..., tuple[int, str, str]]
"""(arguments) → exit code, stdout, stderr"""


def in_process(path: Path, capsys: pytest.CaptureFixture[str]) -> Tool:
    main = runpy.run_path(str(path))["main"]

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call
