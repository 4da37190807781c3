#!/usr/bin/env python3
"""`hostfile.py {deepspeed,openmpi,mpich,torchrun,count} FILE`: a hostfile, read strictly, for a launcher; `slurm` for
FILE makes one of the nodes of this allocation (megatron_allattn/cluster/nodes/hostfile.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.cluster.nodes.hostfile import main

if __name__ == "__main__":
    sys.exit(main())
