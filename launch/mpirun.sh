#!/usr/bin/env bash
# pretrain.py under mpirun (MPICH, also the one of PyPI; Open MPI); every argument goes to pretrain.py:
#
#   NPROC=2 launch/mpirun.sh --tensor-model-parallel-size 2 --save runs/small
#   HOSTFILE=hosts launch/mpirun.sh --recipe enwik8-large --save /shared/large
#
# HOSTFILE has a line HOST slots=N for each host (hostfile.example), whichever MPI it is, and NPROC is then the sum;
# HOSTFILE=slurm means the nodes of this allocation, with SLURM's number of GPUs (else tasks) a node or GPUS_PER_NODE.
# mpirun reaches the hosts by ssh, which must ask nothing. MPIRUN_FLAGS are its own (Open MPI, as root and with more
# processes than cores: "--allow-run-as-root --oversubscribe"). mpi4py must be able to load the same MPI (MPI4PY_LIBMPI).
#
# SIGTERM, SIGUSR1 and SIGINT make the run save and stop.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/env.sh"
source "$root/launch/hosts.sh"

read -ra flags <<<"${MPIRUN_FLAGS:-}"
form=mpich flag=-f signals=(--signal=INT:USR1) # upon which it kills
if [[ $(mpirun --version) == *"Open MPI"* ]]; then
    form=openmpi flag=--hostfile
    signals+=(--signal=TERM:USR1) # so does this one, upon both; SIGUSR1 it passes on
    # Of two MPIs mpi4py loads the one of PyPI, if that is there.
    export MPI4PY_LIBMPI="${MPI4PY_LIBMPI:-libmpi.so.40}"
    # To other hosts it passes on nothing but what it is told to; MPICH's passes on everything.
    for name in $(passed_on) ${PYTHONPATH:+PYTHONPATH}; do flags+=(-x "$name"); done
fi
if [ -n "${HOSTFILE:-}" ]; then
    NPROC=${NPROC:-$(python "$root/launch/hostfile.py" count "$HOSTFILE" ${GPUS_PER_NODE:+--gpus-per-node "$GPUS_PER_NODE"})}
    hosts_for "$form"
    flags+=("$flag" "$hosts")
fi
exec python "$root/launch/launcher.py" "${signals[@]}" mpirun -n "${NPROC:?is the number of processes in all}" "${flags[@]}" \
    python -u "$root/launch/rank.py" "$program" "$@"
