"""What is checked before any work."""

from pathlib import Path

import pytest

from megatron_allattn.config.checks import check_output
from megatron_allattn.config.errors import UsageError


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    check_output("--json", None)
    check_output("--json", tmp_path / "a.json")
    with pytest.raises(UsageError, match=r"^--json .*: is a folder; name a file"):
        check_output("--json", tmp_path)
    with pytest.raises(UsageError, match=r"^--json .*no/a.json: the folder .*no does not exist; name a file"):
        check_output("--json", tmp_path / "no" / "a.json")
    with pytest.raises(UsageError, match=r"^--json /proc/a.json: cannot be written \(.*\); name a file"):
        check_output("--json", Path("/proc/a.json"))
    assert list(tmp_path.iterdir()) == []
