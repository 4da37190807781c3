"""A rank among all, and where they meet: an address of this host and a port of it. Imports no torch."""

import errno
import os
import random
import socket
from contextlib import suppress
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
PORTS = range(12_000, 32_000)  # below those that Linux gives to any connection that comes first


class LaunchError(RuntimeError):
    """The ranks could not be brought together (one line: address, port, cause, way out)."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """This process among all: ranks count from 0, `local` means on this host; `source`: how it was found."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    source: str  # environment | mpi | srun | single


def free_port() -> int:
    """A TCP port of PORTS that nothing on this machine uses right now. Raises LaunchError: none was found."""
    for port in random.SystemRandom().sample(PORTS, 1000):
        with suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port))
            return port
    raise LaunchError(f"{LOOPBACK}: no free port from {PORTS[0]} to {PORTS[-1]} was found; set MASTER_PORT to one")


def listen_error(port: int) -> OSError | None:
    """Why torch.distributed cannot listen at a TCP port of this host; None: it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch.distributed does
        try:
            probe.bind(("", port))
        except OSError as error:
            return error
    return None


def in_use(port: int) -> bool:
    """Whether something on this host has a TCP port already."""
    error = listen_error(port)
    return error is not None and error.errno == errno.EADDRINUSE


def in_use_message(address: str, port: int) -> str:
    """What is told of a port that is in use."""
    return (
        f"address {address}, port {port}: the port is in use on this host; choose another: "
        "MASTER_PORT=N in the environment (deepspeed --master_port N, torchrun --master-port N)"
    )


def own_address() -> str:
    """An address of this host that others can reach: the one its name or its default route stands for.

    Raises LaunchError: it has none but that of itself.
    """
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = LOOPBACK
    if address.startswith("127."):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("10.255.255.255", 1))  # a datagram socket: looks up the route, sends nothing
                address = str(probe.getsockname()[0])
            except OSError as error:
                why = f"no network address of this host is known ({os.strerror(error.errno or 0)})"
                raise LaunchError(f"{why}; set MASTER_ADDR") from error
    return address
