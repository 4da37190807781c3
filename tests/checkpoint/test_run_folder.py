"""How a run has ended, as written and read: outcome.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.checkpoint.run_folder import Outcome, read_outcome
from megatron_allattn.config import UsageError

DONE = {"outcome": "done", "step": 20, "reason": "reached --train-iters"}


def leave(folder: Path, content: Any) -> Path:
    (folder / "outcome.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_what_is_written(tmp_path: Path) -> None:
    """The three keys that batch scripts and other programs rely on."""
    Outcome(how="done", step=20, reason="reached --train-iters").write(tmp_path)
    assert json.loads((tmp_path / "outcome.json").read_text()) == DONE
    Outcome(how="failed", step=None, reason="port\nin use: „29500“").write(tmp_path)
    told = {"outcome": "failed", "step": None, "reason": "port\nin use: „29500“"}
    assert json.loads((tmp_path / "outcome.json").read_text()) == told


@pytest.mark.parametrize("how", ["done", "stopped", "guard", "failed"])
@pytest.mark.parametrize("step", [20, None])
def test_what_is_read(tmp_path: Path, how: Any, step: int | None) -> None:
    leave(tmp_path, {"reason": "a\nb", "outcome": how, "step": step, "host": "n1"})
    assert read_outcome(tmp_path) == Outcome(how=how, step=step, reason="a\nb")


def test_a_run_that_has_not_ended_has_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [read_outcome(tmp_path / name) for name in ("", "absent", "file")] == [None] * 3


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("", "is not JSON"),
        ('{"outcome": "do', "is not JSON"),
        ("[]", "holds no object"),
        ({}, "has outcome None, expected one of done, stopped, guard, failed"),
        (DONE | {"outcome": "fine"}, "has outcome 'fine', expected one of done"),
        (DONE | {"outcome": ["done"]}, r"has outcome \['done'\], expected one of done"),
        (DONE | {"outcome": "x" * 999}, "has outcome 'x{39}, expected"),
        (DONE | {"step": "20"}, "a step that is no integer"),
        (DONE | {"step": True}, "a step that is no integer"),
        (DONE | {"step": 20.0}, "a step that is no integer"),
        (DONE | {"reason": None}, "has no reason in words"),
        ({"outcome": "done"}, "has no reason in words"),
    ],
)
def test_what_no_run_writes_is_refused_by_name(tmp_path: Path, content: Any, rule: str) -> None:
    with pytest.raises(UsageError, match=rf"^file {tmp_path}/outcome\.json: .*{rule}.*; move it away$"):
        read_outcome(leave(tmp_path, content))


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").mkdir()
    with pytest.raises(UsageError, match=rf"^file {tmp_path}/outcome\.json: "):
        read_outcome(tmp_path)
