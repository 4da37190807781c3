"""`tools/benchmark.py layer`: all-attention layers beside others of as many parameters."""

import argparse
import sys
from typing import Any

from megatron_allattn.benchmark import report
from megatron_allattn.benchmark.commands import common
from megatron_allattn.benchmark.layer import LayerCase, measure_layers
from megatron_allattn.benchmark.machine import DTYPES, describe
from megatron_allattn.benchmark.peers import PEERS, missing
from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.model.backends import backend_of

EAGER = "eager"
CHOICES = (*PEERS, EAGER)


def run(options: argparse.Namespace) -> int:
    device = common.prepare(options)
    shape = common.shape(options)
    model, z = shape.model, shape.z
    if z is None or model.variant != "all-attn" or not model.persistent_memory_size:
        rule = "its layers are not all-attention with persistent vectors and adaptive spans"
        raise usage_error("--recipe", shape.recipe, rule, "choose another, such as enwik8-small")
    own = backend_of(model, options.attention_backend, device, DTYPES[options.dtype]).name
    layers = {f"all-attention ({own})": own}
    for peer in peers(options.peers):
        label = f"all-attention ({EAGER})" if peer == EAGER else peer
        layers.setdefault(label, peer)
    cases = {
        label: LayerCase(model, shape.batch, shape.block, z, device.type, options.dtype, layer)
        for label, layer in layers.items()
    }
    results, rates = measure_layers(cases, runs=options.runs, warmup=options.warmup)
    machine = describe(device, options.threads)
    print(*report.machine_lines(machine, rates), shape.describe(), sep="\n")
    print(_table(results))
    settings = {**shape.to_dict(), "dtype": options.dtype, "runs": options.runs, "warmup": options.warmup}
    values = {"results": results, "rates": rates, "machine": machine, "settings": settings}
    report.write_json(options.json, "layer", values)
    return 0


def peers(asked: list[str] | None) -> list[str]:
    """The peers to measure: those asked for, else all that can be had, what is missing told on stderr.

    Raises UsageError: one that is asked for cannot be had.
    """
    found = []
    for peer in asked or CHOICES:
        why = missing(peer)
        if why is None:
            found.append(peer)
        elif asked:
            raise UsageError(f"--peers {peer}: {why}; install it or leave it out")
        else:
            print(f"note: {why}: left out", file=sys.stderr)
    return found


def _table(results: dict[str, dict[str, Any]]) -> str:
    header = ("layers", "ms", "tokens/s", "first / this", "parameters a layer", "spread")
    rows = [
        (
            name,
            f"{1000 * one['seconds']['median']:.1f}",
            f"{one['tokens_per_second']:.0f}",
            f"{one['first_over_this']:.2f}",
            f"{one['parameters_per_layer']:,.0f}",
            report.percent(one["seconds"]["spread"]),
        )
        for name, one in results.items()
    ]
    return report.table(header, rows)
