"""Configuration of a run: typed sections, their rules, recipes and the command line. Imports no torch.

`parse` gives a `RunConfig`; `check_world` holds it against the number of processes; `load_deepspeed_json` adds the
DeepSpeed file. A mistake of the user is a `UsageError` whose message is one line.
"""

from megatron_allattn.config.cli import Command, parse, parse_command
from megatron_allattn.config.data import DataConfig
from megatron_allattn.config.dry_run import DryRunConfig
from megatron_allattn.config.ds_config import load_deepspeed_json
from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.model import ModelConfig
from megatron_allattn.config.optimizer import OptimizerConfig
from megatron_allattn.config.recipes import RECIPES
from megatron_allattn.config.rules import BatchShape, batch_shape, check_run, check_vocabulary, check_world
from megatron_allattn.config.run import (
    CheckpointConfig,
    LoggingConfig,
    ParallelConfig,
    Recompute,
    RunConfig,
    TrainingConfig,
)

__all__ = [
    "RECIPES",
    "BatchShape",
    "CheckpointConfig",
    "Command",
    "DataConfig",
    "DryRunConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Recompute",
    "RunConfig",
    "TrainingConfig",
    "UsageError",
    "batch_shape",
    "check_run",
    "check_vocabulary",
    "check_world",
    "load_deepspeed_json",
    "parse",
    "parse_command",
    "usage_error",
]
