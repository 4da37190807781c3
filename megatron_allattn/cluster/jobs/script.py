"""The text of a batch script for one job: launch/pretrain.sbatch with its size, its time and its arguments filled in.

The script that people submit by hand is the template, so that there is one. Options of sbatch are checked to be single
words, and arguments quoted for the shell: nothing in them is acted on.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_allattn.checkpoint.files import write_text_atomic
from megatron_allattn.cluster.jobs.margin import DEFAULT, check_time, seconds
from megatron_allattn.config.checks import LARGEST
from megatron_allattn.config.errors import flag, usage_error

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = ROOT / "launch" / "pretrain.sbatch"
NAME = "job.sbatch"
_WORD = re.compile(r"[A-Za-z0-9_.,:=+@%/&|*\[\]-]+")
_OPTIONAL = ("partition", "account", "qos", "constraint", "reservation", "exclude", "dependency")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job asks SLURM for. nodes: those that train; spare_nodes: so many more, in case one is unfit.

    signal_seconds: how long before the end of its time it is told to stop (margin.py). The others are sbatch's own.
    Raises UsageError.
    """

    nodes: int
    gpus_per_node: int
    spare_nodes: int = 0
    cpus_per_task: int = 8
    time: str = "24:00:00"
    signal_seconds: int = DEFAULT
    job_name: str = "allattn"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    dependency: str | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "cpus_per_task", "signal_seconds", "spare_nodes"):
            value, least = getattr(self, name), 0 if name == "spare_nodes" else 1
            if not least <= value <= LARGEST:
                raise usage_error(flag(name), value, f"must be a whole number from {least} on", "correct it")
        for name in ("job_name", *_OPTIONAL):
            value = getattr(self, name)
            if value is not None and (not _WORD.fullmatch(value) or value.startswith("-")):
                rule = "must be one word of letters, digits and _.,:=+@%/&|*[]-"
                raise usage_error(flag(name), value, rule, "correct it")
        if set(self.job_name) & set("/%"):
            raise usage_error("--job-name", self.job_name, "is part of the output file's name", "leave / and % out")
        check_time(self.signal_seconds, seconds(self.time), self.time)

    @property
    def world_size(self) -> int:
        """Ranks: one for each GPU that trains."""
        return self.nodes * self.gpus_per_node

    def lines(self) -> dict[str, str]:
        """Options of sbatch by name."""
        given = {
            "job-name": self.job_name,
            "nodes": str(self.nodes + self.spare_nodes),
            "ntasks-per-node": str(self.gpus_per_node),
            "gpus-per-node": str(self.gpus_per_node),
            "cpus-per-task": str(self.cpus_per_task),
            "time": self.time,
            "signal": f"B:USR1@{self.signal_seconds}",
        }
        return given | {name: value for name in _OPTIONAL if (value := getattr(self, name)) is not None}


def job_text(arguments: Sequence[str], options: JobOptions) -> str:
    """A batch script that trains with these arguments of pretrain.py."""
    lines: list[str] = []
    left = options.lines()
    for line in TEMPLATE.read_text().splitlines():
        if match := re.match(r"#SBATCH --([\w-]+)", line):
            name = match[1]
            if name in left:
                line = f"#SBATCH --{name}={left.pop(name)}"
        elif line == 'arguments=("$@")':
            line = f'arguments=({" ".join(map(shlex.quote, arguments))} "$@")'
        elif line.startswith("root="):
            line = f"root={shlex.quote(str(ROOT))}\nSPARE_NODES={options.spare_nodes}"
        elif not line and lines[-1].startswith("#SBATCH"):  # after the options that the template has
            lines += [f"#SBATCH --{name}={value}" for name, value in left.items()]
            left = {}
        lines.append(line)
    assert not left, f"{TEMPLATE} has no place for {left}"
    return "\n".join(lines) + "\n"


def array_text(elements: Sequence[Sequence[str]], options: JobOptions) -> str:
    """The same for an array of jobs: with the arguments of each of its elements, an output file for each."""
    assert elements
    text = job_text([], options).replace("%x-%j.out", "%x-%A-%a.out")
    cases = (
        f'{place}) arguments=({" ".join(map(shlex.quote, words))} "$@") ;;' for place, words in enumerate(elements)
    )
    chosen = "\n".join(["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"])
    option = f"#SBATCH --array=0-{len(elements) - 1}"
    first = next(line for line in text.splitlines() if line.startswith("#SBATCH"))
    return text.replace(first, f"{option}\n{first}", 1).replace('arguments=( "$@")', chosen, 1)


def write_job(folder: Path, arguments: Sequence[str], options: JobOptions) -> Path:
    """Write that script as FOLDER/job.sbatch, to be submitted with `sbatch`. Raises StorageError."""
    path = folder / NAME
    write_text_atomic(path, job_text(arguments, options))
    path.chmod(0o755)
    return path
