"""GPUs of a node, as torch and nvidia-smi tell of them: what is a fault, and programs that do not answer."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.cluster.nodes import devices
from megatron_allattn.cluster.nodes.checks import Check
from megatron_allattn.cluster.nodes.devices import GIB, Devices, Mute, answer, device_checks, look

HEALTHY = ("0", "No", "No", "No")


def gpus(count: int, **changes: Any) -> dict[str, Any]:
    """What the probe tells of so many; changes: of the last one."""
    one = {"name": "H100", "total": 80 * GIB, "free": 79 * GIB, "fails": ""}
    return {"torch": "2.13.0", "devices": [*[one] * (count - 1), one | changes] if count else []}


def rows(*health: Sequence[str]) -> list[tuple[str, ...]]:
    return [(str(index), "570.1", *values) for index, values in enumerate(health)]


def statuses(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def test_eight_healthy_ones() -> None:
    found = Devices(gpus(8), health=rows(*[HEALTHY] * 8))
    checks = device_checks(found, "n1", 8, None, False)
    assert statuses(checks) == dict.fromkeys(("devices", "GPU memory", "GPU computes", "GPU health"), "ok")
    assert checks[0].found == "8 × H100"


@pytest.mark.parametrize(
    ("found", "name", "words"),
    [
        (Devices(gpus(7), health=rows(*[HEALTHY] * 7)), "devices", "7 × H100"),
        (Devices(gpus(8, free=60 * GIB)), "GPU memory", "at least 60.0 GiB free of 80.0 GiB"),
        (
            Devices(gpus(8, fails="CUDA error: an illegal access")),
            "GPU computes",
            "GPU 7: CUDA error: an illegal access",
        ),
        (
            Devices(gpus(8), health=rows(HEALTHY, ("2", *HEALTHY[1:]))),
            "GPU health",
            "GPU 1: uncorrected memory errors: 2",
        ),
        (Devices(gpus(8), health=rows(("0", "Yes", "No", "No"))), "GPU health", "GPU 0: pages to retire: Yes"),
        (Devices(gpus(8), health=rows(("0", "No", "Yes", "No"))), "GPU health", "GPU 0: rows to remap: Yes"),
        (Devices(gpus(8), mute="no answer within 60 s"), "GPU health", "nvidia-smi: no answer within 60 s"),
        (Devices({}, trouble="exit code 1: no libcudart"), "torch loads", "exit code 1: no libcudart"),
        (Devices(gpus(0)), "devices", "torch sees no GPU"),
    ],
)
def test_faults(found: Devices, name: str, words: str) -> None:
    faults = [check for check in device_checks(found, "n1", 8, None, False) if check.status == "fault"]
    assert [(check.name, check.found, check.node) for check in faults] == [(name, words, "n1")]
    assert faults[0].way_out


def test_memory_that_is_asked_for() -> None:
    found = Devices(gpus(8, free=60 * GIB))
    assert statuses(device_checks(found, "n1", 8, 50 * GIB, False))["GPU memory"] == "ok"
    assert statuses(device_checks(found, "n1", 8, 61 * GIB, False))["GPU memory"] == "fault"


def test_what_cannot_be_looked_at_is_said() -> None:
    """No GPU and none asked for; ranks that are to use the CPU; counters that a card does not have."""
    assert statuses(device_checks(Devices(gpus(0)), "n1", None, None, False)) == {"devices": "unchecked"}
    assert statuses(device_checks(Devices(gpus(8)), "n1", 8, None, True)) == {"devices": "unchecked"}
    without = Devices(gpus(8), health=rows(("[N/A]", "[N/A]", "[Not Supported]", "[N/A]")))
    assert statuses(device_checks(without, "n1", 8, None, False))["GPU health"] == "unchecked"
    assert statuses(device_checks(Devices(gpus(8)), "n1", 8, None, False))["GPU health"] == "unchecked"


def test_programs_that_do_not_answer() -> None:
    begin = time.monotonic()
    with pytest.raises(Mute, match=r"^no answer within 0.3 s$"):
        answer((sys.executable, "-c", "import time; time.sleep(60)"), 0.3)
    assert time.monotonic() - begin < 20
    with pytest.raises(Mute, match=r"^exit code 3: what it said$"):
        answer((sys.executable, "-c", "import sys; print('what it\\nsaid', file=sys.stderr); sys.exit(3)"), 60)
    with pytest.raises(Mute, match="cannot be started"):
        answer(("/no/such/program",), 1)


def test_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi is asked two things, and its rows are put together; a probe that says nothing is trouble."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase "$1" in --query-gpu*) echo "0, 570.1, 0, No"; echo "1, 570.1, 4, No";; '
        '*) echo "No, No"; echo "Yes, No";; esac\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(devices, "PROBE", (sys.executable, "-c", "print('hello'); print('{\"torch\": \"9\"}')"))
    found = look(60)
    assert (found.torch, found.driver, found.trouble) == ({"torch": "9"}, "570.1", "")
    assert found.health == [("0", "570.1", "0", "No", "No", "No"), ("1", "570.1", "4", "No", "Yes", "No")]
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    monkeypatch.setattr(devices, "PROBE", (sys.executable, "-c", "print('nothing')"))
    found = look(60)
    assert found.mute == "exit code 9: NVIDIA-SMI has failed" and found.trouble
