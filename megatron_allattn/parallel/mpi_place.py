"""A rank's place among those that an MPI launcher has started, which a process of its own asks of MPI through mpi4py.

The rank itself then holds no MPI: neither its threads and handlers, nor its rules for the end of a process. MPICH takes
leave of its launcher in C's exit handlers, a rank ends without those (config/reporting.py), and the launcher kills all
ranks of a host once one is gone without leave. Of runs that were done and saved it made one in two a failed one, with
exit code 9 (seen with MPICH 5.0.2).
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_allattn.parallel.addresses import LOOPBACK, LaunchError, free_port, in_use, in_use_message, own_address

_ROOT = Path(__file__).resolve().parents[2]
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True, kw_only=True)
class Place:
    """Ranks count from 0; `local` means on this host. trouble: why rank 0 cannot be met at its address and port."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    trouble: str


def ask(environ: Mapping[str, str], address: str, port: int) -> Place:
    """This rank's place; collective. Rank 0 decides where all meet: at `address`, unless that is empty, and at `port`,
    unless that is 0. environ: as the launcher has set it.

    Raises ImportError: mpi4py cannot be used; LaunchError: MPI ended without an answer.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), environ.get("PYTHONPATH")]))
    words = [sys.executable, "-m", "megatron_allattn.parallel.mpi_place", address, str(port)]
    done = subprocess.run(
        words,
        env=dict(environ) | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,  # it is the rank's
        stdout=subprocess.PIPE,
        close_fds=False,  # MPI's daemon talks through a descriptor
        check=False,
    )
    answer = done.stdout.decode(errors="replace").splitlines()[-1:]
    if done.returncode != 0 or not answer:
        raise LaunchError(
            f"mpi4py: MPI ended with exit code {done.returncode} before it had told this process its rank"
        )
    told = json.loads(answer[0])
    if "unusable" in told:
        raise ImportError(told["unusable"])
    return Place(**told)


def _meet(address: str, port: int, *, alone: bool) -> tuple[str, int, str]:
    """Address, port and trouble, of rank 0. alone: whether all ranks are on this host."""
    try:
        address = address or (LOOPBACK if alone else own_address())
        port = port or free_port()
    except LaunchError as error:
        return address, port, str(error)
    return address, port, in_use_message(address, port) if in_use(port) else ""


def _tell(address: str, port: int) -> None:
    """In the process of its own: print its place as JSON, in one line."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)  # with the rank
    try:
        from mpi4py import MPI  # noqa: PLC0415 - loading it starts MPI
    except (ImportError, RuntimeError) as error:
        print(json.dumps({"unusable": str(error)}))
        return
    world = MPI.COMM_WORLD
    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    alone = host.Get_size() == world.Get_size()
    # launchers do not end the others when rank 0 fails: they have to hear of it here
    master_addr, master_port, trouble = world.bcast(
        _meet(address, port, alone=alone) if world.Get_rank() == 0 else None, root=0
    )
    place = Place(
        rank=world.Get_rank(),
        world_size=world.Get_size(),
        local_rank=host.Get_rank(),
        local_world_size=host.Get_size(),
        master_addr=master_addr,
        master_port=master_port,
        trouble=trouble,
    )
    host.Free()
    print(json.dumps(asdict(place)), flush=True)


if __name__ == "__main__":
    _tell(sys.argv[1], int(sys.argv[2]))
