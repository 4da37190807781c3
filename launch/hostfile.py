#!/usr/bin/env python3
"""A hostfile, read strictly, for deepspeed, openmpi, mpich or torchrun. Exit code 0: it is one, 2: it is not.

    python launch/hostfile.py count hosts              # how many ranks in all, or file, line and text of what is wrong
    python launch/hostfile.py mpich hosts
    python launch/hostfile.py deepspeed slurm          # the nodes of this allocation, from SLURM's variables

The scripts beside this file call it (megatron_allattn/cluster/nodes/hostfile.py).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.cluster.nodes.hostfile import main

if __name__ == "__main__":
    sys.exit(main(about=__doc__))
