"""`tools/benchmark.py generate`: time per token with keys and values kept, and without."""

import argparse

from megatron_allattn.benchmark import report
from megatron_allattn.benchmark.commands import common
from megatron_allattn.benchmark.generate import GenerateCase, measure_generation
from megatron_allattn.benchmark.machine import describe


def run(options: argparse.Namespace) -> int:
    device = common.prepare(options)
    shape = common.shape(options)
    case = GenerateCase(shape.model, shape.vocab_size, shape.batch, shape.z, device.type, options.dtype)
    positions = sorted(set(options.positions))
    result = measure_generation(case, positions, tokens=options.tokens, runs=options.runs, warmup=options.warmup)
    machine = describe(device, options.threads)
    print(*report.machine_lines(machine, None), shape.describe(), sep="\n")
    header = ("one token", "ms", "spread")
    timed = {f"after {position} tokens": one for position, one in result["seconds_per_token"].items()}
    timed[f"reading {result['recompute_tokens']} tokens again"] = result["recompute_seconds"]
    rows = [(name, f"{1000 * one['median']:.2f}", report.percent(one["spread"])) for name, one in timed.items()]
    print(report.table(header, rows))
    flat = f"flat within {report.percent(result['flatness'])}"
    print(f"{flat}; {result['times_faster']:.1f} times as fast as reading the window again")
    settings = {**shape.to_dict(), "tokens": options.tokens, "runs": options.runs, "warmup": options.warmup}
    report.write_json(options.json, "generate", {**result, "machine": machine, "settings": settings})
    return 0
