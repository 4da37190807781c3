"""What the commands share: the device, the process's threads, and the shape that the flags describe."""

import argparse
import sys

import torch

from megatron_allattn.benchmark.machine import use_threads
from megatron_allattn.benchmark.shapes import Shape, shape_of
from megatron_allattn.config.errors import usage_error


def prepare(options: argparse.Namespace) -> torch.device:
    """Set the process up. Returns the device: the one asked for, else the GPU where there is one.

    Raises UsageError where there is no GPU to measure.
    """
    use_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise usage_error("--device", "cuda", f"torch {torch.__version__} finds no GPU", "use --device cpu")
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def shape(options: argparse.Namespace, *, sweep: bool = False) -> Shape:
    """The shape of the flags, its notes told on stderr."""
    found = shape_of(
        options.recipe,
        options.micro_batch_size,
        options.seq_length,
        options.span_profile,
        sweep=sweep,
        num_layers=options.num_layers,
        persistent_memory_size=options.persistent_memory_size,
        attention_dropout=options.attention_dropout,
    )
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    return found
