"""Which rank is this process? One answer under every launcher, and the start of `torch.distributed` from it.

    RANK, WORLD_SIZE, …          plain environment variables, torchrun, the deepspeed launcher
    PMI_*, OMPI_COMM_WORLD_*     an MPI launcher: ranks come from mpi4py; rank 0 broadcasts its address and a free port
    SLURM_PROCID, … in a step    srun: rank 0 is on the first host of the step; the port follows from the job's id
    none of them                 a single process

The first that is present decides. Variables that are partial or contradict each other are a UsageError: a guess would
hang the other ranks.
"""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.parallel import meeting, mpi_place
from megatron_allattn.parallel.addresses import LOOPBACK, PORTS, LaunchError, RankInfo, free_port, in_use_message
from megatron_allattn.parallel.collectives import PeerFailed
from megatron_allattn.parallel.nodelist import first_host, tasks_on_node

MPI_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
MEETING_SLACK_SECONDS = 5.0  # for PyTorch's own time-out, which has more to say


def discover(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Find this process's rank. Call once; under MPI it is collective. Raises UsageError naming the variable."""
    if _present(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        return _checked(_from_environment(environ))
    if (names := _mpi_variables(environ)) is not None:
        return _checked(_from_mpi(environ, *names))
    if _in_slurm_step(environ):
        return _checked(_from_slurm(environ))
    return RankInfo(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_addr=LOOPBACK,
        master_port=free_port(),
        source="single",
    )


def select_device(info: RankInfo) -> torch.device:
    """This rank's device: a GPU of its own where there are GPUs, else the CPU. Raises UsageError: too few GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1 and info.source == "srun" and os.environ.get("SLURM_GPUS_PER_TASK"):
        return torch.device("cuda", 0)  # srun shows each task its own GPU only
    if info.local_world_size > num_gpus:
        raise usage_error(
            "ranks on this host",
            info.local_world_size,
            f"each needs its own GPU and {num_gpus} are visible",
            "start fewer ranks per host (or hide the GPUs with CUDA_VISIBLE_DEVICES='' to run on the CPU)",
        )
    return torch.device("cuda", info.local_rank)


def initialize(info: RankInfo, timeout: float, device: torch.device) -> None:
    """Start `torch.distributed` (NCCL on a GPU, gloo on the CPU); `timeout` in seconds holds for every collective.

    The rank variables are put into the environment, where DeepSpeed looks for them. Collective. Raises LaunchError when
    the port is in use or not all ranks come within the time-out, PeerFailed when another has said so.
    """
    os.environ.update(
        RANK=str(info.rank),
        WORLD_SIZE=str(info.world_size),
        LOCAL_RANK=str(info.local_rank),
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        MASTER_ADDR=info.master_addr,
        MASTER_PORT=str(info.master_port),
    )
    backend, duration = "gloo", timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    if info.world_size == 1:  # in memory: needs no port
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=duration)
        return
    # PyTorch's own time-out does not hold while a rank waits for a stranger that listens on the port and says nothing.
    watch = threading.Timer(timeout + MEETING_SLACK_SECONDS, _give_up, (info, timeout))
    watch.daemon = True
    watch.start()
    begin = time.monotonic()
    try:
        store = meeting.open_store(info.rank, info.world_size, info.master_addr, info.master_port, timeout)
        here = meeting.Arrival(socket.gethostname(), info.local_rank, info.local_world_size)
        left = timeout - (time.monotonic() - begin)
        missing = meeting.wait_for_all(store, here, info.rank, info.world_size, left)
        if missing is None:
            dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=duration)
            return
    except (RuntimeError, ValueError, OSError) as error:  # torch.distributed.DistError is a RuntimeError
        raise LaunchError(_launch_message(info, timeout, error)) from error
    finally:
        watch.cancel()
    if missing.told_by != info.rank:
        raise PeerFailed(missing.told_by, 1)
    raise LaunchError(_launch_message(info, timeout, TimeoutError(missing.message)))


def _give_up(info: RankInfo, timeout: float) -> None:
    """End a process whose main thread cannot be reached any more."""
    print(f"error: {_launch_message(info, timeout, TimeoutError('no answer'))}", file=sys.stderr, flush=True)
    os._exit(1)


def _launch_message(info: RankInfo, timeout: float, error: Exception) -> str:
    where = f"{info.master_addr}:{info.master_port}"
    if "EADDRINUSE" in str(error):
        return in_use_message(info.master_addr, info.master_port)
    cause = str(error).strip().partition("\n")[0]
    return (
        f"rank {info.rank} of {info.world_size}: the ranks did not meet at {where} within {timeout:g} s ({cause}); "
        "check MASTER_ADDR and MASTER_PORT, that every rank was started, and the time-out"
    )


def _from_environment(environ: Mapping[str, str]) -> RankInfo:
    for name in ("RANK", "WORLD_SIZE"):
        if not environ.get(name):
            raise UsageError(
                f"{name} is not set, but {_present(environ, 'RANK', 'WORLD_SIZE', 'LOCAL_RANK')[0]} is: a process of "
                "several needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; set all of them or none"
            )
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    alone = world_size == 1
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not alone and not environ.get(name):
            raise UsageError(f"{name} is not set, but WORLD_SIZE={world_size}: set it to the same value on every rank")
    # Without LOCAL_RANK all ranks are on one host; LOCAL_SIZE is the deepspeed launcher's name.
    local_rank = _integer(environ, "LOCAL_RANK", rank)
    if not _present(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE") and local_rank != rank:
        raise UsageError(
            f"LOCAL_WORLD_SIZE is not set, but LOCAL_RANK={local_rank} and RANK={rank} differ: there is more than one "
            "host; set LOCAL_WORLD_SIZE to the number of ranks on this one"
        )
    size_name = "LOCAL_WORLD_SIZE" if environ.get("LOCAL_WORLD_SIZE") else "LOCAL_SIZE"
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_integer(environ, size_name, world_size),
        master_addr=environ.get("MASTER_ADDR") or LOOPBACK,
        master_port=_integer(environ, "MASTER_PORT", free_port() if alone else None),
        source="environment",
    )


def _from_mpi(environ: Mapping[str, str], rank_name: str, size_name: str) -> RankInfo:
    expected_size = _integer(environ, size_name)
    try:
        info, trouble = mpi_place.ask(environ, environ.get("MASTER_ADDR", ""), _integer(environ, "MASTER_PORT", 0))
    except ImportError as error:
        raise UsageError(
            f"{rank_name}={environ[rank_name]}: started by MPI, but mpi4py cannot be used ({error}); pip install "
            "mpi4py for the MPI that mpirun belongs to, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        ) from error
    if info.world_size != expected_size:
        raise UsageError(
            f"{size_name}={expected_size}: mpi4py sees {info.world_size} rank(s): it was built for another MPI; "
            "use the mpirun of the MPI that mpi4py loads"
        )
    if trouble:
        raise LaunchError(trouble) if info.rank == 0 else PeerFailed(0, 1)
    return info


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    rank, world_size = _integer(environ, "SLURM_PROCID"), _integer(environ, size_name)
    job, step = _integer(environ, "SLURM_JOB_ID", 0), _integer(environ, "SLURM_STEP_ID", 0)
    restart = _integer(environ, "SLURM_RESTART_COUNT", 0)  # ranks of the life before may still hold their port
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    address = environ.get("MASTER_ADDR") or (first_host(hosts) if hosts else environ.get("SLURM_LAUNCH_NODE_IPADDR"))
    if not address:
        raise UsageError("SLURM_JOB_NODELIST is not set: the first rank's host is unknown; set MASTER_ADDR")
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world_size)
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=tasks_on_node(per_node, _integer(environ, "SLURM_NODEID", 0)),
        master_addr=address,
        master_port=_integer(environ, "MASTER_PORT", PORTS[(31 * job + 7 * restart + step) % len(PORTS)]),
        source="srun",
    )


def _checked(info: RankInfo) -> RankInfo:
    """Refuse numbers that cannot be: the variable's name is the one of plain environment variables."""
    rules = (
        ("WORLD_SIZE", info.world_size, info.world_size >= 1, "at least 1"),
        ("RANK", info.rank, 0 <= info.rank < info.world_size, f"from 0 to WORLD_SIZE - 1 = {info.world_size - 1}"),
        (
            "LOCAL_WORLD_SIZE",
            info.local_world_size,
            1 <= info.local_world_size <= info.world_size,
            "from 1 to WORLD_SIZE",
        ),
        (
            "LOCAL_RANK",
            info.local_rank,
            0 <= info.local_rank < info.local_world_size,
            f"from 0 to LOCAL_WORLD_SIZE - 1 = {info.local_world_size - 1}",
        ),
        ("MASTER_PORT", info.master_port, 0 < info.master_port < 65_536, "a TCP port, 1 to 65535"),
    )
    for name, value, holds, rule in rules:
        if not holds:
            raise usage_error(name, value, f"must be {rule} (found by {info.source})", "correct the launch command")
    return info


def _present(environ: Mapping[str, str], *names: str) -> list[str]:
    return [name for name in names if environ.get(name)]


def _mpi_variables(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The MPI launcher's two variables, unless srun set them too (its own count and rank agree: no MPI needed)."""
    for rank_name, size_name in MPI_VARIABLES:
        if _present(environ, rank_name, size_name):
            for name in (rank_name, size_name):
                if not environ.get(name):
                    raise UsageError(f"{name} is not set, but its partner is: start with mpirun, or unset both")
            ours = (environ[rank_name], environ[size_name])
            srun = (environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS"))
            return None if _in_slurm_step(environ) and srun == ours else (rank_name, size_name)
    return None


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Under srun. The shell of a batch job has SLURM_PROCID=0 too, but no step id: what it starts runs alone."""
    return bool(environ.get("SLURM_PROCID") and environ.get("SLURM_STEP_ID"))


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if not text and default is not None:
        return default
    if not text:
        raise UsageError(f"{name} is not set: the launcher should have set it; correct the launch command")
    if not re.fullmatch(r"-?\d+", text):
        raise usage_error(name, repr(text), "not a whole number", "correct the launch command")
    return int(text)
