#!/usr/bin/env python3
"""`launcher.py LAUNCHER ARGUMENTS`: what the scripts beside this file start a launcher with. What the rank that failed
first said last comes last, and nothing is left behind (megatron_allattn/cluster/nodes/launching.py).

    python launch/launcher.py mpirun -n 2 python launch/rank.py pretrain.py --recipe demo
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.cluster.nodes.launching import main

if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    sys.exit(main(sys.argv[1:]))
