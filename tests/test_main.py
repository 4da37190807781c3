"""`python -m megatron_allattn` names every program; examples of --help are tests/test_documentation.py's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_allattn.__main__ import main, purpose
from tests.support.template import ROOT

TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py"))


def test_every_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    output = capsys.readouterr().out
    for name in ("pretrain.py", "launch/submit.py", *(f"tools/{tool}" for tool in TOOLS)):
        assert len(re.findall(rf"^  {re.escape(name)}  +\S.{{20,}}$", output, re.MULTILINE)) == 1, name
    assert re.search(r"^\d+ recipes: ", output, re.MULTILINE)
    assert re.search(r"torch \d", output)
    for path in re.findall(r"docs/\S+", output):
        assert (ROOT / path).exists(), path


def test_the_first_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Does this and\nthat. And more.\n\nMuch more."""\n')
    assert purpose(tmp_path / "a.py") == "Does this and that"


@pytest.mark.parametrize("program", ["tools/report.py", "launch/hostfile.py", "launch/launcher.py", "launch/rank.py"])
def test_help_ends_well(program: str) -> None:
    """And has the examples of the docstring."""
    command = [sys.executable, str(ROOT / program), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and f"    python {program} " in done.stdout
