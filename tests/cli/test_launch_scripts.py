"""The scripts of launch/ with real launchers: arguments byte for byte on every rank, failing ranks, ports, hosts.

The program is a small one, so that what is tried is the way to it. test_launchers.py has trainings by the same ways.
"""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_allattn.parallel.addresses import free_port
from tests.cli.test_launchers import ARGUMENTS
from tests.support.commands import BIN, MARK, ROOT, Finished, Program, environment, marked, run
from tests.support.loopback import HOSTS, LoopbackHosts, loopback_hosts, missing_programs, open_mpi

pytestmark = pytest.mark.cluster
LAUNCH = ROOT / "launch"

# Says what it has got, in a file of its own; then behaves as `RANK:WHAT` among its arguments says.
SCRIPT = r"""
import json, os, signal, sys, time
names = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
rank = next(os.environ[name] for name in names if os.environ.get(name))
arguments = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]
with open(f"rank_{rank}.json", "w") as file:
    json.dump({"arguments": arguments, "threads": os.environ["OMP_NUM_THREADS"]}, file)
what = dict(word.split(":") for word in arguments if word[1:2] == ":").get(rank, "")
asked = []
def stop(number, frame):
    first = not asked  # before the rest, since the next signal may come in between
    asked.append(number)
    open(f"stopped_{rank}", "a").write(signal.Signals(number).name + "\n")
    if first:
        time.sleep({"slow": 45.0, "short": 20.0}.get(what, 2.0))  # a save
        open(f"stopped_{rank}", "a").write("saved\n")
        sys.exit(3)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, stop)
print("rank", rank, "is here", flush=True)
if what == "raise":
    raise ValueError("this is it")
if what == "exit5":
    sys.exit(5)
if what == "kill":
    print("dying")
    os.kill(os.getpid(), signal.SIGKILL)
if any(word[1:2] == ":" for word in arguments):
    time.sleep(120)
"""


@dataclass(frozen=True)
class Way:
    """A script of launch/ and the variables with which it starts two ranks."""

    script: str
    variables: dict[str, str]

    def run(self, folder: Path, *arguments: str, program: Path | None = None) -> Finished:
        with self.start(folder, *arguments, program=program) as started:
            return started.wait()

    def start(self, folder: Path, *arguments: str, program: Path | None = None) -> Program:
        if program is None:
            program = folder / "program.py"
            program.write_text(SCRIPT)
        env = environment({"PROGRAM": str(program), "MASTER_PORT": str(free_port())} | self.variables)
        (folder / ".deepspeed_env").write_text(f"{MARK}={env[MARK]}\n")
        return Program([str(LAUNCH / self.script), *arguments], folder, env)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHosts]:
    if missing := missing_programs():
        pytest.skip(f"not installed: {missing} (make system-deps)")
    with loopback_hosts(tmp_path_factory.mktemp("ssh")) as started:
        yield started


WAYS = ["torchrun", "torchrun hostfile", "mpich", "mpich hostfile", "openmpi", "openmpi hostfile", "deepspeed hostfile"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Way:
    launcher, _, hostfile = request.param.partition(" ")
    folder = tmp_path_factory.mktemp("way")
    variables = {"HOME": str(folder)}
    if launcher == "deepspeed":
        found = request.getfixturevalue("hosts")
        path = f"{found.path}:{environment()['PATH']}"
        return Way(
            "deepspeed_hosts.sh",
            variables | {"HOSTFILE": str(found.hostfile), "PATH": path, "MASTER_ADDR": HOSTS[0]},
        )
    if launcher == "torchrun":
        (folder / "hosts").write_text(f"{socket.gethostname()}.cluster.local slots=2\n")
        given = {"HOSTFILE": str(folder / "hosts")} if hostfile else {"NPROC_PER_NODE": "2"}
        return Way("torchrun.sh", variables | given)
    if launcher == "mpich" and not (BIN / "mpirun").exists():
        pytest.skip(f"no mpirun beside this Python, {BIN}: pip install mpich")
    if launcher == "openmpi":
        variables |= open_mpi(folder)
    (folder / "hosts").write_text("localhost slots=2\n")
    return Way("mpirun.sh", variables | ({"HOSTFILE": str(folder / "hosts")} if hostfile else {"NPROC": "2"}))


def until_here(started: Program) -> None:
    """Both ranks are under way."""
    deadline = time.monotonic() + 200
    while started.stdout.count("is here") < 2:
        assert time.monotonic() < deadline and started.process.poll() is None, started.stdout + started.stderr
        time.sleep(0.1)


def test_every_rank_gets_the_arguments_byte_for_byte(way: Way, tmp_path: Path) -> None:
    done = way.run(tmp_path, *ARGUMENTS)
    assert (done.returncode, done.left) == (0, []), done.output
    for rank in range(2):
        told = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert told == {"arguments": ARGUMENTS, "threads": "1"}
    names = {".deepspeed_env", "program.py", "rank_0.json", "rank_1.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "launch: " not in done.output


@pytest.mark.parametrize("way", ["torchrun", "mpich", "openmpi", "deepspeed hostfile"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "words"), [("raise", "ValueError: this is it"), ("exit5", "code 5"), ("kill", "dying")]
)
def test_a_rank_that_fails(way: Way, tmp_path: Path, rank: int, what: str, words: str) -> None:
    """Its last lines come last, after whatever the launcher prints; the code is not 0; nothing is left."""
    done = way.run(tmp_path, f"{rank}:{what}")
    assert done.returncode != 0 and done.left == [], done.output
    lines = done.stderr.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("launch: ")]
    assert len(heads) == 1, done.output
    assert lines[heads[0]].startswith(f"launch: rank {rank} on ")
    assert all(line.startswith("  | ") for line in lines[heads[0] + 1 :])
    assert words in "\n".join(lines[heads[0] :])
    assert "\x1e" not in done.output


@pytest.mark.parametrize("way", ["torchrun", "mpich", "openmpi", "deepspeed hostfile"], indirect=True)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_signals_reach_every_rank_and_leave_it_time(way: Way, tmp_path: Path, name: str) -> None:
    with way.start(tmp_path, "0:wait") as started:
        until_here(started)
        started.process.send_signal(signal.Signals[name])
        done = started.wait()
    assert done.returncode != 0 and done.left == []
    # pdsh ends with the signal, and the ranks may miss it before DeepSpeed's own way of telling them has come
    expected = ["SIGTERM", "SIGUSR1", *(["SIGHUP"] if way.script == "deepspeed_hosts.sh" else [])]
    for rank in range(2):
        told = (tmp_path / f"stopped_{rank}").read_text().split()
        assert told[0] in expected and "saved" in told
    if "HOSTFILE" not in way.variables:  # what comes over pdsh ends with it
        assert "asked to, with exit code 3" in done.stderr and "SIGKILL" not in done.stderr


@pytest.mark.parametrize("way", ["torchrun", "mpich", "openmpi", "deepspeed hostfile"], indirect=True)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_slow_save_outlives_a_second_signal(way: Way, tmp_path: Path, name: str) -> None:
    """45 s, where torchrun by itself kills 30 s after a signal, and MPICH's mpirun at the second SIGINT. DeepSpeed's
    launcher always does after 30 s; what comes over pdsh ends with the signal, and ranks elsewhere save unseen."""
    over_pdsh = way.script == "deepspeed_hosts.sh"
    what = "short" if over_pdsh else "slow"
    with way.start(tmp_path, f"0:{what}", f"1:{what}") as started:
        until_here(started)
        for _ in range(2):
            started.process.send_signal(signal.Signals[name])
            time.sleep(5.0)
        done = started.wait()
        deadline = time.monotonic() + 30
        while over_pdsh and marked(started.mark) and time.monotonic() < deadline:
            time.sleep(0.2)
        left = marked(started.mark)
    assert done.returncode != 0 and left == []
    for rank in range(2):
        assert "saved" in (tmp_path / f"stopped_{rank}").read_text().split()


@pytest.mark.parametrize("way", ["torchrun", "mpich", "openmpi", "deepspeed hostfile"], indirect=True)
def test_kill_9_of_the_launcher_leaves_no_rank(way: Way, tmp_path: Path) -> None:
    """Also on the other hosts: there ranks find that nobody reads what they print."""
    with way.start(tmp_path, "0:wait") as started:
        until_here(started)
        children = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        done = started.wait()
        deadline = time.monotonic() + 200
        while (left := marked(started.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
    assert (done.returncode, left) == (128 + signal.SIGKILL, [])


def test_preflight(way: Way, tmp_path: Path) -> None:
    """Of this machine, which is one node whatever it is called."""
    arguments = ("--slow-below", "0.001", "--megabytes", "1", "--shared", str(tmp_path))
    done = way.run(tmp_path, *arguments, program=ROOT / "tools" / "preflight.py")
    assert (done.returncode, done.left) == (0, []), done.output
    assert "all 2 ranks on 1 node" in done.stdout and "DP all-reduce" in done.stdout


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        several = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
        done = run(str(LAUNCH / "torchrun.sh"), folder=tmp_path, variables=several | {"MASTER_PORT": port})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"error: MASTER_PORT {port}: in use on this host, where the ranks are to meet; choose"
    )


def test_a_port_in_use_of_deepspeed(hosts: LoopbackHosts, tmp_path: Path) -> None:
    """pretrain.py itself says so, once, and everything ends."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        path = f"{hosts.path}:{environment()['PATH']}"
        variables = {"HOSTFILE": str(hosts.hostfile), "PATH": path, "MASTER_ADDR": HOSTS[0], "MASTER_PORT": port}
        done = run(
            str(LAUNCH / "deepspeed_hosts.sh"),
            *("--tensor-model-parallel-size", "2", "--distributed-timeout-minutes", "0.3"),
            folder=tmp_path,
            variables=variables | {"HOME": str(tmp_path)},
        )
    assert done.returncode != 0
    assert f"port {port}: the port is in use on this host; choose another: MASTER_PORT=N" in done.stderr
    assert re.search(r"^launch: rank 0 on .* ended with exit code 1", done.stderr, re.M)
