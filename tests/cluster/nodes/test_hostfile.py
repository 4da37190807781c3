"""Hostfiles: what is read, what is refused with file, line and text, what is made of SLURM's variables."""

from pathlib import Path

import pytest

from megatron_allattn.cluster.nodes.hostfile import (
    MOST_SLOTS,
    Host,
    main,
    read_hosts,
    slurm_hosts,
    torchrun_place,
    written,
)
from megatron_allattn.config.errors import UsageError

ALLOCATION = {"SLURM_JOB_NODELIST": "gpu[08-09],big"}


def test_hosts_and_what_is_between_them(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two hosts\n\n  node-1.example\tslots=08  \n   # not this\nnode_2 slots=1")
    hosts = read_hosts(path)
    assert hosts == [Host("node-1.example", 8), Host("node_2", 1)]
    assert written(hosts, "mpich") == "node-1.example:8\nnode_2:1\n"
    assert written(hosts, "openmpi") == written(hosts, "deepspeed") == "node-1.example slots=8\nnode_2 slots=1\n"
    assert read_hosts(Path(__file__).parents[3] / "launch" / "hostfile.example") == [Host("node1", 8), Host("node2", 8)]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("h", "'h' is not"),
        ("h slots=", "'h slots=' is not"),
        ("h slots=x", "'h slots=x' is not"),
        ("h slots=0", "'h slots=0' is not"),
        ("h slots=-1", "'h slots=-1' is not"),
        ("h slots=1.5", "'h slots=1.5' is not"),
        ("h slots=٣", "'h slots=٣' is not"),
        (f"h slots={MOST_SLOTS + 1}", "is not"),
        (f"h slots={10**30}", "is not"),
        ("h slots=1 # eight", "'h slots=1 # eight' is not"),
        ("h slots=1\r", "'h slots=1?' is not"),
        ("::1 slots=1", "'::1 slots=1' is not"),
        ("user@h slots=1", "'user@h slots=1' is not"),
        ("h;touch${IFS}canary slots=1", "'h;touch${IFS}canary slots=1' is not"),
        ("$(touch canary) slots=1", "'$(touch canary) slots=1' is not"),
        ("`id` slots=1", "'`id` slots=1' is not"),
        ("-oProxyCommand=x slots=1", "'-oProxyCommand=x slots=1' is not"),
        ("h\x1b[2J slots=1", "'h?[2J slots=1' is not"),
        ("h\0 slots=1", "'h? slots=1' is not"),
        ("ok slots=2", "ok is there twice; give it one line"),
        ("ok.domain slots=2", "ok.domain is ok, which is there already; give it one line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"ok slots=1\n\n{line}\n", newline="")
    with pytest.raises(UsageError) as error:
        read_hosts(path)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert text in str(error.value)


def test_no_file_no_hosts_no_text(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with pytest.raises(UsageError, match=r"^HOSTFILE .*hosts: no such file; see launch/hostfile.example$"):
        read_hosts(path)
    path.write_text("# nobody\n")
    with pytest.raises(UsageError, match="names no host"):
        read_hosts(path)
    path.write_bytes(b"\xff\xfe slots=1\n")
    with pytest.raises(UsageError, match=r"line 1: '\\xff\\xfe slots=1' is not"):
        read_hosts(path)
    with pytest.raises(UsageError, match="not a regular file"):
        read_hosts(tmp_path)


@pytest.mark.parametrize(
    ("variables", "slots", "counts"),
    [
        ({"SLURM_TASKS_PER_NODE": "8(x2),4"}, None, [8, 8, 4]),
        ({"SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_GPUS_PER_NODE": "4"}, None, [4, 4, 4]),
        ({"SLURM_GPUS_PER_NODE": "h100:4"}, None, [4, 4, 4]),
        ({"SLURM_GPUS_PER_NODE": "a100:2,h100:6"}, None, [8, 8, 8]),
        ({"SLURM_GPUS_PER_NODE": "4"}, 2, [2, 2, 2]),
        ({}, 8, [8, 8, 8]),
    ],
)
def test_the_nodes_of_an_allocation(variables: dict[str, str], slots: int | None, counts: list[int]) -> None:
    hosts = slurm_hosts(ALLOCATION | variables, slots)
    assert [host.name for host in hosts] == ["gpu08", "gpu09", "big"]
    assert [host.slots for host in hosts] == counts


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "SLURM_JOB_NODELIST is not set; start it within a job"),
        (ALLOCATION, "neither SLURM_GPUS_PER_NODE nor SLURM_TASKS_PER_NODE is set; set GPUS_PER_NODE"),
        (
            ALLOCATION | {"SLURM_TASKS_PER_NODE": "8"},
            "3 nodes in SLURM_JOB_NODELIST=gpu[08-09],big, but ranks for 1 (8)",
        ),
        (ALLOCATION | {"SLURM_GPUS_PER_NODE": "0"}, "ranks for 3 (0,0,0)"),
        (ALLOCATION | {"SLURM_GPUS_PER_NODE": "many"}, "SLURM_GPUS_PER_NODE many: not a number of GPUs"),
        (
            ALLOCATION | {"SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_GPUS_ON_NODE": "8"},
            "SLURM_TASKS_PER_NODE 1(x3): a node has 8 GPUs (SLURM_GPUS_ON_NODE): which is meant?; set GPUS_PER_NODE",
        ),
        ({"SLURM_JOB_NODELIST": "$(id)", "SLURM_TASKS_PER_NODE": "1"}, "SLURM_JOB_NODELIST $(id): not a list of hosts"),
    ],
)
def test_an_allocation_that_says_too_little(variables: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as error:
        slurm_hosts(variables)
    assert words in str(error.value)


def test_the_place_of_a_node_for_torchrun() -> None:
    hosts = [Host("n1.cluster.local", 8), Host("n2.cluster.local", 4)]
    assert torchrun_place(hosts, "n2") == (2, 1, 4, "n1.cluster.local")
    with pytest.raises(UsageError, match=r"this host, n3, is not in it"):
        torchrun_place(hosts, "n3")


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts"
    path.write_text("n1 slots=8\nn2 slots=4\n")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    said = {form: (main([form, str(path)]), capsys.readouterr().out) for form in ("mpich", "count", "torchrun")}
    assert said == {"mpich": (0, "n1:8\nn2:4\n"), "count": (0, "12\n"), "torchrun": (0, "2 1 4 n1\n")}
    for name in ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_GPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["deepspeed", "slurm"]) == 2
    assert capsys.readouterr().err.startswith("error: HOSTFILE=slurm: SLURM_JOB_NODELIST is not set")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert main(["deepspeed", "slurm", "--gpus-per-node", "3"]) == 0
    assert capsys.readouterr().out == "n1 slots=3\nn2 slots=3\n"
    assert main(["deepspeed", str(path), "--gpus-per-node", "3"]) == 2
    assert "the file says how many" in capsys.readouterr().err
