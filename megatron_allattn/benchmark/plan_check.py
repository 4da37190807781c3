"""A prediction of cluster/planning beside what the device that is here does: the peak of memory and a step's time.

One process trains a recipe's shape by DeepSpeed, at the spans of a profile and with full caches. Its peak is that of
all tensors: the allocator's on a GPU, the profiler's on a CPU, where it takes a run of its own. Its time is predicted
from the rates that the same rounds measure (machine.py) and from the share of them that the table of devices says is
reached; the share that was reached in fact is told, which is what the table should say of this device.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from megatron_allattn.benchmark.machine import rate_name, rates
from megatron_allattn.benchmark.networks import SEED, Z, full_cache, random_network, zipf_tokens
from megatron_allattn.benchmark.tensor_bytes import profiled_peak
from megatron_allattn.benchmark.timing import alternate, ratios, seconds, summarize
from megatron_allattn.benchmark.workers import Worker
from megatron_allattn.cluster.planning.devices import GB, Device, Rate
from megatron_allattn.cluster.planning.memory import RankMemory, backend_on, memory_phases, precision_of
from megatron_allattn.cluster.planning.states import states_of
from megatron_allattn.cluster.planning.step_time import StepTime, operations_of, stage_time, step_time
from megatron_allattn.config import RunConfig
from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine
from megatron_allattn.kernels.fused import choose_fused
from megatron_allattn.model.accounting import place_of, step_traffic
from megatron_allattn.model.backends import backend_of
from megatron_allattn.model.span import layer_windows, layers_look_back
from megatron_allattn.parallel import discovery
from megatron_allattn.parallel.groups import make_groups
from megatron_allattn.parallel.layout import Layout

MACHINE = "machine"
WAIT_SECONDS = 600.0  # of collectives, of which one process has none to wait for
Reach = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CheckCase:
    """One process's training. z: of every layer's heads, None with a fixed span."""

    run: RunConfig
    vocab_size: int
    z: Z | None
    device: str

    @property
    def reach(self) -> Reach:
        """How far every head looks."""
        model = self.run.model
        if self.z is None:
            return ((model.max_attention_span,) * model.num_context_heads,) * model.num_layers
        sizes = model.max_attention_span, model.span_ramp
        return layers_look_back(self.z, layer_windows(self.z, *sizes), *sizes)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, precision_of(self.run))


class Training:
    """Call it for the seconds of a step."""

    def __init__(self, case: CheckCase) -> None:
        device, run = torch.device(case.device), case.run
        discovery.initialize(discovery.discover({}), WAIT_SECONDS, device)
        attend = backend_of(run.model, run.training.attention_backend, device, case.dtype).attend
        again = run.training.recompute_granularity
        network = random_network(run.model, case.vocab_size, case.z, device, torch.float32, attend, again)
        fused = choose_fused(run.training.fused, device.type == "cuda")
        groups = make_groups(Layout(), timedelta(seconds=WAIT_SECONDS))  # DeepSpeed asks torch for their ranks
        self.engine = DeepSpeedEngine(network, run, groups, device, case.dtype, fused)
        for slot in self.engine.slots:
            filled = full_cache(network, self.engine.spans().windows, self.engine.micro_batch_size)
            slot.restore([filled.part(layer) for layer in slot.layers], filled.length)
        training = run.training
        tokens = zipf_tokens(case.vocab_size, training.global_batch_size, training.seq_length + 1).numpy()
        self.device, self._block, self._number = device, (tokens[:, :-1], tokens[:, 1:]), 0

    def step(self) -> None:
        self._number += 1
        self.engine.train_step(*self._block, self._number, 1e-5, self.engine.spans())

    def __call__(self) -> float:
        return seconds(self.step, self.device)


class PeakOfStep:
    """Call it for the most bytes of tensors in a step, after one that has made what stays."""

    def __init__(self, case: CheckCase) -> None:
        self._case = case

    def __call__(self) -> int:
        made: list[Training] = []

        def start() -> None:
            torch.manual_seed(SEED)
            made.append(Training(self._case))
            made[0].step()

        if self._case.device == "cpu":
            return profiled_peak(start, lambda: made[0].step())
        start()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        made[0]()
        return torch.cuda.max_memory_allocated()


def measured_device(table: Device, found: dict[str, float], device_name: str) -> Device:
    """The device of the table with the rates that were measured: GFLOP/s by type, GB/s of `copy`."""
    source = "measured: tools/benchmark.py plan-check"
    flops = dict(table.flops)
    for name in ("float32", "bfloat16"):
        flops[name] = Rate(found[rate_name(name, device_name)] * 1e9, source)
    if device_name == "cuda":
        flops["float16"] = flops["bfloat16"]
    return replace(table, flops=flops, bandwidth=Rate(found["copy"] * GB, source))


def predict(case: CheckCase, device: Device) -> tuple[RankMemory, StepTime, int]:
    """Memory, time and the operations of a step."""
    place = place_of(case.run, case.vocab_size, 1, 0)
    memory = max(memory_phases(place, case.reach, device), key=lambda phase: phase.total)
    ledger = step_traffic(case.run, case.vocab_size, 1)
    states = states_of(place)
    state = states.weights + states.gradients + states.optimizer
    stage = stage_time(place, case.reach, device, ledger, 1, state)
    operations = operations_of(place, case.reach, backend_on(case.run, device)) * place.slots
    return memory, step_time([stage], place.slots), operations


def check_plan(case: CheckCase, table: Device, *, runs: int, warmup: int, threads: int) -> dict[str, Any]:
    """The numbers for the JSON file."""
    with ExitStack() as stack:

        def worker(build: Callable[..., Callable[[], Any]], *arguments: Any) -> Worker:
            return stack.enter_context(Worker(threads, build, *arguments))

        machine, training = worker(rates, case.device), worker(Training, case)
        for one in (machine, training):
            one.ready()
        found = alternate({"step": training, MACHINE: machine}, runs, warmup)
    with Worker(threads, PeakOfStep, case) as peak:
        peak.ready()
        most = peak()
    medians = {name: summarize([one[name] for one in found[MACHINE]]).median for name in found[MACHINE][0]}
    device = measured_device(table, medians, case.device)
    memory, time, operations = predict(case, device)
    took = summarize(found["step"])
    rate = rate_name(precision_of(case.run), case.device)
    reached = [operations / 1e9 / one for one in found["step"]]
    return {
        "memory": {
            "predicted": memory.total,
            "measured": most,
            "ratio": memory.total / most,
            "parts": memory.parts,
            "phase": memory.phase,
        },
        "seconds": {
            "predicted": time.total,
            "measured": took.to_dict(),
            "ratio": time.total / took.median,
            "parts": {"compute": time.compute, "update": time.update},
        },
        "reached": {
            "table": device.reached.value,
            "measured": ratios(reached, [one[rate] for one in found[MACHINE]]).median,
        },
        "rates": medians,
    }
