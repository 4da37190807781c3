"""`tools/benchmark.py plan-check`: what tools/plan.py predicts beside what this device does."""

import argparse

from megatron_allattn.benchmark import report
from megatron_allattn.benchmark.commands import common
from megatron_allattn.benchmark.machine import describe
from megatron_allattn.benchmark.plan_check import CheckCase, check_plan
from megatron_allattn.cluster.planning.devices import DEVICES, device_named
from megatron_allattn.config import RECIPES, ParallelConfig, RunConfig, TrainingConfig, usage_error

CLOSE = {"cpu": "cpu", "V100": "v100-32", "A100": "a100-80", "H100": "h100-80", "H200": "h200-141"}


def run(options: argparse.Namespace) -> int:
    device = common.prepare(options)
    shape = common.shape(options)
    machine = describe(device, options.threads)
    table = device_named(options.gpu or _known("cpu" if device.type == "cpu" else machine["device"]))
    recipe = RECIPES[shape.recipe]()
    training = TrainingConfig(
        seq_length=shape.block,
        micro_batch_size=shape.batch,
        global_batch_size=shape.batch * options.micro_batches,
        bf16=options.dtype == "bfloat16",
        attention_backend=options.attention_backend,
        recompute_granularity=options.recompute_granularity,
    )
    parallel = ParallelConfig(zero_stage=options.zero_stage)
    config = RunConfig(model=shape.model, parallel=parallel, optimizer=recipe.optimizer, training=training)
    case = CheckCase(config, shape.vocab_size, shape.z, device.type)
    result = check_plan(case, table, runs=options.runs, warmup=options.warmup, threads=options.threads)
    print(*report.machine_lines(machine, None), shape.describe(), sep="\n")
    memory, seconds = result["memory"], result["seconds"]
    rows = [
        ("memory, GB", f"{memory['predicted'] / 1e9:.3f}", f"{memory['measured'] / 1e9:.3f}", f"{memory['ratio']:.3f}"),
        (
            "a step, s",
            f"{seconds['predicted']:.3f}",
            f"{seconds['measured']['median']:.3f}",
            f"{seconds['ratio']:.3f}",
        ),
        (
            "share of GEMM",
            f"{result['reached']['table']:.3f}",
            f"{result['reached']['measured']:.3f}",
            f"{result['reached']['table'] / result['reached']['measured']:.3f}",
        ),
    ]
    print(report.table(("", "predicted", "measured", "ratio"), rows))
    settings = {**shape.to_dict(), "zero_stage": options.zero_stage, "micro_batches": options.micro_batches}
    settings |= {"table": table.name, "runs": options.runs, "warmup": options.warmup}
    report.write_json(options.json, "plan-check", {**result, "machine": machine, "settings": settings})
    return 0


def _known(name: str) -> str:
    """The device of the table that a driver's name means. Raises UsageError."""
    for part, known in CLOSE.items():
        if part in name:
            return known
    raise usage_error("--gpu", name, "the table has no such device", f"give the nearest of {', '.join(DEVICES)}")
