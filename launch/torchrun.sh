#!/usr/bin/env bash
# pretrain.py under torchrun; every argument goes to pretrain.py:
#
#   NPROC_PER_NODE=8 launch/torchrun.sh --recipe enwik8-small --tensor-model-parallel-size 8 --save runs/small
#
# Several hosts: the same line on each, with NNODES=2, NODE_RANK=0 (1, …) and MASTER_ADDR (MASTER_PORT) of the first.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/env.sh"

hosts=()
if [ "${NNODES:-1}" -gt 1 ]; then
    hosts=(--nnodes "$NNODES" --node-rank "${NODE_RANK:?is this host among NNODES, from 0}"
        --master-addr "${MASTER_ADDR:?is the first host}" --master-port "${MASTER_PORT:-29500}")
fi
# After the -- torchrun takes no argument for one of its own.
exec torchrun --nproc-per-node "${NPROC_PER_NODE:?is the number of processes on this host}" "${hosts[@]}" -- \
    "$root/pretrain.py" "$@"
