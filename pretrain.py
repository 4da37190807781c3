#!/usr/bin/env python3
"""Pretrain an all-attention language model: parse, build, train.

The same command under python, deepspeed, torchrun, mpirun and srun; `python pretrain.py --help` lists the flags.
"""

import sys
from typing import NoReturn

from megatron_allattn.checkpoint.lock import forget_outcome
from megatron_allattn.config import UsageError, parse_command
from megatron_allattn.config.reporting import first_rank_guess, refuse, run_program


def main(argv: list[str] | None = None) -> int:
    """Run with these arguments (the process's own if None); returns the exit code, see training/main.py."""
    try:
        command = parse_command(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        return refuse(error)
    # torch is loaded from here on, so that --help and mistakes are answered at once.
    if command.dry_run is not None:
        from megatron_allattn.cluster.rehearsal.main import run_dry  # noqa: PLC0415

        return run_dry(command)
    checkpoint = command.run.checkpoint
    if checkpoint.goes_on and checkpoint.save is not None and first_rank_guess():
        forget_outcome(checkpoint.save)
    from megatron_allattn.training.main import run_training  # noqa: PLC0415

    code = run_training(command.run, command.explicit)
    if code == 0 and command.run.logging.report and checkpoint.save is not None and first_rank_guess():
        from megatron_allattn.report import tell_report  # noqa: PLC0415

        tell_report(checkpoint.save)
    return code


def command() -> NoReturn:
    """The program: `main` on the process's arguments, and its exit code."""
    run_program(main)


if __name__ == "__main__":
    command()
