#!/usr/bin/env python3
"""`rank.py SCRIPT ARGUMENTS`: what the scripts beside this file have a launcher start for each rank. It runs the script
as a child and tells how it ended (megatron_allattn/cluster/nodes/rank_process.py).

    python launch/rank.py pretrain.py --recipe demo
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.cluster.nodes.rank_process import main

if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    sys.exit(main(sys.argv[1:]))
