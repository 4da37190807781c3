"""The same training under every launcher: the same losses, arguments byte for byte, no noise, nothing left behind.

The scripts of launch/ are what is run, so that they are what is tested. A tensor-parallel run of two processes gives
the same bits whoever started it; the single process adds up in another order and agrees to rounding.
"""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import (
    BIN,
    MARK,
    PRETRAIN,
    ROOT,
    TINY,
    Finished,
    corpus,
    environment,
    free_port,
    outcome,
    records,
    run,
    run_ranks,
)
from tests.support.layouts import rest
from tests.support.loopback import HOSTS, loopback_hosts, missing_programs, open_mpi
from tests.support.template import Template

LAUNCH = ROOT / "launch"
RANK = str(LAUNCH / "rank.py")
STEPS = 6
# What a shell, pdsh or an argument parser on the way could act on, as the name of the run folder.
NASTY = "run \"a\" 'b' $HOME $(touch canary) `touch canary` %h %n \\n;&|*?~#{x,y}"
NOISE = re.compile(r"\[(INFO|WARNING)\]|Warning|deprecated", re.IGNORECASE)
BAD_FLAG = ("--lr", "fast")
BAD_FLAG_LINE = "error: --lr fast: must be a number; the default is 0.001"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("data"))


def flags(data: Path, tensor: int) -> list[str]:
    steps = ["--train-iters", str(STEPS), "--log-interval", "2", "--tensor-model-parallel-size", str(tensor)]
    return [*TINY, *steps, "--data-path", str(data), "--attention-dropout", "0.1", "--save", NASTY]


def without_speed(run_folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "tokens_per_second"} for record in records(run_folder)]


def check_folder(folder: Path, ranks: int) -> None:
    """What a run leaves: the folder of exactly that name, done, and nothing that a shell made."""
    assert [path.name for path in folder.iterdir() if path.name != ".deepspeed_env"] == [NASTY]
    config = json.loads((folder / NASTY / "config.json").read_text())
    assert config["checkpoint"]["save"] == NASTY
    assert config["parallel"]["tensor_model_parallel_size"] == ranks
    assert outcome(folder / NASTY) == {"outcome": "done", "step": STEPS, "reason": "reached --train-iters"}


def check_ended(done: Finished, ranks: int) -> None:
    """Success, told once."""
    assert done.returncode == 0, done.output
    assert done.left == []
    assert done.stdout.count(f"layout      {ranks} × cpu: TP {ranks} × DP 1") == 1
    assert done.stdout.count(f"saved step {STEPS} in {NASTY}") == 1


@pytest.fixture(scope="module")
def two_ranks(data: Path, tmp_path_factory: pytest.TempPathFactory, template: Template) -> list[dict[str, Any]]:
    """The records of two processes that plain environment variables bring together: what others must equal."""
    folder = tmp_path_factory.mktemp("plain")
    first, second = run_ranks(2, *flags(data, 2), folder=folder, template=template)
    check_ended(first, 2)
    assert (first.stderr, second.returncode, second.output, second.left) == ("", 0, "", [])
    check_folder(folder, 2)
    found = without_speed(folder / NASTY)
    assert [(record["kind"], record["step"]) for record in found] == [
        *(("train", step) for step in range(1, STEPS + 1)),
        ("valid", STEPS),
        ("test", STEPS),
    ]
    return found


def test_single_process(data: Path, two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    hasty = {"TORCHELASTIC_RUN_ID": "none", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "0"}  # as a torchrun without patience
    done = run(sys.executable, PRETRAIN, *flags(data, 1), folder=tmp_path, variables=hasty)
    check_ended(done, 1)
    check_folder(tmp_path, 1)
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("warning: saves take longer than the 0 s after which torchrun kills ranks ")
    assert not NOISE.search(done.stdout)
    found = without_speed(tmp_path / NASTY)
    assert [float(record["loss"]) for record in found] == pytest.approx(
        [float(record["loss"]) for record in two_ranks], rel=1e-6, abs=0
    )


@pytest.mark.cluster
def test_torchrun(data: Path, two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    done = run(str(LAUNCH / "torchrun.sh"), *flags(data, 2), folder=tmp_path, variables={"NPROC_PER_NODE": "2"})
    check_ended(done, 2)
    check_folder(tmp_path, 2)
    assert done.stderr == ""
    assert not NOISE.search(done.stdout)
    assert without_speed(tmp_path / NASTY) == two_ranks


@pytest.mark.cluster
@pytest.mark.parametrize("mpi", ["MPICH", "Open MPI"])
def test_mpirun(
    data: Path, two_ranks: list[dict[str, Any]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, mpi: str
) -> None:
    pytest.importorskip("mpi4py", reason="ranks under mpirun are found through mpi4py")
    variables = {"NPROC": "2"}
    if mpi == "Open MPI":
        variables |= open_mpi(tmp_path_factory.mktemp("mpi"))
    elif not (BIN / "mpirun").exists():
        pytest.skip(f"no mpirun beside this Python, {BIN}: pip install mpich")
    done = run(str(LAUNCH / "mpirun.sh"), *flags(data, 2), folder=tmp_path, variables=variables)
    check_ended(done, 2)
    check_folder(tmp_path, 2)
    assert done.stderr == ""
    assert without_speed(tmp_path / NASTY) == two_ranks


def deepspeed_on_this_host() -> list[str]:
    return ["deepspeed", "--quiet", "--num_gpus", "2", "--master_port", str(free_port()), PRETRAIN]


def test_deepspeed_launcher(data: Path, two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    done = run(*deepspeed_on_this_host(), *flags(data, 2), folder=tmp_path)
    check_ended(done, 2)
    check_folder(tmp_path, 2)
    assert not NOISE.search(done.output)
    assert without_speed(tmp_path / NASTY) == two_ranks


@pytest.mark.cluster
def test_deepspeed_over_two_hosts(
    data: Path, two_ranks: list[dict[str, Any]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A real sshd and pdsh. Without the script's quoting the remote shell runs what is in an argument (0.19.8)."""
    if missing := missing_programs():
        pytest.skip(f"not installed: {missing} (make system-deps)")
    with loopback_hosts(tmp_path_factory.mktemp("ssh")) as hosts:
        mark = environment()[MARK]
        variables = {
            "HOSTFILE": str(hosts.hostfile),
            "PATH": f"{hosts.path}:{environment()['PATH']}",
            "MASTER_ADDR": HOSTS[0],
            "MASTER_PORT": str(free_port()),
            MARK: mark,
        }
        (tmp_path / ".deepspeed_env").write_text(f"# for every host\n\n{MARK}={mark}\n")
        done = run(str(LAUNCH / "deepspeed_hosts.sh"), *flags(data, 2), folder=tmp_path, variables=variables)
        check_ended(done, 2)
        check_folder(tmp_path, 2)
        said = [line for line in done.stdout.splitlines() if "node_rank=" in line]
        assert sorted(line.split(":")[0] for line in said) == list(HOSTS)
        assert {re.sub(r".*(nnodes=.*, num_local_procs=.*),.*", r"\1", line) for line in said} == {
            "nnodes=2, num_local_procs=1"
        }
        assert without_speed(tmp_path / NASTY) == two_ranks
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOSTS[1], hosts.port), timeout=1).close()


def test_deepspeed_speaks_when_asked(data: Path, tmp_path: Path) -> None:
    few = [*TINY, "--train-iters", "1", "--eval-iters", "1", "--data-path", str(data), "--deepspeed-verbose"]
    done = run(sys.executable, PRETRAIN, *few, folder=tmp_path)
    assert done.returncode == 0, done.output
    assert re.search(r"\[INFO\] .*DeepSpeed", done.output)


@pytest.mark.parametrize(
    ("script", "variables", "exit_code"),
    [("torchrun.sh", {"NPROC_PER_NODE": "2"}, 1), *rest(("mpirun.sh", {"NPROC": "2"}, 2)), ("", {}, 2)],
    ids=["torchrun", "mpirun", "deepspeed"],
)
def test_a_mistake_is_told_once_and_the_launcher_fails(
    tmp_path: Path, script: str, variables: dict[str, str], exit_code: int
) -> None:
    """torchrun turns every exit code into 1; mpirun and deepspeed pass on that of a rank."""
    if script == "mpirun.sh" and not (BIN / "mpirun").exists():
        pytest.skip(f"no mpirun beside this Python, {BIN}: pip install mpich")
    command = [str(LAUNCH / script)] if script else deepspeed_on_this_host()
    done = run(*command, *BAD_FLAG, folder=tmp_path, variables=variables)
    assert (done.returncode, done.left) == (exit_code, [])
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == [BAD_FLAG_LINE]
    assert list(tmp_path.iterdir()) == []


# Stands in for deepspeed: what the script hands over, as the launcher, pdsh and a remote shell would go on with it.
RECORDER = """\
#!/usr/bin/env python3
import json, os, sys
with open(os.environ["DS_ENV_FILE"]) as first, open(os.environ["DS_ENV_FILE"]) as second:
    assert os.path.isfile(os.environ["DS_ENV_FILE"])
    variables = first.read()
    assert variables == second.read()
hosts = open(sys.argv[sys.argv.index("--hostfile") + 1]).read()
print(json.dumps([sys.argv[1:], variables, hosts]))
"""

ARGUMENTS = [
    *("plain", "--flag=value", "", " ", "two words", "tab\there", "line\nbreak", "line\nbreaks at the end\n\n", "é ü"),
    *('"', '" ', "'", "' ", "\\", "\\ ", 'end\\"', 'end \\"', "$HOME", "$HOME ", "`id`", "`id` ", "$(id)", "$( id )"),
    *("%h%u%n%%", "%h %u %n %%", ";&|<>()*?[a]{b,c}~!#", "; & | < > ( ) * ? [a] {b,c} ~ ! #", NASTY),
]


def through_the_launcher(argument: str) -> str:
    """What DeepSpeed 0.19.8 (`PDSHRunner.parse_user_args`) and then pdsh make of an argument."""
    argument = '"{}"'.format(argument.replace('"', '\\"')) if " " in argument else argument
    assert not re.search(r"%(?!%)", argument.replace("%%", "")), "pdsh would put in a host, user or number"
    return argument.replace("%%", "%")


@pytest.fixture
def recorder(tmp_path: Path) -> dict[str, str]:
    """Variables under which `deepspeed` is the recorder, in a home folder of its own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "deepspeed").write_text(RECORDER)
    (tmp_path / "bin" / "deepspeed").chmod(0o755)
    (tmp_path / "hosts").write_text("# two\n\nnode-1.example slots=4\n  node_2\tslots=08 \n")
    path = f"{tmp_path / 'bin'}:{environment()['PATH']}"
    return {"PATH": path, "HOME": str(tmp_path), "HOSTFILE": "hosts", "MASTER_ADDR": "node-1"}


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_hosts_script_quotes_for_every_shell_on_the_way(tmp_path: Path, recorder: dict[str, str], shell: str) -> None:
    done = run(str(LAUNCH / "deepspeed_hosts.sh"), *ARGUMENTS, folder=tmp_path, variables=recorder)
    assert (done.returncode, done.stderr) == (0, "")
    handed_over, _, read = json.loads(done.stdout)
    begin = handed_over.index(f"'{RANK}'")
    line = " ".join(through_the_launcher(argument) for argument in handed_over[begin:])
    echo = subprocess.run([shell, "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, cwd=tmp_path)
    assert echo.stdout.decode().split("\0") == [RANK, PRETRAIN, *ARGUMENTS, ""]
    assert handed_over[:begin] == [
        *("--quiet", "--force_multi", "--hostfile", "/dev/fd/8", "--master_port", "29500", "--master_addr", "node-1")
    ]
    assert read == "node-1.example slots=4\nnode_2 slots=8\n"


def test_hosts_script_passes_on_the_environment(tmp_path: Path, recorder: dict[str, str]) -> None:
    (tmp_path / ".deepspeed_env").write_text("# comment\n\nNCCL_SOCKET_IFNAME=eth0\nLAST=a b")
    done = run(str(LAUNCH / "deepspeed_hosts.sh"), folder=tmp_path, variables=recorder)
    assert (done.returncode, done.stderr) == (0, "")
    # The home and the working folder are the same here, so the file is read twice.
    lines = ["NCCL_SOCKET_IFNAME=eth0", "LAST=a b"] * 2 + ["DS_ACCELERATOR=cpu"]
    lines += ["MALLOC_MMAP_MAX_=0", "MALLOC_TRIM_THRESHOLD_=1073741824", "OMP_NUM_THREADS=1"]
    lines += ["PYTORCH_ALLOC_CONF=expandable_segments:True", ""]
    assert json.loads(done.stdout)[1].split("\n") == lines


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "HOSTFILE hosts: no such file"),
        ("", "hosts: names no host"),
        ("# nobody\n\n", "hosts: names no host"),
        ("h1 slots=1\nh2 slots=x\n", "hosts, line 2: 'h2 slots=x' is not"),
        ("h1 slots=0\n", "hosts, line 1: 'h1 slots=0' is not"),
        ("h1\n", "hosts, line 1: 'h1' is not"),
        ("h1 slots=1 and more\n", "hosts, line 1: 'h1 slots=1 and more' is not"),
        ("h1 slots=1\n# again\nh1 slots=2\n", "hosts, line 3: h1 is there twice"),
        ("h1 slots=1\nh1.cluster.local slots=2\n", "hosts, line 2: h1.cluster.local is h1, which is there already"),
        ("fe80::1 slots=1\n", "hosts, line 1: 'fe80::1 slots=1' is not"),
        ("h[1-3] slots=1\n", "hosts, line 1: 'h[1-3] slots=1' is not"),
        ("h;touch${IFS}canary slots=1\n", "hosts, line 1: 'h;touch${IFS}canary slots=1' is not"),
        ("$(touch${IFS}canary) slots=1\n", "hosts, line 1: '$(touch${IFS}canary) slots=1' is not"),
        ("-oProxyCommand=touch${IFS}canary slots=1\n", "hosts, line 1: '-oProxyCommand=touch${IFS}canary slots=1' is"),
        ("h1\x1b[2J slots=1\n", "hosts, line 1: 'h1?[2J slots=1' is not"),
    ],
)
def test_bad_hostfile(tmp_path: Path, recorder: dict[str, str], content: str | None, words: str) -> None:
    """DeepSpeed itself trains on this host alone when the file is absent, and hands every name to ssh."""
    (tmp_path / "hosts").unlink()
    if content is not None:
        (tmp_path / "hosts").write_text(content)
    before = sorted(tmp_path.iterdir())
    done = run(str(LAUNCH / "deepspeed_hosts.sh"), folder=tmp_path, variables=recorder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {words}")
    assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_hosts_script_refuses_a_folder_that_the_launcher_would_mangle(tmp_path: Path, recorder: dict[str, str]) -> None:
    folder = tmp_path / "$(touch canary)"
    folder.mkdir()
    done = run(
        str(LAUNCH / "deepspeed_hosts.sh"), folder=folder, variables=recorder | {"HOSTFILE": str(tmp_path / "hosts")}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {folder}: the launcher needs a path without spaces and shell characters\n"


def test_the_example_hostfile_is_one(tmp_path: Path, recorder: dict[str, str]) -> None:
    example = str(LAUNCH / "hostfile.example")
    done = run(str(LAUNCH / "deepspeed_hosts.sh"), folder=tmp_path, variables=recorder | {"HOSTFILE": example})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[2] == "node1 slots=8\nnode2 slots=8\n"


@pytest.mark.parametrize(
    ("script", "variable"),
    [("torchrun.sh", "NPROC_PER_NODE"), ("mpirun.sh", "NPROC"), ("deepspeed_hosts.sh", "HOSTFILE")],
)
def test_scripts_say_what_they_need(tmp_path: Path, script: str, variable: str) -> None:
    done = run(str(LAUNCH / script), folder=tmp_path)
    assert done.returncode == 1
    assert f"{variable}: is " in done.stderr
    assert done.stderr.count("\n") == 1


def test_torchrun_over_several_hosts_is_told_who_they_are(tmp_path: Path) -> None:
    recorder = tmp_path / "torchrun"
    recorder.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" "threads $OMP_NUM_THREADS" "memory $PYTORCH_ALLOC_CONF"\nexit 7\n'
    )
    recorder.chmod(0o755)
    variables = {"NPROC_PER_NODE": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node1", "OMP_NUM_THREADS": "3"}
    variables["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"  # a value that is set stays, by its older name too
    path = f"{tmp_path}:{environment()['PATH']}"
    done = run(str(LAUNCH / "torchrun.sh"), "--log-dir", "$x", folder=tmp_path, variables=variables | {"PATH": path})
    hosts = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "node1", "--master-port", "29500"]
    expected = [
        "--nproc-per-node",
        "4",
        *hosts,
        "--",
        RANK,
        PRETRAIN,
        "--log-dir",
        "$x",
        "threads 3",
        "memory max_split_size_mb:64",
    ]
    assert (done.returncode, done.stdout.splitlines()) == (7, expected)
