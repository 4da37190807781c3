"""A rank's place among those that an MPI launcher has started, which a process of its own asks of MPI through mpi4py.

The rank itself then holds no MPI: neither its threads and handlers, nor its rules for the end of a process. MPICH takes
leave of its launcher in C's exit handlers, a rank ends without those (config/reporting.py), and the launcher kills all
ranks of a host once one is gone without leave. Of runs that were done and saved it made one in two a failed one, with
exit code 9 (seen with MPICH 5.0.2).
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from megatron_allattn.config.processes import die_with_parent, with_package
from megatron_allattn.parallel.addresses import (
    LOOPBACK,
    LaunchError,
    RankInfo,
    free_port,
    in_use,
    in_use_message,
    own_address,
)

ANSWER_SECONDS = 600.0
"""What ranks get to come and be told their place: of one that has ended before, or never started, MPI says nothing."""


def ask(environ: Mapping[str, str], address: str, port: int) -> tuple[RankInfo, str]:
    """This rank's place, and why rank 0 cannot be met at its address and port, empty if it can. Collective.

    Rank 0 decides where all meet: at `address`, unless that is empty, and at `port`, unless that is 0. environ: as the
    launcher has set it.

    Raises ImportError: mpi4py cannot be used; LaunchError: MPI ended without an answer, or gave none in time.
    """
    words = [sys.executable, "-m", "megatron_allattn.parallel.mpi_place", address, str(port)]
    try:
        done = subprocess.run(
            words,
            env=with_package(environ),
            stdin=subprocess.DEVNULL,  # it is the rank's
            stdout=subprocess.PIPE,
            close_fds=False,  # MPI's daemon talks through a descriptor
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"mpi4py: MPI has not told this process its rank within {ANSWER_SECONDS:g} s: other ranks have ended "
            "before, or have not come; see what they have printed"
        ) from None
    answer = done.stdout.decode(errors="replace").splitlines()[-1:]
    if done.returncode != 0 or not answer:
        raise LaunchError(
            f"mpi4py: MPI ended with exit code {done.returncode} before it had told this process its rank"
        )
    told = json.loads(answer[0])
    if "unusable" in told:
        raise ImportError(told["unusable"])
    return RankInfo(**told["place"]), told["trouble"]


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
    die_with_parent()
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
    place = RankInfo(
        rank=world.Get_rank(),
        world_size=world.Get_size(),
        local_rank=host.Get_rank(),
        local_world_size=host.Get_size(),
        master_addr=master_addr,
        master_port=master_port,
        source="mpi",
    )
    host.Free()
    print(json.dumps({"place": asdict(place), "trouble": trouble}), flush=True)


if __name__ == "__main__":
    _tell(sys.argv[1], int(sys.argv[2]))
