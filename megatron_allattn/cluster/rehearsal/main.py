"""`pretrain.py --dry-run`: from a configuration to a report and an exit code."""

import sys

from megatron_allattn.cluster.rehearsal.rehearse import rehearse, vocabulary_of
from megatron_allattn.cluster.rehearsal.report import lines
from megatron_allattn.config import Command, UsageError
from megatron_allattn.config.reporting import refuse


def run_dry(command: Command) -> int:
    """Check the job of a command line and print what was found; exit code 0, or 2 where the job would fail or hang,
    with one line that says why."""
    wanted = command.dry_run
    assert wanted is not None and wanted.world_size is not None
    try:
        vocabulary = vocabulary_of(command.run)
        report = rehearse(command.run, vocabulary[0], wanted.world_size, wanted.gpus_per_node, wanted.gpu)
    except UsageError as error:
        return refuse(error)
    for line in lines(report, command.run, vocabulary, wanted.gpus_per_node):
        print(line)
    sys.stdout.flush()
    return 0
