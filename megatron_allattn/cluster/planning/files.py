"""What a plan leaves: the DeepSpeed JSON of a layout and the exact command."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_allattn.cluster.planning.plan import Candidate
from megatron_allattn.config.cli import without_flag
from megatron_allattn.config.ds_config import load_deepspeed_json

DEEPSPEED, COMMAND = "deepspeed.json", "command.sh"


def arguments_of(given: Sequence[str], chosen: Sequence[str], folder: Path) -> list[str]:
    """Of pretrain.py: those that the user gave, those that the plan chose, and the DeepSpeed JSON in `folder`."""
    own = any(word.replace("_", "-").startswith("--deepspeed-config") for word in given)
    file = [] if own else ["--deepspeed-config", str(folder / DEEPSPEED)]
    return [*given, *without_flag(chosen, "zero-stage"), *file]  # the stage is in the JSON


def write_deepspeed(candidate: Candidate, world_size: int, folder: Path) -> Path:
    """The DeepSpeed JSON of the layout: what its ZeRO stage's file says. Raises OSError."""
    content = load_deepspeed_json(candidate.run, world_size)
    path = folder / DEEPSPEED
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def write_command(arguments: Sequence[str], nodes: int, gpus_per_node: int, folder: Path, root: Path) -> Path:
    """A shell script that starts every rank by the deepspeed launcher, on one node or on the hosts of HOSTFILE, which
    launch/deepspeed_hosts.sh reads: the launcher itself would train on one host where there is no such file."""
    words = ["deepspeed", "--num_gpus", str(gpus_per_node), str(root / "pretrain.py")]
    about, hosts = "on this node", ""
    if nodes > 1:
        words = [str(root / "launch" / "deepspeed_hosts.sh")]
        about = f"on the {nodes} nodes of HOSTFILE (a line HOST slots={gpus_per_node} for each; default ./hostfile)"
        hosts = 'export HOSTFILE="${HOSTFILE:-hostfile}"\n'
    line = shlex.join([*words, *arguments])
    path = folder / COMMAND
    path.write_text(f"#!/bin/sh\n# {gpus_per_node} ranks on each node, {about}\nset -eu\n{hosts}exec {line}\n")
    path.chmod(0o755)
    return path
