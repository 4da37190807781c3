"""A real SLURM cluster on this machine: munged, slurmctld and one slurmd a node, ended by their process ids.

Every node is a set of namespaces (mounts, host name, processes, network) of its own: it has its own /etc/hosts, its own
process table and an address on a bridge that lives in the controller's namespace, so that a wrong address fails as it
does between machines, and a node loses its power when the first process of its process table is killed. Nothing of
this reaches the host's network, and everything dies with the test's own process, however that ends.

Needs root and the packages of `make system-deps`; `why_none` says what is missing. GPUs are pretended: null devices.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import MARK, ROOT, environment, marked

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "unshare", "nsenter", "setpriv")
SUBNET, CONTROLLER = "10.77.0", 254
# A job that is requeued passes through others, PREEMPTED and SIGNALING among them, which say nothing of its end.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")
BOOT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Site:
    """What differs between clusters; times in seconds. down_after: a node that says nothing so long is lost.

    grace: what the partition `urgent` leaves to a job that it drives out of the partition `gpu`.
    """

    nodes: int = 2
    gpus: int = 8
    cpus: int = 64
    grace: int = 120
    kill_wait: int = 5
    down_after: int = 30


def why_none() -> str | None:
    """Why there can be no cluster here, None where there can be."""
    if os.geteuid() != 0:
        return "a cluster on one machine needs root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        return f"not installed: {', '.join(missing)} (make system-deps)"
    command = ["unshare", "--mount", "--uts", "--pid", "--net", "--fork", "--mount-proc", "hostname", "n1"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


@contextmanager
def cluster(site: Site) -> Iterator["Cluster"]:
    """A cluster that is up, and ends with the block."""
    # not a folder of pytest's, which other users cannot enter: munge looks at every folder above its socket
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        os.chmod(folder, 0o755)
        made = Cluster(Path(folder), site)
        try:
            made.start()
            yield made
        finally:
            made.stop()


class Cluster:
    """Commands of SLURM are given to `run`; nodes are n1, n2, …"""

    def __init__(self, state: Path, site: Site) -> None:
        self._state, self._site = state, site
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.mark = environment()[MARK]

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self._site.nodes + 1)]

    # what a test does with it ------------------------------------------------------------------------------------

    def run(self, *command: str, folder: Path, variables: Mapping[str, str] | None = None, code: int = 0) -> str:
        """What a program prints that runs beside the controller, in a folder; AssertionError at another exit code."""
        env = environment(
            {"SLURM_CONF": str(self._conf), MARK: self.mark, "PYTHONPATH": str(ROOT)} | dict(variables or {})
        )
        words = [*self.inside("controller"), f"--wd={folder}", *command]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return (done.stdout + (done.stderr if code else "")).strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job; empty while the controller is away."""
        with suppress(AssertionError):
            text = self.run("scontrol", "--oneliner", "show", "job", job, folder=self._state)
            return dict(word.split("=", 1) for word in text.split() if "=" in word)
        return {}

    def ended(self, job: str, seconds: float) -> str:
        """The state in which a job ends, such as COMPLETED. AssertionError when it does not end in time."""
        state = ""

        def ended() -> bool:
            nonlocal state
            state = self.job(job).get("JobState", "")
            return state in ENDED

        self.until(ended, seconds, lambda: f"{self.job(job)}")
        return state

    def until(self, true: Callable[[], bool], seconds: float, told: Callable[[], str]) -> None:
        """Wait for something. AssertionError with what is told when it does not come in time."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {told()}\n{self._complaints()}"
            time.sleep(0.2)

    def ranks(self, job: str) -> dict[int, int]:
        """Process ids, as this machine counts them, of the ranks of a job's training by rank."""
        found = {}
        for pid in marked(self.mark):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                pairs = (entry.partition(b"=") for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
                variables = {name.decode(): value.decode(errors="replace") for name, _, value in pairs}
                ours = variables.get("SLURM_JOB_ID") == job and "SLURM_STEP_ID" in variables
                if ours and b"python" in words[0] and any(word.endswith(b"/pretrain.py") for word in words[1:4]):
                    found[int(variables["SLURM_PROCID"])] = pid
        return found

    def crash(self, node: str) -> None:
        """The node loses its power: everything on it is gone at once."""
        os.kill(self._first_process(node), signal.SIGKILL)
        self._processes.pop(node).wait()

    def crash_daemon(self, node: str) -> None:
        """The node's slurmd alone is gone; what it has started goes on."""
        for child in _children(self._first_process(node)):
            if Path(f"/proc/{child}/comm").read_text().strip() == "slurmd":
                os.kill(child, signal.SIGKILL)

    def boot(self, node: str) -> None:
        """Start a node, for the first time or after a crash."""
        number = int(node[1:])
        (self._state / f"spool-{node}").mkdir(exist_ok=True)
        kinds = ("--mount", "--uts", "--pid", "--net", "--fork", "--kill-child", "--mount-proc")
        script = NODE.format(hosts=self._state / "hosts", name=node, address=f"{SUBNET}.{number}", conf=self._conf)
        self._processes[node] = self._started(node, "unshare", *kinds, "bash", "-c", script)
        first = self._first_process(node)
        wire = CABLE.format(number=number, first=first)
        subprocess.run([*self.inside("controller"), "bash", "-ec", wire], check=True, capture_output=True)

    def stop_controller(self) -> None:
        """slurmctld ends, having saved what it knows (kill -9 loses the last seconds of that); nodes go on."""
        process = self._processes.pop("slurmctld")
        process.terminate()
        process.wait(BOOT_SECONDS)

    def start_controller(self) -> None:
        """Start slurmctld, which takes up what it knew."""
        command = ("slurmctld", "-D", "-f", str(self._conf))
        self._processes["slurmctld"] = self._started("slurmctld", *self.inside("controller"), *command)
        self.until(
            lambda: "is UP" in self._asked("scontrol", "ping"), BOOT_SECONDS, lambda: "slurmctld does not come up"
        )

    # from nothing to idle nodes, and back --------------------------------------------------------------------------

    @property
    def _conf(self) -> Path:
        return self._state / "slurm.conf"

    def start(self) -> None:
        for name in ("log", "controller", "munge", "dev"):
            (self._state / name).mkdir(mode=0o755)
        self._write_configuration()
        munge = self._state / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._processes["munged"] = self._started(
            "munged", "munged", "--foreground", *(f"--{flag}={munge / name}" for flag, name in files.items())
        )
        self.until((munge / "socket").exists, BOOT_SECONDS, lambda: "munged does not come up")
        script = HOLDER.format(hosts=self._state / "hosts", address=f"{SUBNET}.{CONTROLLER}")
        self._processes["controller"] = self._started(
            "controller", "unshare", "--mount", "--uts", "--net", "bash", "-c", script
        )
        ready = self._state / "log" / "controller"
        self.until(lambda: "ready" in ready.read_text(), BOOT_SECONDS, ready.read_text)
        self.start_controller()
        for node in self.nodes:
            self.boot(node)
        self.until(lambda: self.idle() == self.nodes, BOOT_SECONDS, lambda: self._asked("sinfo", "-N", "-l"))

    def idle(self) -> list[str]:
        """The nodes that wait for work."""
        lines = self._asked("sinfo", "--noheader", "-N", "--partition=gpu", "-o", "%N %t").splitlines()
        return sorted((line.split()[0] for line in lines if line.endswith(" idle")), key=lambda name: int(name[1:]))

    def stop(self) -> None:
        """End everything, nodes first: with the first process of a node goes all that runs on it."""
        for name in sorted(self._processes, key=lambda name: name not in self.nodes):
            process = self._processes[name]
            if name in self.nodes:
                with suppress(IndexError, ProcessLookupError, FileNotFoundError):
                    os.kill(_children(process.pid)[0], signal.SIGKILL)
            process.kill()
            process.wait()
        self._processes = {}

    def _write_configuration(self) -> None:
        nodes, site = range(1, self._site.nodes + 1), self._site
        addresses = {CONTROLLER: "controller", **{number: f"n{number}" for number in nodes}}
        lines = [f"{SUBNET}.{number} {name}\n::ffff:{SUBNET}.{number} {name}" for number, name in addresses.items()]
        (self._state / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
        values = {"state": self._state, "address": f"{SUBNET}.{CONTROLLER}", **vars(site)}
        hosts = (
            f"NodeName=n{number} NodeAddr={SUBNET}.{number} CPUs={site.cpus} RealMemory=512000 Gres=gpu:{site.gpus}\n"
            for number in nodes
        )
        self._conf.write_text(CONFIGURATION.format(**values) + "".join(hosts))
        for number in range(site.gpus):  # a bare count of GPUs would make a node invalid
            os.mknod(self._state / "dev" / f"nvidia{number}", 0o020666, os.makedev(1, 3))
        devices = f"{self._state}/dev/nvidia[0-{site.gpus - 1}]" if site.gpus > 1 else f"{self._state}/dev/nvidia0"
        (self._state / "gres.conf").write_text(f"Name=gpu File={devices}\n")

    def _started(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        """A process that ends with this one; what it says is in the file log/NAME.

        It has the usual priority, whatever the test has: a daemon that gets no turn takes its nodes for lost. Jobs have
        the priority of whoever submits them (PropagatePrioProcess).
        """
        env = environment({"SLURM_CONF": str(self._conf), MARK: self.mark})
        env["PATH"] += ":/usr/sbin:/sbin"
        with (self._state / "log" / name).open("ab") as log:
            return subprocess.Popen(
                ["nice", "-n", str(-os.nice(0)), "setpriv", "--pdeathsig", "KILL", *command],
                cwd=self._state, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def inside(self, name: str) -> list[str]:
        """What brings a command into the namespaces of a node, or of `controller`."""
        pid = self._first_process(name) if name in self.nodes else self._processes[name].pid
        return ["nsenter", f"--target={pid}", "--mount", "--uts", "--net"]

    def _first_process(self, node: str) -> int:
        """Process 1 of a node, as this machine counts it."""
        pid = self._processes[node].pid
        self.until(lambda: bool(_children(pid)), BOOT_SECONDS, lambda: f"{node} does not start")
        return _children(pid)[0]

    def _asked(self, *command: str) -> str:
        with suppress(AssertionError):
            return self.run(*command, folder=self._state)
        return ""

    def _complaints(self) -> str:
        """The last lines of the daemons that tell of an error."""
        lines = [line for path in sorted((self._state / "log").iterdir()) for line in _last_lines(path)]
        return "\n".join(line for line in lines if re.search("error|fatal", line))


def _last_lines(path: Path) -> list[str]:
    return [f"{path.name}: {line}" for line in path.read_text(errors="replace").splitlines()[-40:]]


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# Process 1 of a node: it takes the orphans, and stays when slurmd dies, so that running steps do too.
NODE = """
mount --bind {hosts} /etc/hosts
hostname {name}
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip addr add {address}/24 dev eth0 && ip link set eth0 up
slurmd -D -N {name} -f {conf} &
while :; do wait; sleep 0.5; done
"""

CABLE = """
ip link del wire{number} 2>/dev/null || true
ip link add wire{number} type veth peer name eth0 netns {first}
ip link set wire{number} master bridge up
"""

# Holds the namespaces of the controller, in which commands run too, as on a login node.
HOLDER = """
mount --bind {hosts} /etc/hosts && hostname controller && ip link set lo up
ip link add bridge type bridge && ip addr add {address}/24 dev bridge && ip link set bridge up && echo ready
exec sleep infinity
"""

# cred_expire: how long a job that was requeued waits before it may start again (2 minutes otherwise).
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=controller({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={state}/munge/socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/spool-%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
MinJobAge=86400
SlurmdTimeout={down_after}
SlurmctldTimeout=20
MessageTimeout=30
UnkillableStepTimeout=120
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PropagatePrioProcess=1
MailProg=/bin/true
PartitionName=gpu Nodes=ALL Default=YES DefaultTime=60 OverSubscribe=NO PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL DefaultTime=60 OverSubscribe=NO PriorityTier=10 PreemptMode=OFF
"""
