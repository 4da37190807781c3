#!/usr/bin/env bash
# pretrain.py under mpirun (MPICH, also the one of PyPI; Open MPI); every argument goes to pretrain.py:
#
#   NPROC=2 launch/mpirun.sh --tensor-model-parallel-size 2 --save runs/small
#
# MPIRUN_FLAGS are mpirun's own, for example "-f hosts" (MPICH) or "--hostfile hosts" (Open MPI; as root, and with more
# processes than cores, "--allow-run-as-root --oversubscribe"). mpi4py must be able to load the same MPI.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/env.sh"

read -ra flags <<<"${MPIRUN_FLAGS:-}"
exec mpirun -n "${NPROC:?is the number of processes in all}" "${flags[@]}" python -u "$root/pretrain.py" "$@"
