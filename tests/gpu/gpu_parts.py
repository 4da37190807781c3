"""The parts of the GPU check. Each takes the device and the sizes and gives rows for the table and the JSON file.

Nothing here needs more than torch and numpy, except the ZeRO part, which is left out where there is no DeepSpeed.
"""

import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megatron_allattn.benchmark.attention import AttentionCase, measure_attention
from megatron_allattn.benchmark.check import compare_backends
from megatron_allattn.benchmark.profiles import read_profile
from megatron_allattn.checkpoint import folder, save
from megatron_allattn.checkpoint.manifest import check_hashes
from megatron_allattn.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_allattn.data.corpora import standard_library
from megatron_allattn.data.dataset import Dataset, open_dataset
from megatron_allattn.data.manifest import Manifest
from megatron_allattn.data.prepare import Preparation, prepare
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.engine.interface import Engine
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps, choose_fused
from megatron_allattn.kernels.registry import BACKENDS
from megatron_allattn.model.accounting import count_parameters
from megatron_allattn.model.backends import backend_of
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel import discovery
from megatron_allattn.parallel.addresses import RankInfo, free_port
from megatron_allattn.parallel.groups import Groups, close_groups, make_groups, single_process_groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.training.reference import verify_case
from megatron_allattn.training.reference_case import read_case
from megatron_allattn.training.schedules import learning_rate

CASES = Path(__file__).resolve().parents[1] / "data/reference"
CPU = torch.device("cpu")
TORCH = FusedOps("torch")

# Largest relative differences of the losses of single steps.
SAME_PRECISION = 1e-4  # float32 against float32: another order of sums, a few optimizer steps
BFLOAT16 = 1e-2  # bfloat16 against bfloat16 or float32: numbers of 8 bits
ZERO_LIMITS = {torch.float32: SAME_PRECISION, torch.bfloat16: BFLOAT16}
FALLEN = 0.7  # the mean of the last tenth of the losses is at most this part of the first loss


@dataclass
class Row:
    """One line of the table; measured: numbers that nothing is held against; left out: `detail` says why."""

    part: str
    status: Literal["passed", "failed", "measured", "left out"]
    detail: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """How large the training and the speed measurement are. beside: steps that are repeated on the CPU; machine: sizes
    of the products and copies that the machine's rates are measured with, None for those of benchmark/machine.py."""

    run: RunConfig
    beside: int
    speed: RunConfig
    speed_steps: int
    machine: tuple[int, int] | None = None


def make_run(model: ModelConfig, *, block: int, batch: int, steps: int, lr: float) -> RunConfig:
    """A run with Adam and a short warm-up."""
    return RunConfig(
        model=model,
        optimizer=OptimizerConfig(optimizer="adam", lr=lr, lr_warmup_iters=20, clip_grad=1.0),
        training=TrainingConfig(seq_length=block, global_batch_size=batch, train_iters=steps, bf16=True, seed=5),
    )


FULL = Sizes(
    run=make_run(
        ModelConfig(
            num_layers=6,
            hidden_size=256,
            num_attention_heads=4,
            persistent_memory_size=256,
            max_attention_span=256,
            attention_dropout=0.1,
            embedding_dropout=0.1,
        ),
        block=128,
        batch=16,
        steps=200,
        lr=2e-3,
    ),
    beside=5,
    speed=make_run(
        ModelConfig(
            num_layers=8,
            hidden_size=512,
            num_attention_heads=8,
            persistent_memory_size=1024,
            max_attention_span=1024,
            attention_dropout=0.1,
        ),
        block=512,
        batch=16,
        steps=13,
        lr=1e-3,
    ),
    speed_steps=10,
)
QUICK = Sizes(
    run=make_run(
        replace(FULL.run.model, num_layers=2, hidden_size=64, persistent_memory_size=32, max_attention_span=64),
        block=32,
        batch=8,
        steps=40,
        lr=5e-3,
    ),
    beside=3,
    speed=make_run(
        replace(FULL.speed.model, num_layers=2, hidden_size=64, persistent_memory_size=64, max_attention_span=64),
        block=64,
        batch=4,
        steps=4,
        lr=1e-3,
    ),
    speed_steps=2,
    machine=(256, 4_000_000),
)


def reference_cases(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The recorded numbers of the paper's code, in float64 and float32."""
    groups, paths = single_process_groups(), sorted(CASES.glob("*.npz"))
    if not paths:
        yield Row("reference cases", "failed", f"there are none in {CASES}")
    for path in paths:
        case = read_case(path)
        for dtype in (torch.float64, torch.float32):
            report = verify_case(case, groups, device, dtype)
            detail = ", ".join(f"{what} {value:.1e}" for what, value in report.differences.items())
            values = {"differences": report.differences, "limits": report.limits}
            status: Literal["passed", "failed"] = "passed" if report.passed else "failed"
            yield Row(f"reference {path.stem} {str(dtype).removeprefix('torch.')}", status, detail, values)


@contextmanager
def prepared_text() -> Iterator[tuple[Dataset, Manifest]]:
    """The standard library's sources, prepared as `tools/prepare_data.py stdlib` does, in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        prefix = Path(folder) / "text"
        manifest = prepare(Preparation(corpus=standard_library(), prefix=prefix, tokenizer="byte"))
        yield open_dataset(DataConfig(data_path=str(prefix))), manifest


def build(run: RunConfig, vocab_size: int, device: torch.device, dtype: torch.dtype, fused: FusedOps = TORCH) -> Engine:
    """A fresh engine in this process alone."""
    groups = single_process_groups()
    network = Network(run.model, vocab_size, groups.tensor, fused)
    initialize(network, run.training.seed)
    return PlainEngine(network, run, groups, device, dtype, fused)


def losses_of(engine: Engine, tokens: np.ndarray, steps: int) -> list[float]:
    """Train `steps` steps; the loss of each."""
    training, losses = engine.run.training, []
    streams = TokenStreams(tokens, training.global_batch_size, training.seq_length, training.seed)
    for step in range(1, steps + 1):
        block = streams.next_block(engine.streams)
        if block.restarted:
            engine.clear_caches()
        lr = learning_rate(engine.run.optimizer, training.train_iters, step)
        losses.append(engine.train_step(block.inputs, block.targets, step, lr, engine.spans()).loss)
    return losses


def largest_difference(found: list[float], expected: list[float]) -> float:
    """Relative, over the steps that both have."""
    both = list(zip(found, expected, strict=False))
    assert both
    differences = [abs(a - b) / abs(b) for a, b in both]
    return max(math.inf if math.isnan(difference) else difference for difference in differences)


def compare(part: str, found: list[float], expected: list[float], limit: float) -> Row:
    """A row that passes when the losses of all steps are within `limit`."""
    difference = largest_difference(found, expected)
    shown = " ".join(f"{loss:.4f}" for loss in found[: len(expected)])
    beside = " ".join(f"{loss:.4f}" for loss in expected)
    return Row(
        part,
        "passed" if difference <= limit else "failed",
        f"{shown} beside {beside}: {difference:.1e} (≤ {limit:.0e})",
        {"losses": found[: len(expected)], "beside": expected, "difference": difference, "limit": limit},
    )


def learned(losses: list[float]) -> tuple[float, float]:
    """The mean of the last tenth, and what part of the first loss that is."""
    last = float(np.mean(losses[-max(1, len(losses) // 10) :]))
    return last, last / losses[0]


def training_on_text(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """A bfloat16 training with dropout, its first steps beside the CPU's, and whether it learns."""
    run, steps = sizes.run, sizes.run.training.train_iters
    with prepared_text() as (text, manifest):
        vocab_size = text.tokenizer.vocab_size
        start = time.perf_counter()
        trained = losses_of(build(run, vocab_size, device, torch.bfloat16), text.train, steps)
        seconds = time.perf_counter() - start

        def first(where: torch.device, dtype: torch.dtype) -> list[float]:
            return losses_of(build(run, vocab_size, where, dtype), text.train, sizes.beside)

        single, half = first(CPU, torch.float32), first(CPU, torch.bfloat16)
        yield compare("first steps, float32 | CPU float32", first(device, torch.float32), single, SAME_PRECISION)
        yield compare("first steps, bfloat16 | CPU bfloat16", trained, half, BFLOAT16)
        yield compare("first steps, bfloat16 | CPU float32", trained, single, BFLOAT16)
        last, fallen = learned(trained)
        yield Row(
            f"training, {steps} bfloat16 steps",
            "passed" if fallen <= FALLEN else "failed",
            f"loss {trained[0]:.3f} → {last:.3f} nats, {fallen:.2f} of the first (≤ {FALLEN}), {seconds:.1f} s",
            {
                "losses": trained,
                "last": last,
                "fallen": fallen,
                "limit": FALLEN,
                "seconds": seconds,
                "text": manifest.corpus,
                "text_bytes": len(text.train),
                "text_sha256": manifest.files["train.bin"].sha256,
                "unigram_entropy_bits": text.unigram_entropy,
            },
        )


def checkpoint(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Saved from the device and loaded there again: the next losses are those of the engine that has saved."""
    with prepared_text() as (text, _), tempfile.TemporaryDirectory(prefix="gpu_check_") as path:
        going, loaded = (build(sizes.run, 256, device, torch.bfloat16) for _ in range(2))
        losses_of(going, text.train, sizes.beside)
        save.save(Path(path), sizes.beside, going, {})
        step_folder, _ = folder.find_latest(Path(path), check=check_hashes)
        save.load(step_folder, loaded, going.slots[0].length)
        losses = [losses_of(engine, text.train, sizes.beside) for engine in (loaded, going)]
    yield compare("checkpoint, next steps", *losses, SAME_PRECISION)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's tensors since the last reset; on the CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def speed(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Tokens per second and peak memory of bfloat16 steps with the eager backend."""
    for name, adaptive in (("every head at the full span", False), ("adaptive spans at their start", True)):
        run = replace(sizes.speed, model=replace(sizes.speed.model, adaptive_span=adaptive))
        while True:
            try:
                row = _speed(f"speed, {name}", run, device, sizes.speed_steps)
                break
            except torch.cuda.OutOfMemoryError:
                batch = run.training.global_batch_size // 2
                if not batch:
                    row = Row(f"speed, {name}", "left out", "out of memory with one stream")
                    break
            run = replace(run, training=replace(run.training, global_batch_size=batch))
        yield row


def _speed(part: str, run: RunConfig, device: torch.device, steps: int) -> Row:
    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    vocab_size, training = 256, run.training
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    engine = build(run, vocab_size, device, torch.bfloat16)
    warm = training.train_iters - steps
    needed = training.global_batch_size * training.seq_length * (training.train_iters + 2)
    tokens = np.random.default_rng(0).integers(vocab_size, size=needed, dtype=np.uint8)
    streams = TokenStreams(tokens, training.global_batch_size, training.seq_length, training.seed)
    start = 0.0
    for step in range(1, training.train_iters + 1):  # the first ones fill the caches
        if step == warm + 1:
            synchronize()
            start = time.perf_counter()
        block = streams.next_block(engine.streams)
        engine.train_step(block.inputs, block.targets, step, 1e-4, engine.spans())
    synchronize()
    seconds = (time.perf_counter() - start) / steps
    rate = training.global_batch_size * training.seq_length / seconds
    memory, parameters = peak_memory(device), count_parameters(engine.network).total
    model = run.model
    return Row(
        part,
        "measured",
        f"{rate:,.0f} tokens/s, {1000 * seconds:.0f} ms a step, peak {memory / 2**30:.2f} GiB; "
        f"{parameters / 1e6:.1f}M parameters, batch {training.global_batch_size} × {training.seq_length}, "
        f"span {model.max_attention_span}, N {model.persistent_memory_size}",
        {
            "tokens_per_second": rate,
            "seconds_per_step": seconds,
            "peak_memory_bytes": memory,
            "parameters": parameters,
            "batch": training.global_batch_size,
        },
    )


def attention_backends(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Every attention backend against eager in float64, as in `tools/benchmark.py attention --check`."""
    for found in compare_backends(device):
        yield Row(found.part, found.status, found.detail, found.values)


def attention_speed(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The attention of all layers in bfloat16 with late spans, forward and backward, beside the machine's rates."""
    model, training = sizes.speed.model, sizes.speed.training
    profile = read_profile("facts").fit(model.num_layers, model.num_attention_heads, model.max_attention_span)
    base = AttentionCase(
        model=model,
        batch=training.global_batch_size,
        block=training.seq_length,
        z=profile.z(model.max_attention_span),
        device=device.type,
        dtype="bfloat16",
        backend="auto",
    )
    cases = {}
    for name in BACKENDS:
        try:
            backend_of(model, name, device, torch.bfloat16)
        except ValueError as error:
            yield Row(f"attention speed, {name}", "left out", str(error))
        else:
            cases[name] = replace(base, backend=name)
    results, rates = measure_attention(cases, runs=5, warmup=2, sizes=sizes.machine)
    for name, one in results.items():
        detail = (
            f"{1000 * one['seconds']['median']:.1f} ms, {one['gflops']:.0f} GFLOP/s, {100 * one['share']:.1f} % of "
            f"GEMM {rates['bfloat16']['median']:.0f}; copy {rates['copy']['median']:.0f} GB/s"
        )
        yield Row(f"attention speed, {name}", "measured", detail, {**one, "rates": rates})


def apex(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """NVIDIA's apex, where it is installed: the same first losses as without it."""
    fused = choose_fused("auto", device.type == "cuda")
    if fused.norms is None:
        yield Row("apex", "left out", fused.note)
        return
    with prepared_text() as (text, _):
        losses = [
            losses_of(build(sizes.run, 256, device, torch.float32, ops), text.train, sizes.beside)
            for ops in (fused, TORCH)
        ]
    yield compare("apex, float32 | torch", *losses, SAME_PRECISION)


def zero(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Every ZeRO stage in this one process, where DeepSpeed is installed: the same first losses as the plain engine."""
    try:
        from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine, import_deepspeed

        import_deepspeed(verbose=False)
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        yield Row("DeepSpeed ZeRO 0-3", "left out", f"deepspeed cannot be imported ({error})")
        return
    port = free_port()
    info = RankInfo(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=port,
        source="single",
    )
    discovery.initialize(info, 120, device)
    try:
        groups = make_groups(Layout(), timedelta(seconds=120))
        with prepared_text() as (text, _):
            # first, since DeepSpeed replaces torch's linear function when stage 3 starts
            plain = {d: losses_of(build(sizes.run, 256, device, d), text.train, sizes.beside) for d in ZERO_LIMITS}
            for dtype, limit in ZERO_LIMITS.items():
                for stage in range(4):
                    engine = _zero_engine(DeepSpeedEngine, sizes.run, stage, groups, device, dtype)
                    found = losses_of(engine, text.train, sizes.beside)
                    name = str(dtype).removeprefix("torch.")
                    yield compare(f"ZeRO {stage}, {name} | plain engine", found, plain[dtype], limit)
            if get_accelerator().is_fp16_supported():
                for stage in range(1, 4):
                    engine = _zero_engine(DeepSpeedEngine, sizes.run, stage, groups, device, torch.float16)
                    yield from _float16(engine, text.train, plain[torch.float32], sizes)
            else:
                yield Row("ZeRO 1-3, float16", "left out", "DeepSpeed does not take float16 on this device")
    finally:
        close_groups()


def _float16(engine: Engine, tokens: np.ndarray, single: list[float], sizes: Sizes) -> Iterator[Row]:
    """A float16 training with its loss scale: the first loss beside float32's, and whether it learns."""
    steps, scale = sizes.run.training.train_iters, engine.loss_scale
    assert scale is not None
    losses = losses_of(engine, tokens, steps)
    part = f"ZeRO {engine.zero_stage}, float16"
    yield compare(f"{part} | plain engine, float32", losses[:1], single[:1], BFLOAT16)
    last, fallen = learned(losses)
    yield Row(
        f"{part}, {steps} steps",
        "passed" if fallen <= FALLEN and engine.skipped < steps // 4 else "failed",
        f"loss {losses[0]:.3f} → {last:.3f} nats, {fallen:.2f} of the first (≤ {FALLEN}); "
        f"loss scale {scale.scale:,.0f}, {engine.skipped} updates left out (< {steps // 4})",
        {"losses": losses, "fallen": fallen, "loss_scale": scale.scale, "skipped": engine.skipped},
    )


def _zero_engine(
    make: Callable[..., Engine], run: RunConfig, stage: int, groups: Groups, device: torch.device, dtype: torch.dtype
) -> Engine:
    training = replace(run.training, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    run = replace(run, parallel=ParallelConfig(zero_stage=stage), training=training)
    network = Network(run.model, 256, groups.tensor, TORCH)
    initialize(network, run.training.seed)
    return make(network, run, groups, device, dtype, TORCH)


PARTS = (reference_cases, attention_backends, attention_speed, training_on_text, checkpoint, speed, apex, zero)
