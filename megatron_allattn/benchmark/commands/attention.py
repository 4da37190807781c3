"""`tools/benchmark.py attention`: the attention of all layers, its sweeps, and its comparison with eager."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from megatron_allattn.benchmark import plots, report, sweep
from megatron_allattn.benchmark.attention import AttentionCase, measure_attention
from megatron_allattn.benchmark.check import compare_backends
from megatron_allattn.benchmark.commands import common
from megatron_allattn.benchmark.machine import DTYPES, describe
from megatron_allattn.benchmark.profiles import SpanProfile
from megatron_allattn.benchmark.shapes import Shape
from megatron_allattn.config.checks import check_output
from megatron_allattn.config.errors import flag, usage_error
from megatron_allattn.model.backends import backend_of

SWEEP_LAYERS = 4
SWEEP = {"longest_span": 2048, "mean_span": None, "points": 7}  # its sizes; None: of sweep.py


def run(options: argparse.Namespace) -> int:
    _check_plot(options)
    _complete_sweep(options)
    device = common.prepare(options)
    if options.sweep and options.num_layers is None:
        options.num_layers = SWEEP_LAYERS
    shape = common.shape(options, sweep=bool(options.sweep))
    if not shape.model.adaptive_span:
        raise usage_error("--recipe", shape.recipe, "its spans are fixed", "choose one with adaptive spans")
    dtype = DTYPES[options.dtype]
    backends = sorted({backend_of(shape.model, name, device, dtype).name for name in options.attention_backend})
    points = _points(shape, options)
    settings = {**shape.to_dict(), "runs": options.runs, "warmup": options.warmup}
    values: dict[str, Any] = {"machine": describe(device, options.threads), "settings": settings}
    if options.check:
        values["check"] = list(_compare(device))
    cases = {
        f"{backend} {point}".rstrip(): AttentionCase(
            model=shape.model,
            batch=shape.batch,
            block=shape.block,
            z=profile.z(shape.model.max_attention_span),
            device=device.type,
            dtype=options.dtype,
            backend=backend,
        )
        for backend in backends
        for point, profile in points.items()
    }
    values["results"], values["rates"] = measure_attention(cases, runs=options.runs, warmup=options.warmup)
    print(*report.machine_lines(values["machine"], values["rates"]), shape.describe(), sep="\n")
    if options.sweep:
        values["sweeps"] = _sweeps(values["results"], points, backends, options.sweep)
        print(_sweep_table(values["sweeps"]))
    else:
        print(_table(values["results"]))
    if options.plot is not None:
        plots.plot_sweeps(options.plot, values["sweeps"], f"{shape.recipe}, {options.dtype}, {device.type}")
    report.write_json(options.json, "attention", values)
    return int(any(one["status"] == "failed" for one in values.get("check", ())))


def _check_plot(options: argparse.Namespace) -> None:
    if options.plot is not None and not options.sweep:
        raise usage_error("--plot", options.plot, "there is nothing to draw", "add --sweep mean-span max-span")
    plots.check_plotting("--plot", options.plot)
    check_output("--plot", options.plot)


def _complete_sweep(options: argparse.Namespace) -> None:
    """The defaults of a sweep's sizes. Raises UsageError: one is given, and there is no sweep that has it."""
    for name, default in SWEEP.items():
        given = getattr(options, name)
        used = options.sweep and (name != "mean_span" or "max-span" in options.sweep)
        if given is not None and not used:
            kinds = "max-span" if name == "mean_span" else "mean-span max-span"
            fix = f"add --sweep {kinds} or leave it out"
            raise usage_error(flag(name), given, "has no effect without its sweep", fix)
        setattr(options, name, default if given is None else given)


def _points(shape: Shape, options: argparse.Namespace) -> dict[str, SpanProfile]:
    """What every backend runs: the profile, named "", or the points of all sweeps, named "SWEEP SPAN"."""
    if shape.profile is not None:
        return {"": shape.profile}
    model, longest = shape.model, options.longest_span
    if longest > model.max_attention_span:
        rule = f"the maximum span of {shape.recipe} is {model.max_attention_span}"
        raise usage_error("--longest-span", longest, rule, "give a shorter one, or another recipe")
    points = {}
    for kind in dict.fromkeys(options.sweep):
        sizes = sweep.Sizes(model.num_layers, model.num_context_heads, model.span_ramp, options.points)
        if kind == "mean-span":
            profiles = sweep.mean_sweep(longest, sizes)
        else:
            profiles = sweep.max_sweep(options.mean_span, longest, sizes)
        points.update({f"{kind} {x}": profile for x, profile in profiles.items()})
    return points


def _compare(device: torch.device) -> Iterator[dict[str, Any]]:
    for row in compare_backends(device):
        print(f"{row.status:8}  {row.part:28}  {row.detail}", flush=True)
        yield asdict(row)


def _sweeps(
    results: dict[str, dict[str, Any]], points: dict[str, SpanProfile], backends: list[str], kinds: list[str]
) -> dict[str, dict[str, Any]]:
    """{sweep: {backend: what `sweep_results` gives}}."""

    def seconds(backend: str, kind: str) -> dict[int, float]:
        own = [point for point in points if point.startswith(f"{kind} ")]
        return {int(point.split()[1]): results[f"{backend} {point}"]["seconds"]["median"] for point in own}

    return {kind: {name: sweep.sweep_results(seconds(name, kind)) for name in backends} for kind in kinds}


def _table(results: dict[str, dict[str, Any]]) -> str:
    header = ("backend", "ms", "tokens/s", "GFLOP", "GFLOP/s", "share of GEMM", "spread")
    rows = [
        (
            name,
            f"{1000 * one['seconds']['median']:.1f}",
            f"{one['tokens_per_second']:.0f}",
            f"{one['gflop']['model']:.1f}",
            f"{one['gflops']:.1f}",
            report.percent(one["share"]),
            report.percent(one["seconds"]["spread"]),
        )
        for name, one in results.items()
    ]
    return report.table(header, rows)


def _sweep_table(sweeps: dict[str, dict[str, Any]]) -> str:
    lines = []
    for kind, by_backend in sweeps.items():
        for name, one in by_backend.items():
            header = (f"{name}, {kind}", *map(str, one["x"]))
            lines.append(report.table(header, [("ms", *(f"{1000 * value:.1f}" for value in one["seconds"]))]))
            told = f"R² {one['r_squared']:.4f}" if kind == "mean-span" else f"flat within {100 * one['flatness']:.1f} %"
            slope = f"{1e6 * one['slope']:.2f} µs per token of {kind.replace('-', ' ')}"
            lines.append(f"{told}; {slope}, {1000 * one['intercept']:.1f} ms at none\n")
    return "\n".join(lines).rstrip()
