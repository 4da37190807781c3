"""`tools/benchmark.py save`: what a checkpoint costs."""

import argparse
import tempfile
from pathlib import Path

from megatron_allattn.benchmark import report
from megatron_allattn.benchmark.commands import common
from megatron_allattn.benchmark.machine import describe
from megatron_allattn.benchmark.saving import Saves, measure_saves


def run(options: argparse.Namespace) -> int:
    device = common.prepare(options)
    shape = common.shape(options)
    machine = describe(device, options.threads)
    print(*report.machine_lines(machine, None), shape.describe(), sep="\n")
    with tempfile.TemporaryDirectory(prefix="benchmark_save_", dir=options.folder) as folder:
        saves = Saves(Path(folder), shape.model, shape.vocab_size, shape.batch, shape.block, shape.z)
        result = measure_saves(saves, runs=options.runs, warmup=options.warmup)
    rows = [
        ("plain files", f"{result['plain_mb_per_second']['median']:,.0f} MB/s", ""),
        ("a save", f"{result['save_mb_per_second']['median']:,.0f} MB/s", _share(result, "share_of_plain")),
        ("a step", f"{result['seconds_per_step']['median']:.2f} s", ""),
        ("training stands still", f"{result['blocked_seconds']['median']:.3f} s", _share(result, "blocked_share")),
        ("a step beside a save", "", _share(result, "step_beside")),
    ]
    print(report.table((f"{result['bytes'] / 1e6:,.0f} MB of state", "median", "share"), rows))
    settings = {**shape.to_dict(), "runs": options.runs, "warmup": options.warmup}
    report.write_json(options.json, "save", {**result, "machine": machine, "settings": settings})
    return 0


def _share(result: dict, name: str) -> str:
    return report.percent(result[name]["median"])
