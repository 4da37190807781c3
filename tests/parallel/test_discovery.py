"""Rank discovery: the numbers under every launcher's variables, errors that name the variable, and real launches."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_allattn.config.errors import UsageError
from megatron_allattn.parallel.addresses import PORTS, LaunchError, RankInfo, free_port
from megatron_allattn.parallel.discovery import discover, select_device
from megatron_allattn.parallel.nodelist import first_host, tasks_on_node
from tests.support.template import ROOT

LAUNCHER_PREFIXES = ("PMI", "OMPI_", "SLURM_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC_", "PYTEST_")
FOUR = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "2345"}
STEP = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "99",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "gpu[07-09],login",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}


def _numbers(info: RankInfo) -> tuple[int, int, int, int]:
    return info.rank, info.world_size, info.local_rank, info.local_world_size


def test_plain_variables_on_one_host():
    info = discover(FOUR)
    assert _numbers(info) == (1, 4, 1, 4)
    assert (info.master_addr, info.master_port, info.source) == ("n1", 2345, "environment")


def test_torchrun_and_deepspeed_variables_on_two_hosts():
    second_host = {**FOUR, "RANK": "3", "LOCAL_RANK": "1"}
    assert _numbers(discover({**second_host, "LOCAL_WORLD_SIZE": "2"})) == (3, 4, 1, 2)
    assert _numbers(discover({**second_host, "LOCAL_SIZE": "2"})) == (3, 4, 1, 2)
    with pytest.raises(UsageError, match=r"^LOCAL_WORLD_SIZE is not set, but LOCAL_RANK=1 and RANK=3 differ"):
        discover(second_host)


def test_plain_variables_win_over_slurm_and_mpi():
    info = discover({**STEP, **FOUR, "PMI_RANK": "0", "PMI_SIZE": "2"})
    assert (_numbers(info), info.source) == ((1, 4, 1, 4), "environment")


def test_one_process_needs_no_address():
    info = discover({"RANK": "0", "WORLD_SIZE": "1"})
    assert (_numbers(info), info.master_addr) == ((0, 1, 0, 1), "127.0.0.1")
    info = discover({})
    assert (_numbers(info), info.source) == ((0, 1, 0, 1), "single")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", info.master_port))  # free


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set, but RANK is"),
        ({"RANK": ""}, "RANK is not set, but WORLD_SIZE is"),
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "0"}, "RANK is not set, but LOCAL_RANK is"),
        ({"RANK": "4"}, r"RANK 4: must be from 0 to WORLD_SIZE - 1 = 3 \(found by environment\)"),
        ({"RANK": "-1"}, "RANK -1: must be from 0"),
        ({"RANK": "one"}, "RANK 'one': not a whole number"),
        ({"WORLD_SIZE": "4.0"}, "WORLD_SIZE '4.0': not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE 0: must be at least 1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set, but WORLD_SIZE=4"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set, but WORLD_SIZE=4"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT 70000: must be a TCP port"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK 2: must be from 0 to LOCAL_WORLD_SIZE - 1 = 1"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE 5: must be from 1 to WORLD_SIZE"),
    ],
)
def test_partial_or_contradicting_variables_are_named(changes: dict[str, str], message: str):
    with pytest.raises(UsageError, match=f"^{message}"):
        discover({**FOUR, **changes})


def test_a_step_under_srun():
    info = discover(STEP)
    assert _numbers(info) == (5, 7, 1, 3)
    assert (info.master_addr, info.source) == ("gpu08", "srun")
    assert info.master_port == 12_000 + (31 * 1000 + 2) % 20_000
    again = discover({**STEP, "SLURM_RESTART_COUNT": "1"})  # what is left of the life before may hold the port
    assert again.master_port not in (info.master_port, discover({**STEP, "SLURM_STEP_ID": "3"}).master_port)
    assert discover({**STEP, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "77"}).master_port == 77
    older = {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP_") or name.endswith("ID")}
    info = discover({**older, "SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "3(x2),1"})
    assert (_numbers(info), info.master_addr) == ((5, 7, 1, 3), "gpu07")
    del older["SLURM_JOB_NODELIST"]
    assert discover({**older, "SLURM_TASKS_PER_NODE": "3(x2),1"}).master_addr == "10.0.0.9"


def test_srun_errors_name_the_variable():
    with pytest.raises(UsageError, match=r"^SLURM_LOCALID is not set"):
        discover({name: value for name, value in STEP.items() if name != "SLURM_LOCALID"})
    with pytest.raises(UsageError, match=r"^SLURM_NODEID 2: SLURM_TASKS_PER_NODE=4,3 has no such node"):
        discover({**STEP, "SLURM_NODEID": "2"})
    with pytest.raises(UsageError, match=r"^RANK 7: must be from 0 to WORLD_SIZE - 1 = 6 .found by srun"):
        discover({**STEP, "SLURM_PROCID": "7"})


def test_the_shell_of_a_batch_job_is_a_single_process():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    assert (_numbers(discover(batch)), discover(batch).source) == ((0, 1, 0, 1), "single")


def test_srun_with_pmi_needs_no_mpi_but_mpirun_within_a_step_does(tmp_path: Path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI here')")
    broken = {**STEP, "PYTHONPATH": str(tmp_path)}
    assert discover({**broken, "PMI_RANK": "5", "PMI_SIZE": "7"}).source == "srun"
    with pytest.raises(UsageError, match=r"^PMI_RANK=1: started by MPI, but mpi4py cannot be used \(no MPI here\)"):
        discover({**broken, "PMI_RANK": "1", "PMI_SIZE": "4"})
    (tmp_path / "mpi4py.py").write_text("import os; os._exit(7)")
    with pytest.raises(LaunchError, match=r"^mpi4py: MPI ended with exit code 7 before it had told this process its"):
        discover({**broken, "PMI_RANK": "1", "PMI_SIZE": "4"})
    with pytest.raises(UsageError, match=r"^OMPI_COMM_WORLD_SIZE is not set"):
        discover({"OMPI_COMM_WORLD_RANK": "1"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4,7]", "n1"),
        ("gpu[007-009,12]-x,login1", "gpu007-x"),
        ("rack[3-4]node[09,11]", "rack3node09"),
        ("a-b.c.example", "a-b.c.example"),
    ],
)
def test_first_host(nodelist: str, host: str):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "n[1-4", "n]1[", "n[a-b]", "a b", "n[,1]"])
def test_a_bad_node_list_is_refused(nodelist: str):
    with pytest.raises(UsageError, match=r"^SLURM_JOB_NODELIST .*: not a list of hosts"):
        first_host(nodelist)


def test_a_free_port_is_none_that_a_connection_may_get_first():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in (free_port() for _ in range(50)):
        assert port in PORTS and port < lowest
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))


def test_tasks_on_node():
    assert [tasks_on_node("2(x3),1,4(x2)", node) for node in range(6)] == [2, 2, 2, 1, 4, 4]
    for bad in ("2(3)", "x", "", "2,,3"):
        with pytest.raises(UsageError, match=r"^SLURM_TASKS_PER_NODE .*: not a list of counts"):
            tasks_on_node(bad, 0)


def test_each_local_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch):
    info = RankInfo(
        rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="n", master_port=1, source="srun"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device(info) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert select_device(info) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(UsageError, match=r"^ranks on this host 4: each needs its own GPU and 3 are visible"):
        select_device(info)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert select_device(info) == torch.device("cuda", 0)


# What a rank does in the launches below; it writes what it found to FOLDER/rank_N.json.
SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from megatron_allattn.config.errors import UsageError
from megatron_allattn.parallel.addresses import LaunchError
from megatron_allattn.parallel.discovery import discover, initialize, select_device
folder, timeout = sys.argv[1:]
try:
    info = discover()
    initialize(info, float(timeout), select_device(info))
except (LaunchError, UsageError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
total = torch.tensor([info.rank + 1.0])
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
record = {
    "source": info.source,
    "address": info.master_addr,
    "sum": total.item(),
    "ranks": [dist.get_rank(), dist.get_world_size()],
    "environ": [int(os.environ[name]) for name in names],
    "port": os.environ["MASTER_PORT"] == str(info.master_port),
}
with open(os.path.join(folder, f"rank_{info.rank}.json"), "w") as handle:
    json.dump(record, handle)
dist.destroy_process_group()
"""


class Launches:
    """Starts processes with no launcher's variables but those given; ends what is left of them by pid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arguments = [str(folder / "rank.py"), str(folder)]
        (folder / "rank.py").write_text(SCRIPT)
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], **variables: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
        process = subprocess.Popen(
            command,
            env={
                **inherited,
                "PYTHONPATH": str(ROOT),
                "CUDA_VISIBLE_DEVICES": "",
                "TMPDIR": str(self.folder),
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its own session: the launcher and its ranks
            process.communicate()

    def check(self, world_size: int, source: str) -> None:
        records = [json.loads((self.folder / f"rank_{rank}.json").read_text()) for rank in range(world_size)]
        for rank, record in enumerate(records):
            assert record == {
                "source": source,
                "address": "127.0.0.1",
                "sum": world_size * (world_size + 1) / 2,
                "ranks": [rank, world_size],
                "environ": [rank, world_size, rank, world_size],
                "port": True,
            }


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    started = Launches(tmp_path)
    yield started
    started.end()


def _plain(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _wait(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _errors = process.communicate(timeout=180)
    return process.returncode, output


def test_launch_with_plain_variables(launches: Launches):
    command, port = [sys.executable, *launches.arguments, "60"], free_port()
    processes = [launches.start(command, **_plain(rank, port)) for rank in range(2)]
    for process in processes:
        code, output = _wait(process)
        assert code == 0, output
    launches.check(2, "environment")


def test_launch_with_torchrun(launches: Launches):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    code, output = _wait(launches.start([*launcher, *launches.arguments, "60"]))
    assert code == 0, output
    launches.check(2, "environment")


@pytest.fixture
def mpirun() -> str:
    """That of the MPI which was installed from PyPI beside mpi4py."""
    pytest.importorskip("mpi4py", reason="ranks under mpirun are found through mpi4py")
    path = Path(sys.executable).parent / "mpirun"
    if not path.exists():
        pytest.skip(f"no {path}")
    return str(path)


def test_launch_with_mpirun(launches: Launches, mpirun: str):
    code, output = _wait(launches.start([mpirun, "-n", "2", sys.executable, *launches.arguments, "60"]))
    assert code == 0, output
    launches.check(2, "mpi")


EARLY = """
import os, pathlib, sys, time
from megatron_allattn.parallel import mpi_place
place, _ = mpi_place.ask(os.environ, "", 0)
time.sleep(2 * place.rank)
pathlib.Path(sys.argv[1], f"done_{place.rank}").touch()
os._exit(0)
"""


def test_a_rank_that_is_done_early_under_mpirun_does_not_end_the_others(launches: Launches, mpirun: str):
    """It ends without C's exit handlers, as a training does, and MPICH's launcher takes no offence."""
    command = [mpirun, "-n", "2", sys.executable, "-c", EARLY, str(launches.folder)]
    code, output = _wait(launches.start(command))
    assert (code, output) == (0, "")
    assert {path.name for path in launches.folder.glob("done_*")} == {"done_0", "done_1"}


LONELY = """
import os, sys
from megatron_allattn.parallel import mpi_place
if os.environ["PMI_RANK"] == "1":
    sys.exit(2)
mpi_place.ANSWER_SECONDS = 3.0
try:
    mpi_place.ask(os.environ, "", 0)
except mpi_place.LaunchError as error:
    sys.exit(str(error))
"""


def test_a_rank_that_does_not_come_under_mpirun_is_not_waited_for_without_end(launches: Launches, mpirun: str):
    code, output = _wait(launches.start([mpirun, "-n", "2", sys.executable, "-c", LONELY]))
    assert code != 0
    assert "mpi4py: MPI has not told this process its rank within 3 s: other ranks have ended before, or " in output


def test_a_single_process(launches: Launches):
    code, output = _wait(launches.start([sys.executable, *launches.arguments, "60"]))
    assert code == 0, output
    launches.check(1, "single")


def test_a_port_in_use_is_one_line(launches: Launches):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = launches.start([sys.executable, *launches.arguments, "60"], **_plain(0, port))
        code, output = _wait(process)
    assert code == 1
    line = output.strip().splitlines()[-1]
    assert line.startswith(
        f"LaunchError: address 127.0.0.1, port {port}: the port is in use on this host; choose another"
    )
    assert "MASTER_PORT=N" in line and "deepspeed --master_port N" in line


def test_ranks_that_do_not_come_end_the_wait(launches: Launches):
    port = free_port()
    code, output = _wait(launches.start([sys.executable, *launches.arguments, "2"], **_plain(0, port)))
    assert code == 1
    line = output.strip().splitlines()[-1]
    assert line.startswith(f"LaunchError: rank 0 of 2: the ranks did not meet at 127.0.0.1:{port} within 2 s (")
