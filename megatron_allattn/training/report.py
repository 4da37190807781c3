"""What a person reads while a run is under way: the header, a line per interval, a progress bar on a terminal."""

import math
import sys
import time
from typing import Any

from tqdm import tqdm

from megatron_allattn.config import ModelConfig, RunConfig, parameters
from megatron_allattn.config.durations import clock
from megatron_allattn.config.reporting import tell_lost_output
from megatron_allattn.model.accounting import cache_bytes, state_bytes
from megatron_allattn.model.span import cache_length
from megatron_allattn.parallel.collectives import gather_objects
from megatron_allattn.training.session import Session


def header(session: Session) -> list[str]:
    """What runs: model, parameters, layout, tokens per step, memory per rank. Collective."""
    run, engine = session.run, session.engine
    model, training, groups = run.model, run.training, engine.groups
    count = parameters.count_parameters(model, engine.network.vocab_size)
    precision = "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"
    rows = {
        "model": f"{run.recipe or 'custom'}: {_describe(model)}",
        "parameters": f"{count.total:,}, {100 * count.persistent / count.total:.0f} % in persistent vectors",
        "data": session.dataset.description,
        "layout": f"{groups.world.size} × {engine.device.type}: {_grid(session)}, "
        f"ZeRO {engine.zero_stage}, {precision}, {engine.num_slots} × {engine.micro_batch_size} streams per rank",
        "step": f"{training.global_batch_size} streams × {training.seq_length} tokens = "
        f"{training.global_batch_size * training.seq_length:,} tokens; {_course(run)}",
        "memory": _memory(session),
    }
    return [f"{name:<11} {text}" for name, text in rows.items()] + [f"note        {note}" for note in session.notes]


def _grid(session: Session) -> str:
    """TP 2 (sequence parallel, shared caches) × PP 2 (3 + 2 layers) × DP 4: what there is of it."""
    groups, parallel, stages = session.engine.groups, session.run.parallel, ""
    ways = {
        "sequence parallel": parallel.sequence_parallel,
        "shared caches": parallel.shard_caches,
        "balanced heads": parallel.balance_heads,
    }
    chosen = ", ".join(name for name, wanted in ways.items() if wanted)
    shards = f"TP {groups.tensor.size}" + (f" ({chosen})" if chosen else "")
    if groups.pipeline.size > 1:
        counts = gather_objects(len(session.engine.network.part.layers), groups.pipeline)
        stages = f" × PP {groups.pipeline.size} ({' + '.join(map(str, counts))} layers)"
    return f"{shards}{stages} × DP {groups.data.size}"


def _describe(model: ModelConfig) -> str:
    """The network in a line: variant, sizes, what follows the attention, span, vocabulary."""
    activation = "softmax" if model.variant == "ff-attn" else "ReLU"
    parts = [
        model.variant,
        f"{model.num_layers} layers",
        f"hidden {model.hidden_size}",
        f"{model.num_attention_heads} heads",
        f"{activation} feed-forward {model.feed_forward_size}"
        if model.feed_forward_size
        else f"{model.persistent_memory_size} persistent vectors",
        f"{'adaptive span ≤' if model.adaptive_span else 'span'} {model.max_attention_span}",
    ]
    if model.cutoffs:
        parts.append(f"adaptive vocabulary cut at {', '.join(map(str, model.cutoffs))} (÷ {model.adaptive_div_value})")
    if not model.untie_embeddings_and_output_weights:
        parts.append("tied input and output")
    return ", ".join(parts)


def _course(run: RunConfig) -> str:
    """How many steps, and what ends them."""
    optimizer, iters = run.optimizer, run.training.train_iters
    if optimizer.lr_decay_style != "plateau":
        return f"{iters:,} steps"
    latest = f" or step {optimizer.lr_decay_iters:,}" if optimizer.lr_decay_iters else ""
    return f"at most {iters:,} steps, {optimizer.plateau_iters:,} of them after a plateau of validation{latest}"


def _memory(session: Session) -> str:
    engine, model = session.engine, session.run.model
    element = engine.dtype.itemsize
    state = state_bytes(
        engine.local_parameters,
        zero_stage=engine.zero_stage,
        data_size=engine.groups.data.size,
        half=element == 2,
        moments=len(engine.state_names),
    )
    lengths = [cache_length(window, model.max_attention_span) for window in engine.spans().windows]
    own = [lengths[layer] for layer in engine.network.part.layers]
    holders = engine.groups.tensor.size if session.run.parallel.shard_caches else 1
    caches = cache_bytes(own, len(engine.streams), model.hidden_size // holders, element)
    state, caches = max(gather_objects((state, caches), engine.groups.pipeline), key=sum)  # of the largest stage
    return (
        f"{state / 2**20:,.1f} MiB of weights, gradients and optimizer, "
        f"{caches / 2**20:,.1f} MiB of caches at today's spans; per rank, activations not counted"
    )


class Console:
    """Prints on the first rank: a line per interval, and a live bar where the output is a terminal."""

    def __init__(self, session: Session) -> None:
        self._session, self._interval = session, session.run.logging.log_interval
        self._start = self._told = session.step
        self._bar = None
        if session.first_rank and sys.stderr.isatty():
            self._bar = tqdm(
                total=session.last_step, initial=session.step, unit="step", leave=False, dynamic_ncols=True
            )
        self._losses: list[float] = []
        self._began = self._last = time.monotonic()

    def say(self, line: str) -> None:
        """One plain line, on the first rank. An output that fails is told once; the run goes on without it."""
        if self._session.first_rank:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
            tell_lost_output()

    def step(self, record: dict[str, Any]) -> None:
        """Tell of a training record: every interval, and at the last step."""
        if math.isfinite(record["loss"]):
            self._losses.append(record["loss"])
        total = self._session.last_step
        if self._bar is not None:
            self._bar.total = total  # a plateau sets it
            self._bar.update(1)
            self._bar.set_postfix_str(f"loss {record['loss']:.4f}")
        step = record["step"]
        if step % self._interval == 0 or step == total:
            self.say(self._line(record, total))

    def _line(self, record: dict[str, Any], total: int) -> str:
        now, step = time.monotonic(), record["step"]
        loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        training = self._session.run.training
        rate = (step - self._told) * training.global_batch_size * training.seq_length / (now - self._last)
        left = (now - self._began) / (step - self._start) * (total - step)
        self._losses, self._last, self._told = [], now, step
        unit = self._session.describe_loss(loss)
        norm = "too large" if record["grad_norm"] is None else f"{record['grad_norm']:.3g}"
        return (
            f"step {step:>{len(str(total))}}/{total} | loss {loss:.4f} | {unit} | lr {record['lr']:.2e} | "
            f"grad norm {norm} | span {record['span_mean']:.0f} (max {record['span_max']:.0f}) | "
            f"{rate:,.0f} tokens/s | {clock(left)} left"
        )

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()
