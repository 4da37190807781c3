"""What `--dry-run` needs to know beside the run: no part of a run's configuration, so neither config.json nor a
checkpoint has it."""

from dataclasses import dataclass

from megatron_allattn.config.checks import LARGEST, check_range, conform_types
from megatron_allattn.config.errors import UsageError, flag


@dataclass(frozen=True, kw_only=True)
class DryRunConfig:
    """Dry run: a job of any size, checked by one process of this machine, which trains nothing."""

    dry_run: bool = False
    """Build every process's part without memory, check one step's messages of all of them against each other, who owns
    which weights and how much memory each needs, and end."""

    world_size: int | None = None
    """Processes of the job that is checked."""

    gpus_per_node: int | None = None
    """How many of them a node has: says which groups lie within a node."""

    gpu: str | None = None
    """The GPU whose memory they must fit into, such as h100-80."""

    def __post_init__(self) -> None:
        conform_types(self)
        check_range(self, "world_size", at_least=1, at_most=LARGEST)
        check_range(self, "gpus_per_node", at_least=1, at_most=LARGEST)
        if not self.dry_run:
            for name in ("world_size", "gpus_per_node", "gpu"):
                if (value := getattr(self, name)) is not None:
                    rule = "has no effect without --dry-run: a launcher says how many processes there are"
                    raise UsageError(f"{flag(name)} {value}: {rule}; add that or leave it out")
        elif self.world_size is None:
            raise UsageError("--dry-run: needs to know how many processes the job has; add --world-size N")
