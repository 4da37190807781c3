"""What a node tells of itself: memory, paths, ports, storage; and its report, there and back."""

import json
import os
import socket
from pathlib import Path

import pytest

from megatron_allattn.cluster.nodes import local, storage
from megatron_allattn.cluster.nodes.checks import Check
from megatron_allattn.cluster.nodes.devices import Devices
from megatron_allattn.cluster.nodes.local import (
    GIB,
    Asked,
    NodeReport,
    address_check,
    available_bytes,
    memory_check,
    need_check,
    port_check,
)
from megatron_allattn.cluster.nodes.storage import storage_check
from megatron_allattn.cluster.nodes.versions import source_hash, versions
from megatron_allattn.config.errors import UsageError

REPORT = NodeReport(
    node="n1",
    checks=(Check(name="a", node="n1", status="fault", found="1", asked="2", way_out="z"),),
    facts={"python": "3.11"},
    time=5.0,
)


def system(root: Path, available_kb: int, groups: dict[str, tuple[str, str]]) -> Path:
    """A machine's files: memory, and control groups (path → limit and what is used) of which the last is our own."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kb} kB\n")
    for group, (limit, used) in groups.items():
        folder = root / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(used)
    (root / "proc/self/cgroup").write_text(f"0::/{list(groups)[-1] if groups else ''}\n")
    return root


def test_memory_is_what_the_kernel_and_every_control_group_allow(tmp_path: Path) -> None:
    assert available_bytes(system(tmp_path / "a", 4 * 2**20, {})) == 4 * GIB
    job = {"job": (str(3 * GIB), str(1 * GIB)), "job/step": ("max", str(GIB))}
    assert available_bytes(system(tmp_path / "b", 4 * 2**20, job)) == 2 * GIB
    assert available_bytes(tmp_path / "nothing") is None


def test_memory_asked_for() -> None:
    assert memory_check("n1", 8.0 * GIB, Asked(ranks=8)).status == "ok"
    assert memory_check("n1", 7.9 * GIB, Asked(ranks=8)).status == "fault"
    assert memory_check("n1", 7.9 * GIB, Asked(ranks=8, host_bytes=GIB)).status == "ok"
    assert memory_check("n1", None, Asked()).status == "unchecked"


def test_paths_that_are_needed(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    found = [
        (check.status, check.found)
        for check in (need_check("n1", tmp_path / name) for name in ("there", "no", "dangling"))
    ]
    assert found == [("ok", "is there"), ("fault", "is not there"), ("fault", "cannot be read")]


def test_the_port_is_looked_at_on_the_first_node_alone() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        nodes = {"SLURM_JOB_NODELIST": "n[1-2]"}
        found = [port_check(node, port, nodes).status for node in ("n1", "n1.cluster.local", "n2")]
        assert found == ["fault", "fault", "unchecked"]
        assert port_check("anything", port, {}).status == "fault"
    assert port_check("n1", port, nodes).status == "ok"


@pytest.mark.parametrize(
    ("address", "variables", "status"),
    [
        ("127.0.1.1", {}, "fault"),
        ("10.0.0.5", {}, "ok"),
        (None, {}, "fault"),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, "ok"),
    ],
)
def test_a_name_that_others_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, address: str | None, variables: dict[str, str], status: str
) -> None:
    """As Debian's installer leaves it: gloo would listen where no other node can reach it."""

    def resolve(name: str) -> str:
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert address_check("n1", variables).status == status


def test_a_folder_takes_files_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage_check("n1", tmp_path).status == "ok"
    assert list(tmp_path.iterdir()) == []
    missing = storage_check("n1", tmp_path / "no")
    assert (missing.status, missing.found.split(" (")[0]) == ("fault", "No such file or directory")
    # one that says it has written, and has not
    monkeypatch.setattr(storage.os, "replace", lambda source, target: None)
    (tmp_path / "stale").mkdir()
    broken = storage_check("n1", tmp_path / "stale")
    assert broken.status == "fault"


def test_versions_and_the_projects_own_files(tmp_path: Path) -> None:
    facts, checks = versions("n1", Devices({"torch": "2.13.0", "cuda": "12", "devices": []}, driver="570"))
    assert checks == []
    assert facts["torch"] == "2.13.0" and facts["driver"] == "570" and "CUDA" not in facts
    assert facts["project"].endswith(f"({source_hash()[:12]})")
    (tmp_path / "megatron_allattn").mkdir()
    (tmp_path / "pretrain.py").write_text("1")
    first = source_hash(tmp_path)
    (tmp_path / "megatron_allattn" / "a.py").write_text("2")
    second = source_hash(tmp_path)
    (tmp_path / "megatron_allattn" / "notes.txt").write_text("3")
    assert first != second == source_hash(tmp_path)


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_allattn.cluster.nodes.versions.PACKAGES", ("no-such-package",))
    _, checks = versions("n1", Devices())
    assert [(check.name, check.status) for check in checks] == [("no-such-package", "fault")]


def test_a_report_there_and_back(tmp_path: Path) -> None:
    assert REPORT.write(tmp_path) == tmp_path / "n1.json"
    assert REPORT.write(tmp_path / "other.json") == tmp_path / "other.json"
    assert NodeReport.read(tmp_path / "n1.json") == NodeReport.read(tmp_path / "other.json") == REPORT
    assert json.loads((tmp_path / "n1.json").read_text())["go"] is REPORT.go is False


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"node": 3},
        {"checks": [{"name": "a"}]},
        {"checks": [{"name": "a", "node": "n1", "status": "good", "found": ""}]},
        {"checks": [{"name": "a", "node": "n1", "status": "fault", "found": ""}]},
        {"facts": ["python"]},
        {"time": None},
    ],
)
def test_what_is_no_report(tmp_path: Path, change: dict[str, object]) -> None:
    path = REPORT.write(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=r"^node report .*n1.json: is"):
        NodeReport.read(path)


def test_examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that was asked stands in the report, and a node that lacks something is a no-go."""
    monkeypatch.setattr(local.devices, "look", lambda seconds: Devices({"torch": "2.13.0", "devices": []}))
    environ = {"SLURMD_NODENAME": "n7", "DS_ACCELERATOR": "cpu"}
    report = local.examine(Asked(need=(tmp_path,), shared=tmp_path, port=1, host_bytes=1), environ)
    names = [check.name for check in report.checks]
    assert names == ["devices", "host memory", str(tmp_path), "shared folder", "port 1"]
    assert report.node == "n7" and report.facts["torch"] == "2.13.0"
    assert local.examine(Asked(host_bytes=1), environ).go
    assert not local.examine(Asked(host_bytes=1, need=(tmp_path / "no",)), environ).go
    assert os.listdir(tmp_path) == []
