"""tools/preflight.py as ranks, as nodes and over reports: what it prints, what it exits with, and that it never hangs.

Nodes are told apart by SLURMD_NODENAME, so that several of them are on this machine.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.cluster.nodes import devices
from megatron_allattn.parallel.addresses import free_port
from tests.support.commands import ROOT, Finished, Program, environment, world
from tests.support.layouts import rest
from tests.support.template import Template
from tests.support.tools import Tool, in_process

TOOL = ROOT / "tools" / "preflight.py"
QUICK = ("--slow-below", "0.001", "--megabytes", "1")  # speeds of a shared machine are not what is tested


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tool:
    """The tool in this process, on a node of its own name whose probe need not load torch."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    said = json.dumps({"torch": "2.13.0", "devices": []})
    monkeypatch.setattr(devices, "PROBE", (sys.executable, "-S", "-c", f"print({said!r})"))
    return in_process(TOOL, capsys)


def test_a_node_alone(tool: Tool, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    code, said, errors = tool("--local", "--json", reports, "--shared", tmp_path, "--need", tmp_path, TOOL)
    assert (code, errors) == (0, "")
    assert said.startswith("n1: python ") and said.endswith("\ngo (1 not checked)\n")
    told = json.loads((reports / "n1.json").read_text())
    assert (told["node"], told["go"], told["facts"]["torch"]) == ("n1", True, "2.13.0")
    code, said, _ = tool("--local", "--need", tmp_path / "no", "--min-host-memory-gib", "1e6")
    assert code == 1
    assert said.endswith("\nno-go: 2 faults on n1\n")
    assert f"fault: n1: {tmp_path / 'no'}: found is not there, asked to be read; mount the file system" in said
    assert "asked 1000000.0 GiB; end what else runs there" in said


def test_what_nodes_have_told(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes with long names; one lacks a path, one is silent, and SLURM calls them by their short names."""
    reports, verdict = tmp_path / "reports", tmp_path / "verdict.json"
    reports.mkdir()
    for name in ("n1.x", "n2.x", "n3.x"):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        needs = tmp_path if name != "n2.x" else tmp_path / "no"
        assert tool("--local", "--json", reports, "--need", needs)[0] == (name == "n2.x")
    code, said, _ = tool("--reports", reports, "--nodes", "n[1-4]", "--json", verdict)
    assert code == 1
    assert said.splitlines()[-2:] == ["no-go: 2 faults on n4 and n2", "to be left out: n2,n4"]
    told = json.loads(verdict.read_text())
    assert (told["go"], told["bad_nodes"], told["reasons"]) == (False, ["n2", "n4"], [])
    (reports / "n2.x.json").unlink()
    assert tool("--reports", reports, "--nodes", "n1,n3")[0] == 0
    monkeypatch.setenv("SLURMD_NODENAME", "n2.x")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--local", "--reports", "x"), "--local --reports: are two ways to look; give one of them"),
        (
            ("--local", "--tensor-model-parallel-size", "2"),
            "--tensor-model-parallel-size 2: --local does not look at it",
        ),
        (("--nodes", "n1"), "--nodes n1: only --local or --reports look at it; leave it out"),
        (("--slow-below", "1"), "argument --slow-below: '1': must be below 1, a part of the median; see --help"),
        (("--timeout-seconds", "nan"), "argument --timeout-seconds: 'nan': must be a number above 0; see --help"),
        (("--local", "--master-port", "70000"), "--master-port 70000: must be a TCP port"),
        (("--local", "--json", "/no/such/x"), "--json /no/such/x: the folder /no/such does not exist"),
        (("--reports", "/no/such"), "--reports /no/such: is no folder"),
        (("--shard", "x"), "flag --shard: is unknown; did you mean --shared?"),
        (
            ("--tensor-model-parallel-size", "2"),
            "--tensor-model-parallel-size 2: 1 process does not form a replica of 2",
        ),
    ],
)
def test_mistakes(tool: Tool, arguments: tuple[str, ...], words: str) -> None:
    code, said, errors = tool(*arguments)
    assert (code, said) == (2, "")
    assert errors.startswith(f"error: {words}") and errors.count("\n") == 1


@contextmanager
def ranks(
    count: int, *arguments: object, folder: Path, template: Template, of: int | None = None, **variables: str
) -> Iterator[list[Program]]:
    """The tool as `count` ranks (of more that do not come), each a node of its own: n1, n2, …"""
    shared = world(of or count) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | variables
    programs: list[Program] = []
    try:
        for rank in range(count):
            env = environment(shared | {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank + 1}"})
            programs.append(Program([sys.executable, str(TOOL), *map(str, arguments)], folder, env, template))
        yield programs
    finally:
        for program in programs:
            program.__exit__()


def finished(programs: list[Program]) -> list[Finished]:
    return [program.wait() for program in programs]


def test_two_nodes_together(tmp_path: Path, template: Template) -> None:
    arguments = (*QUICK, "--tensor-model-parallel-size", "2", "--shared", tmp_path, "--json", "out.json")
    with ranks(2, *arguments, folder=tmp_path, template=template) as programs:
        first, second = finished(programs)
    assert (first.returncode, first.stderr) == (0, ""), first.output
    assert (second.returncode, second.output) == (0, "")
    rows = [line[4:18].strip() for line in first.stdout.splitlines() if line[:2] in ("ok", "- ")]
    expected = {
        "meeting",
        "python",
        "torch",
        "deepspeed",
        "project",
        "devices",
        "host memory",
        "clock",
        "shared folder",
    }
    assert {*expected, "compute rate", "TP all-reduce", "link rate"} <= set(rows)
    assert first.stdout.splitlines()[-1].startswith("go")
    told: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert (told["go"], told["nodes"]) == (True, ["n1", "n2"])
    assert sorted(told["numbers"]) == ["all_reduce", "clock_seconds", "compute_gflops", "links"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("kind", ["a fault on one node", *rest("a folder that is not there")])
def test_no_go_of_two_nodes(tmp_path: Path, template: Template, kind: str) -> None:
    """A node without enough memory ends with 1 on every rank, and everything else is measured all the same."""
    arguments = ("--min-host-memory-gib", "1e6") if kind.startswith("a fault") else ("--shared", tmp_path / "no")
    with ranks(2, *QUICK, *arguments, folder=tmp_path, template=template) as programs:
        first, second = finished(programs)
    assert (first.returncode, second.returncode, second.output) == (1, 1, "")
    assert first.stdout.splitlines()[-1].startswith("no-go: ")
    assert "DP all-reduce" in first.stdout


def test_ranks_that_do_not_come_are_named_once(tmp_path: Path, template: Template) -> None:
    """Two of four: one message, and nobody waits for longer than the limit."""
    begin = time.monotonic()
    with ranks(2, "--timeout-seconds", "3", folder=tmp_path, template=template, of=4) as programs:
        done = finished(programs)
    assert time.monotonic() - begin < 60
    assert [one.returncode for one in done] == [1, 1]
    told = [line for one in done for line in one.output.splitlines()]
    assert len(told) == 1
    assert "missing: rank 2-3 of 4 (2-3 on hosts from which no rank came)" in told[0]


@pytest.mark.cluster
def test_a_rank_that_stalls_is_named(tmp_path: Path, template: Template) -> None:
    """SIGSTOP of rank 1 once the ranks have met: the table so far, and who does not answer."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import os, sys, time, runpy\n"
        "from megatron_allattn.cluster.nodes import group\n"
        "real = group.rates.compute_rates\n"
        "def stopped(*args):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), 19)\n"
        "    return real(*args)\n"
        "group.rates.compute_rates = stopped\n"
        f"sys.argv[0] = {str(TOOL)!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    shared = world(2) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    programs: list[Program] = []
    try:
        for rank in range(2):
            env = environment(shared | {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank + 1}"})
            command = [sys.executable, str(slow), *QUICK, "--timeout-seconds", "20"]
            programs.append(Program(command, tmp_path, env, template))
        first = programs[0].wait(120)
    finally:
        for program in programs:
            program.__exit__()
    assert first.returncode == 1
    assert "no-go: it did not come to its end" in first.stdout and "python" in first.stdout
    assert "rank 1 is gone" in first.stderr, first.stderr


@pytest.mark.cluster
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "deepspeed", "python"])
def test_under_every_launcher(tmp_path: Path, launcher: str) -> None:
    commands = {
        "torchrun": ["torchrun", "--nproc-per-node", "2", "--"],
        "mpirun": ["mpirun", "-n", "2", sys.executable],
        "deepspeed": ["deepspeed", "--quiet", "--num_gpus", "2", "--master_port", str(free_port())],
        "python": [sys.executable],
    }
    env = environment()
    with Program([*commands[launcher], str(TOOL), *QUICK, "--shared", str(tmp_path)], tmp_path, env) as program:
        done = program.wait()
    assert (done.returncode, done.left) == (0, []), done.output
    assert ("DP all-reduce" in done.stdout) is (launcher != "python")
    assert done.stdout.count("\ngo (") == 1
