#!/usr/bin/env bash
# pretrain.py under torchrun; every argument goes to pretrain.py:
#
#   NPROC_PER_NODE=8 launch/torchrun.sh --recipe enwik8-small --tensor-model-parallel-size 8 --save runs/small
#
# Several hosts: the same line on each, with NNODES=2, NODE_RANK=0 (1, …) and MASTER_ADDR (MASTER_PORT) of the first.
# With HOSTFILE=hosts (hostfile.example) these follow from the file and this host's name, and the same line is right on
# each: for example by pdsh -R ssh -w ^hosts (NODE_NAME: this host's name in it, where it has another). HOSTFILE=slurm
# means the nodes of this allocation, with SLURM's number of GPUs (else tasks) a node or GPUS_PER_NODE:
#
#   HOSTFILE=slurm srun --ntasks-per-node=1 launch/torchrun.sh --recipe enwik8-large --save /shared/large
#
# SIGTERM and SIGUSR1 make the run save and stop, within TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (600).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/env.sh"
source "$root/launch/hosts.sh"
# torchrun kills what has not ended so long after SIGTERM, 30 s if nothing is said: too short for some saves.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"

if [ -n "${HOSTFILE:-}" ]; then
    place=$(python "$root/launch/hostfile.py" torchrun "$HOSTFILE" ${GPUS_PER_NODE:+--gpus-per-node "$GPUS_PER_NODE"})
    read -r NNODES NODE_RANK slots first <<<"$place"
    NPROC_PER_NODE=${NPROC_PER_NODE:-$slots} MASTER_ADDR=${MASTER_ADDR:-$first}
fi
hosts=()
if [ "${NNODES:-1}" -gt 1 ]; then
    port=${MASTER_PORT:-29500}
    hosts=(--nnodes "$NNODES" --node-rank "${NODE_RANK:?is this host among NNODES, from 0}"
        --master-addr "${MASTER_ADDR:?is the first host}" --master-port "$port")
    if [ "$NODE_RANK" -eq 0 ] && port_in_use "$port"; then
        refuse "MASTER_PORT $port: in use on this host, where the ranks are to meet; choose another (on every host)"
    fi
fi
# After the -- torchrun takes no argument for one of its own.
exec python "$root/launch/launcher.py" --signal=USR1:TERM --signal=INT:TERM \
    torchrun --nproc-per-node "${NPROC_PER_NODE:?is the number of processes on this host}" "${hosts[@]}" -- \
    "$root/launch/rank.py" "$program" "$@"
