"""A whole training step without its optimizer: forward, loss and backward of one micro-batch with carried caches.

Each configuration runs in a process of its own, so that peak memory is its own; the machine's rates are measured in
another. All of them take turns. Caches start full, with random hidden states, and are carried from step to step;
dropout masks change with the step. In bfloat16 the weights are rounded; float32 masters belong to the optimizer.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from megatron_allattn.benchmark.machine import DTYPES, rate_name, rates
from megatron_allattn.benchmark.networks import SEED, Z, full_cache, random_network, zipf_tokens
from megatron_allattn.benchmark.timing import alternate, ratios, seconds, summarize
from megatron_allattn.benchmark.workers import Worker
from megatron_allattn.config import ModelConfig, Recompute
from megatron_allattn.engine.interface import Spans, find_spans, local_spans
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.backends import backend_of
from megatron_allattn.model.work import step_flops
from megatron_allattn.parallel.random import DropoutKeys

MACHINE = "machine"  # the name of the rates among the cases


@dataclass(frozen=True)
class StepCase:
    """One configuration. z: None with a fixed span; device, dtype: names in torch."""

    model: ModelConfig
    vocab_size: int
    batch: int
    block: int
    z: Z | None
    device: str
    dtype: str
    backend: str
    recompute: Recompute = "none"


class TrainingStep:
    """Call it to run one step; gives its seconds, its work and what ran."""

    def __init__(self, case: StepCase) -> None:
        self.case, self.device, self.number = case, torch.device(case.device), 0
        model, dtype = case.model, DTYPES[case.dtype]
        self.backend = backend_of(model, case.backend, self.device, dtype)
        attend = self.backend.attend
        self.network = random_network(model, case.vocab_size, case.z, self.device, dtype, attend, case.recompute)
        tokens = zipf_tokens(case.vocab_size, case.batch, case.block + 1).to(self.device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.streams = torch.arange(case.batch, dtype=torch.int32, device=self.device)
        self.cache = full_cache(self.network, self._spans().windows, case.batch)

    def _spans(self) -> Spans:
        """Today's spans, as an engine finds them once per step."""
        return find_spans(self.network, local_spans(self.network))

    def __call__(self) -> dict[str, Any]:
        self.number += 1
        took = seconds(self._step, self.device)
        case, spans = self.case, self._spans()
        work = step_flops(
            case.model,
            case.vocab_size,
            case.batch,
            case.block,
            spans.look_back,
            self.backend.name,
            recompute=case.recompute,
            cluster_tokens=self._cluster_tokens(),
        )
        return {
            "seconds": took,
            "backend": self.backend.name,
            "span_mean": spans.tokens.mean().item(),
            "span_max": spans.tokens.max().item(),
            "flops_model": work.model,
            "flops_executed": work.executed,
        }

    def _step(self) -> None:
        self.network.zero_grad(set_to_none=True)
        spans = self._spans()
        keys = DropoutKeys(SEED, self.number, self.streams)
        context = BlockContext(spans.windows, self.cache, keys, look_back=spans.look_back)
        self.network(self.inputs, context, self.targets).mean().backward()
        self.cache.commit(self.case.block)

    def _cluster_tokens(self) -> list[int]:
        """How many targets are in each cluster of an adaptive vocabulary; empty for a plain one."""
        starts = self.case.model.cutoffs
        if not starts:
            return []
        cluster = torch.bucketize(self.targets, torch.tensor(starts, device=self.device), right=True)
        return cluster.flatten().bincount(minlength=len(starts) + 1).tolist()


def measure_steps(
    cases: Mapping[str, StepCase], *, runs: int, warmup: int, threads: int
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The results of every case, by name, and the machine's rates of the same rounds."""
    device = next(iter(cases.values())).device
    with ExitStack() as stack:
        machine = stack.enter_context(Worker(threads, rates, device))
        workers = {name: stack.enter_context(Worker(threads, TrainingStep, case)) for name, case in cases.items()}
        for worker in (machine, *workers.values()):
            worker.ready()
        found = alternate({**workers, MACHINE: machine}, runs, warmup)
        memory = {name: worker.peak_memory() for name, worker in workers.items()}
    measured = found.pop(MACHINE)
    by_rate = {name: [one[name] for one in measured] for name in measured[0]}
    results = {name: step_result(cases[name], found[name], by_rate, memory[name]) for name in cases}
    return results, {name: summarize(values).to_dict() for name, values in by_rate.items()}


def step_result(
    case: StepCase, found: list[dict[str, Any]], rates: Mapping[str, list[float]], memory: int
) -> dict[str, Any]:
    """The numbers of one case for the JSON file; what they mean is in docs/performance.md."""
    times, last = [one["seconds"] for one in found], found[-1]
    bound = rates[rate_name(case.dtype, case.device)]
    speed = [case.batch * case.block / took for took in times]
    gflops = {kind: [one[f"flops_{kind}"] / 1e9 / one["seconds"] for one in found] for kind in ("model", "executed")}
    tokens_per_second = summarize(speed)
    return {
        "tokens_per_second": tokens_per_second.median,
        "tokens_per_second_runs": tokens_per_second.to_dict(),
        "seconds_per_step": summarize(times).median,
        "peak_memory_gb": memory / 1e9,
        "gemm_gflops": summarize(rates["float32"]).median,
        "gemm_gflops_bfloat16": summarize(rates["bfloat16"]).median,
        "tokens_per_second_per_gemm_gflops": ratios(speed, rates["float32"]).median,
        "gflops": summarize(gflops["model"]).median,
        "share": ratios(gflops["model"], bound).median,
        "share_executed": ratios(gflops["executed"], bound).median,
        "gflop_per_step": {kind: last[f"flops_{kind}"] / 1e9 for kind in ("model", "executed")},
        "dtype": case.dtype,
        "attention_backend": last["backend"],
        "recompute_granularity": case.recompute,
        "attention_dropout": case.model.attention_dropout,
        "span_mean": last["span_mean"],
        "span_max": last["span_max"],
    }
