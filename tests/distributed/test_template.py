"""The interpreter that forks the tests' programs."""

import os
from pathlib import Path

import pytest

from tests.support.commands import environment
from tests.support.template import Child, Template

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


def _program(template: Template, folder: Path, code: str) -> Child:
    (folder / "program.py").write_text(code)
    return template.program([str(folder / "program.py")], folder, environment(), (os.devnull, os.devnull))


def test_a_number_that_comes_again_is_another_process(template: Template, tmp_path: Path) -> None:
    """Linux counts to 32,768 by default: on a busy machine within the hour."""
    first = _program(template, tmp_path, "raise SystemExit(7)")
    assert first.wait() == 7 == first.poll()
    for _ in range(50):
        try:
            LAST_PID.write_text(str(first.pid - 1))
        except OSError:
            pytest.skip(f"{LAST_PID} cannot be written here")
        again = _program(template, tmp_path, "import time; time.sleep(0.5)")
        if again.pid == first.pid:
            assert again.poll() is None and again.wait() == 0
            return
        again.wait()
    pytest.skip(f"others were given the number {first.pid} fifty times")
