"""`tools/benchmark.py step`: a whole training step without its optimizer."""

import argparse
from dataclasses import replace
from typing import Any

from megatron_allattn.benchmark import report
from megatron_allattn.benchmark.commands import common
from megatron_allattn.benchmark.machine import DTYPES, describe
from megatron_allattn.benchmark.step import StepCase, measure_steps
from megatron_allattn.config.errors import usage_error
from megatron_allattn.kernels.registry import BACKENDS
from megatron_allattn.model.backends import backend_of


def run(options: argparse.Namespace) -> int:
    device = common.prepare(options)
    shape = common.shape(options)
    base = StepCase(
        model=shape.model,
        vocab_size=shape.vocab_size,
        batch=shape.batch,
        block=shape.block,
        z=shape.z,
        device=device.type,
        dtype=options.dtype,
        backend=backend_of(shape.model, options.attention_backend, device, DTYPES[options.dtype]).name,
        recompute=options.recompute_granularity,
    )
    cases = configurations(base, options.compare)
    for case in cases.values():
        backend_of(case.model, case.backend, device, DTYPES[case.dtype])
    results, rates = measure_steps(cases, runs=options.runs, warmup=options.warmup, threads=options.threads)
    machine = describe(device, options.threads)
    print(*report.machine_lines(machine, rates), shape.describe(), sep="\n")
    print(_table(results))
    (first, found), *others = results.items()
    report.write_json(
        options.json,
        "step",
        {
            **found,
            "name": first,
            "compared": dict(others),
            "rates": rates,
            "machine": machine,
            "settings": {**shape.to_dict(), "runs": options.runs, "warmup": options.warmup},
        },
    )
    return 0


def configurations(base: StepCase, compare: list[str]) -> dict[str, StepCase]:
    """The case that is asked for, first, and the same with one thing changed for every name in `compare`."""
    cases = {f"{base.backend}, {base.dtype}": base}
    for name in compare:
        case = replace(base, backend=name) if name in BACKENDS else replace(base, dtype=name)
        label = f"{case.backend}, {case.dtype}"
        if label in cases:
            raise usage_error("--compare", name, f"{label} is there already", "leave it out")
        cases[label] = case
    return cases


def _table(results: dict[str, dict[str, Any]]) -> str:
    header = ("step", "tokens/s", "spread", "per GEMM GFLOP/s", "peak GB", "GFLOP", "share of GEMM", "with recompute")
    rows = [
        (
            name,
            f"{one['tokens_per_second']:.0f}",
            report.percent(one["tokens_per_second_runs"]["spread"]),
            f"{one['tokens_per_second_per_gemm_gflops']:.2f}",
            f"{one['peak_memory_gb']:.2f}",
            f"{one['gflop_per_step']['model']:.1f}",
            report.percent(one["share"]),
            report.percent(one["share_executed"]),
        )
        for name, one in results.items()
    ]
    return report.table(header, rows)
