"""Two "hosts" on one machine: a private sshd on 127.0.0.1 and 127.0.0.2 that lets the test's own user in by a new key.

`ssh` first on the PATH (see `LoopbackHosts.path`) is a wrapper that reads only our configuration, so that programs
which start ssh themselves (pdsh, the deepspeed launcher) reach this sshd and nothing else. ~/.ssh is not touched.
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_allattn.parallel.addresses import free_port
from tests.support.commands import environment

HOSTS = ("127.0.0.1", "127.0.0.2")
PRIVILEGE_SEPARATION = Path("/run/sshd")  # where Debian's sshd, as root, wants an empty folder

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""

CLIENT = """\
Host *
  Port {port}
  User {user}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known_hosts
  LogLevel ERROR
"""


@dataclass(frozen=True)
class LoopbackHosts:
    """hostfile: one slot on each host; path: a PATH entry with an `ssh` that reaches them; port: of the sshd."""

    hostfile: Path
    path: Path
    port: int


def missing_programs() -> str:
    """What has to be installed for `loopback_hosts`, or nothing."""
    names = ("sshd", "ssh", "ssh-keygen", "pdsh")
    return ", ".join(name for name in names if not _find(name))


def open_mpi(folder: Path) -> dict[str, str]:
    """Variables under which launch/mpirun.sh takes Debian's Open MPI; skips the test where there is none."""
    real = shutil.which("mpirun.openmpi")
    if real is None:
        pytest.skip("no Open MPI: apt-get install openmpi-bin (make system-deps)")
    (folder / "mpirun").symlink_to(real)
    flags = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    return {"PATH": f"{folder}:{environment()['PATH']}", "MPIRUN_FLAGS": " ".join(flags)}


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


@contextmanager
def loopback_hosts(folder: Path) -> Iterator[LoopbackHosts]:
    """Start the sshd, with all its files in `folder` (a path without spaces), and end it."""
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    values = {"port": port, "folder": folder, "user": getpass.getuser()}
    (folder / "sshd_config").write_text(SERVER.format(**values))
    (folder / "ssh_config").write_text(CLIENT.format(**values))
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {_find("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    hostfile = folder / "hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in HOSTS))

    made = os.geteuid() == 0 and not PRIVILEGE_SEPARATION.exists()
    if made:
        PRIVILEGE_SEPARATION.mkdir(mode=0o755)
    log = folder / "sshd.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [str(_find("sshd")), "-D", "-e", "-f", str(folder / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait_for(server, port, log)
        for host in HOSTS:
            subprocess.run([str(wrapper), host, "true"], check=True, timeout=30)
        yield LoopbackHosts(hostfile, folder / "bin", port)
    finally:
        server.terminate()
        server.wait(10)
        if made:
            with suppress(OSError):
                PRIVILEGE_SEPARATION.rmdir()


def _wait_for(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + 20
    for host in HOSTS:
        while True:
            with suppress(OSError), socket.create_connection((host, port), timeout=1):
                break
            assert server.poll() is None and time.monotonic() < deadline, f"sshd did not start:\n{log.read_text()}"
            time.sleep(0.05)
