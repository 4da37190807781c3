"""`benchmark.py save`."""

import argparse
import tempfile
from pathlib import Path

import torch

from megatron_allattn.benchmark.machine import describe_machine
from megatron_allattn.benchmark.report import machine_lines, percent, table, write_json
from megatron_allattn.benchmark.saving import Saves, measure_saves
from megatron_allattn.benchmark.shapes import shape_of


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    shape = shape_of(
        options.recipe,
        options.micro_batch_size,
        options.seq_length,
        options.span_profile,
        num_layers=options.num_layers,
        persistent_memory_size=options.persistent_memory_size,
        attention_dropout=options.attention_dropout,
    )
    machine = describe_machine(torch.device("cpu"), options.threads)
    print("\n".join([*machine_lines(machine, None), shape.describe(), *(f"note: {one}" for one in shape.notes)]))
    with tempfile.TemporaryDirectory(prefix="saves-", dir=options.folder) as folder:
        saves = Saves(Path(folder), shape.model, shape.vocab_size, shape.batch, shape.block, shape.z)
        found = measure_saves(saves, runs=options.runs, warmup=options.warmup)
    print(f"{found['bytes'] / 1e6:,.0f} MB of state in {options.folder}\n")
    rows = [
        ["plain files", f"{found['plain_mb_per_second']['median']:,.0f} MB/s", ""],
        ["a save", f"{found['save_mb_per_second']['median']:,.0f} MB/s", percent(found["share_of_plain"]["median"])],
        ["a step", f"{found['seconds_per_step']['median']:.2f} s", ""],
        ["standstill", f"{found['blocked_seconds']['median']:.3f} s", percent(found["blocked_share"]["median"])],
        ["a step beside a save", "", percent(found["step_beside"]["median"])],
    ]
    print(table(["", "median", "share"], rows))
    write_json(options.json, "save", {"machine": machine, "shape": shape.to_dict(), **found})
    return 0
