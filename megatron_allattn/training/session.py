"""Everything a run needs, built in the order in which it can fail: data, model, engine, checkpoint, run folder.

Each step that may fail on some ranks only is agreed on by all, so that one line reaches the user.
"""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_allattn import __version__
from megatron_allattn.checkpoint import folder, save
from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.checkpoint.progress import Progress
from megatron_allattn.checkpoint.saver import Saver
from megatron_allattn.checkpoint.shared_check import with_shared_check
from megatron_allattn.config import RunConfig, UsageError, check_vocabulary, usage_error
from megatron_allattn.config.errors import as_mistake
from megatron_allattn.config.parameters import count_parameters
from megatron_allattn.config.recipes import prepare_arguments
from megatron_allattn.data.dataset import Dataset, open_dataset
from megatron_allattn.data.streams import TokenStreams, num_evaluation_blocks
from megatron_allattn.engine.balance import Balance, balance_heads
from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine, check_zero_settings
from megatron_allattn.engine.finite import NotFinite
from megatron_allattn.engine.interface import Engine, precision_of
from megatron_allattn.engine.pipeline_engine import PipelineEngine
from megatron_allattn.kernels.fused import FusedOps, choose_fused
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.model.backends import backend_of
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.partition import first_reach, stage_network, stage_parts
from megatron_allattn.model.span import layer_windows, layers_look_back
from megatron_allattn.parallel.collectives import PeerFailed, agree, all_reduce_max, broadcast_object
from megatron_allattn.parallel.failures import Watch
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.parallel.launcher import save_outlasts_launcher
from megatron_allattn.parallel.products import multiplies_bfloat16
from megatron_allattn.training.guard import Guard
from megatron_allattn.training.metrics import Metrics, per_unit
from megatron_allattn.training.observations import Observations, observe_start
from megatron_allattn.training.own_folder import check_own_folder, prepare_own_folder
from megatron_allattn.training.pace import record_save
from megatron_allattn.training.plateau import Plateau
from megatron_allattn.training.resume import (
    UNKNOWN_TOKENS,
    check_resume,
    find_checkpoint,
    is_converted,
    knows_its_tokens,
    saved_spans,
    trim_metrics,
)
from megatron_allattn.training.schedules import schedule_notes
from megatron_allattn.training.sinks import open_mirrors

T = TypeVar("T")


@dataclass
class Session:
    """A run under way. `step` is the last one done, `judged` the last one after which validation was looked at, if it
    was due, `saved` the last one in --save; `tokens`: how many have been trained on; `stopping`: the number of the
    signal by which any process was asked to stop, once all know of it, 0 before; `check_folder` raises where the run
    folder is not this run's any more.
    """

    run: RunConfig
    dataset: Dataset
    streams: TokenStreams
    engine: Engine
    metrics: Metrics
    observations: Observations
    notes: list[str]
    watch: Watch
    stopping: int = 0
    step: int = 0
    judged: int = 0
    saved: int = -1
    tokens: int = 0
    plateau: Plateau = field(default_factory=Plateau)
    guard: Guard = field(init=False)
    saver: Saver | None = field(init=False)
    check_folder: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.guard = Guard(self.run.training.max_nonfinite_steps)
        self.saver = _saver(self.run, self.engine, self.watch)

    @property
    def last_step(self) -> int:
        """The step after which the run ends, as far as is known now."""
        return self.plateau.last_step(self.run.optimizer, self.run.training.train_iters)

    @property
    def why_ended(self) -> str:
        """Why the run is over once its last step is done."""
        return self.plateau.why_ended(self.run.optimizer, self.run.training.train_iters)

    @property
    def first_rank(self) -> bool:
        return self.engine.groups.rank == 0

    def agree_to_stop(self) -> bool:
        """Whether any rank was asked to stop; once it is so it stays so. Collective.

        Raises what has gone wrong with a save beside training, on all ranks at once.
        """
        if self.stopping:
            return True
        groups, saver = self.engine.groups, self.saver
        lost = 1 + groups.rank if saver is not None and saver.failed else 0
        asked = torch.tensor([self.watch.signal, lost], dtype=torch.float32, device=self.engine.device)
        self.stopping, lost = map(int, all_reduce_max(asked, groups.world).tolist())
        if lost and saver is not None:
            saver.wait()
            raise PeerFailed(lost - 1, 1)
        return bool(self.stopping)

    def describe_loss(self, loss: float) -> str:
        """The loss in the tokenizer's usual unit: bpc 1.2340 or ppl 20.1000; from a million on, ppl 1.014e+304."""
        return ", ".join(
            f"{name} {value:{'.4f' if value < 1e6 else '.4g'}}"
            for name, value in per_unit(loss, self.dataset.tokenizer.unit).items()
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        progress = Progress(
            tokens=self.tokens,
            judged=self.judged,
            skipped=self.engine.skipped,
            skipped_in_a_row=self.guard.in_a_row,
            recent_losses=tuple(self.guard.losses),
            plateau=asdict(self.plateau),
            loss_scale=self.engine.loss_scale.state() if self.engine.loss_scale else None,
        )
        return {
            **progress.to_dict(),
            "written_at": self._layout(),
            "config": self.run.to_dict(),
            "vocab_size": self.engine.network.vocab_size,
            "tokenizer": self.dataset.tokenizer.to_json(),
            "tokenizer_sha256": self.dataset.tokenizer.fingerprint,
            "data_sha256": self.dataset.fingerprint,
            "data": self.streams.state(),
            "cached_length": self.engine.slots[0].length,
            "versions": {
                "megatron_allattn": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "deepspeed", "numpy")},
            },
        }

    def _layout(self) -> dict[str, int]:
        """What ran when a checkpoint was written, which nothing depends on."""
        groups = self.engine.groups
        sizes = {"tensor": groups.tensor.size, "pipeline": groups.pipeline.size, "data": groups.data.size}
        return sizes | {"zero_stage": self.engine.zero_stage}

    def save(self) -> None:
        """Write a checkpoint of the last step done, or begin to. Raises Drift where replicas differ, NotFinite where
        anything in it is not finite."""
        assert self.saver is not None
        with self.watch.section("in the save", self.run.parallel.save_timeout_minutes):
            agree(self.check_folder, self.engine.groups.world, exit_code)
            self.metrics.sync()
            self.saver.save(self.step, self.state())
        self.saved = self.step

    def balance_heads(self) -> Balance | None:
        """With `--balance-heads`, place heads by today's spans: after a save and after a load, so that a run that goes
        on from a checkpoint has them where the run that wrote it has them from then on. Collective."""
        return balance_heads(self.engine) if self.run.parallel.balance_heads else None

    def resume(self, step_folder: Path) -> None:
        """Go on from a checkpoint that `check_resume` has accepted. Collective."""
        state = save.read_state(step_folder)
        progress = Progress.of(step_folder / "state.json", state, state["step"], self.run)
        self.step, self.tokens, self.judged = state["step"], progress.tokens, progress.judged
        self.engine.skipped = progress.skipped
        limit = self.run.training.max_nonfinite_steps
        self.guard = Guard(limit, progress.skipped_in_a_row, progress.recent_losses)
        self.plateau = Plateau(**(progress.plateau or {}))
        if self.engine.loss_scale is not None and progress.loss_scale is not None:
            self.engine.loss_scale.load(progress.loss_scale)
        self.notes.append(f"resumed from {step_folder}")
        if self.run.checkpoint.goes_on:
            self.saved = self.step
        if self.step >= self.last_step:
            self.notes.append(f"already at step {self.step} of {self.last_step}: there is nothing left to train")
        if is_converted(state):
            self.notes.append("it was converted: the streams start at the beginning of the data with empty caches")
            self.notes += [] if knows_its_tokens(state) else [UNKNOWN_TOKENS]
            save.load(step_folder, self.engine, None)
            return
        agree(lambda: self.streams.load_state(state["data"]), self.engine.groups.world, exit_code)
        save.load(step_folder, self.engine, state["cached_length"])


def exit_code(error: BaseException) -> int:
    """2 for the user's mistakes, 4 for a gradient that is not finite, 1 for anything else."""
    error = as_mistake(error)
    return 2 if isinstance(error, UsageError) else NotFinite.exit_code if isinstance(error, NotFinite) else 1


def open_session(
    run: RunConfig, explicit: frozenset[str], groups: Groups, device: torch.device, watch: Watch
) -> Session:
    """Build a run, resumed if asked for. Collective; the first rank holds the run folder's lock.

    Raises UsageError; PeerFailed where another rank reports it.
    """

    def agreed(action: Callable[[], T]) -> T:
        return agree(action, groups.world, exit_code)

    agreed(lambda: _check_precision(run, device))
    dataset = agreed(lambda: open_dataset(run.data, explicit, prepare=prepare_arguments(run.recipe)))
    agreed(lambda: check_vocabulary(run.model, dataset.tokenizer.vocab_size))
    agreed(lambda: _check_memory(run, dataset.tokenizer.vocab_size, groups.tensor.size, device))
    streams = agreed(
        lambda: TokenStreams(dataset.train, run.training.global_batch_size, run.training.seq_length, run.training.seed)
    )
    notes = [
        *agreed(lambda: _evaluation_notes(run, dataset)),
        *schedule_notes(run.optimizer, run.training),
        *_precision_notes(run, device),
    ]
    if streams.dropped_tokens:
        notes.insert(0, f"the last {streams.dropped_tokens:,} training tokens are in no stream")
    fused = agreed(lambda: _fused(run, device))
    attention = agreed(lambda: backend_of(run.model, run.training.attention_backend, device, precision_of(run)))
    agreed(lambda: check_zero_settings(run, groups.world.size))  # imports DeepSpeed, which takes a while
    source = agreed(lambda: with_shared_check(partial(find_checkpoint, run), groups.world))
    step_folder, skipped = broadcast_object(source, groups.world)
    changes = agreed(lambda: check_resume(run, dataset, step_folder)) if step_folder is not None else []
    metrics = agreed(lambda: _open_metrics(run, step_folder) if groups.rank == 0 else Metrics(None))
    notes += agreed(lambda: prepare_own_folder(run, step_folder) if groups.rank == 0 else [])
    notes += metrics.notes
    reach = agreed(lambda: _reach(run, step_folder))
    engine = build_engine(run, dataset.tokenizer.vocab_size, groups, device, fused, attention.attend, reach)
    observations = Observations(run.checkpoint.save if groups.rank == 0 else None)
    session = Session(run, dataset, streams, engine, metrics, observations, [*notes, *skipped], watch)
    session.notes += _pipeline_notes(groups.pipeline.size, engine.num_slots, engine.micro_batch_size)
    session.notes.append(f"attention: {attention.note}")
    session.notes.append(f"fused ops: {fused.note}")
    if engine.zero_stage != run.parallel.zero_stage:
        session.notes.append(f"half precision at ZeRO {run.parallel.zero_stage} runs as ZeRO {engine.zero_stage}")
    if step_folder is not None:
        session.resume(step_folder)
        balanced = session.balance_heads()
        session.notes += [f"heads are balanced: {balanced}"] if balanced is not None else []
        session.notes += [f"--override: it was trained with {change}" for change in changes]
    elif run.checkpoint.load is not None:
        session.notes.append(f"no checkpoint in {run.checkpoint.load} yet: starting from step 0")
    own = run.checkpoint.save if groups.rank == 0 else None
    judged, finished = session.judged == session.step, session.step >= session.last_step
    session.notes += agreed(lambda: trim_metrics(own, session.step, judged=judged, finished=finished))
    metrics.go_on()
    if changes:
        told = {change.field: [change.then, change.now] for change in changes}
        metrics.write({"kind": "override", "step": session.step, "changes": told})
    observations.write(observe_start(engine, session.step))
    return session


def _saver(run: RunConfig, engine: Engine, watch: Watch) -> Saver | None:
    kept = run.checkpoint
    if kept.save is None:
        return None

    told: set[str] = set()

    def after_commit(run_folder: Path, step: int, seconds: float) -> None:
        """What goes wrong here is told, once: the save is made, and the run goes on."""
        slow = save_outlasts_launcher(seconds, os.environ)
        lines = [] if slow is None else [slow]
        try:
            lines += folder.retain(run_folder, step, kept.keep_latest_k, kept.save_retain_interval)
            record_save(run_folder, step, seconds, engine.groups.world.size)
        except (StorageError, UsageError, OSError) as error:
            lines.append(str(error))
        for line in lines:
            if line not in told:
                print(f"warning: {line}", file=sys.stderr, flush=True)
                told.add(line)

    section = partial(watch.section, "in the save", run.parallel.save_timeout_minutes)
    return Saver(kept.save, engine, asynchronous=kept.async_save, section=section, after_commit=after_commit)


def build_engine(
    run: RunConfig,
    vocab_size: int,
    groups: Groups,
    device: torch.device,
    fused: FusedOps,
    attend: Attend,
    reach: Sequence[Sequence[int]],
) -> DeepSpeedEngine:
    """The network at its initial weights, in DeepSpeed's hands. reach: by which layers are dealt to stages."""
    parts = stage_parts(run.parallel, run.model, vocab_size, reach, run.training.seq_length)
    network = stage_network(run, vocab_size, groups.tensor, parts[groups.pipeline.rank], fused, attend)
    initialize(network, run.training.seed)
    engine = PipelineEngine if len(parts) > 1 else DeepSpeedEngine
    return engine(network, run, groups, device, precision_of(run), fused)


def _reach(run: RunConfig, step_folder: Path | None) -> Sequence[Sequence[int]]:
    """How far the heads of every layer look, for dealing layers to stages: as training starts, or in a checkpoint."""
    model, current = run.model, run.parallel.pipeline_partition == "current-cost"
    if step_folder is None or not (current and model.adaptive_span):
        return first_reach(model)
    z, sizes = saved_spans(step_folder, model).tolist(), (model.max_attention_span, model.span_ramp)
    return layers_look_back(z, layer_windows(z, *sizes), *sizes)


def _check_precision(run: RunConfig, device: torch.device) -> None:
    if run.training.fp16 and device.type == "cpu":
        raise usage_error("--fp16", True, "DeepSpeed trains in float16 on GPUs only", "use --bf16 or neither")


def _pipeline_notes(stages: int, micro_batches: int, micro_batch_size: int) -> list[str]:
    """How long the stages of a pipeline wait: (K - 1) / (M + K - 1) of a step (GPipe, Huang et al. 2019, section 2)."""
    if stages == 1:
        return []
    idle = (stages - 1) / (micro_batches + stages - 1)
    given = f"with {micro_batches} micro-batch{'es' * (micro_batches > 1)} a step"
    way = "smaller --micro-batch-size" if micro_batch_size > 1 else "larger --global-batch-size"
    return [f"{given} the {stages} stages stand idle for {idle:.0%} of it; a {way} makes more micro-batches"]


def _precision_notes(run: RunConfig, device: torch.device) -> list[str]:
    if not run.training.bf16 or device.type != "cpu" or multiplies_bfloat16():
        return []
    return [
        "--bf16: this processor has no instructions for bfloat16: products are computed in float32 and rounded, none "
        "faster"
    ]


def _check_memory(run: RunConfig, vocab_size: int, ranks: int, device: torch.device) -> None:
    """A rank's weights alone must fit where they are to be: what is absurd is refused before anything is built."""
    needed = 4 * count_parameters(run.model, vocab_size).total // ranks
    there, name = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "machine"
    if device.type == "cuda":
        there, name = torch.cuda.get_device_properties(device).total_memory, "GPU"
    if needed > there:
        rule = f"the weights of a rank take {needed / 1e9:,.0f} GB in float32, and the {name} has {there / 1e9:,.0f} GB"
        sizes = f"{run.model.num_layers} --hidden-size {run.model.hidden_size}"
        raise usage_error("--num-layers", sizes, rule, "make the model smaller or raise --tensor-model-parallel-size")


def _fused(run: RunConfig, device: torch.device) -> FusedOps:
    try:
        return choose_fused(run.training.fused, device.type == "cuda")
    except ValueError as error:
        raise UsageError(str(error)) from error


def _evaluation_notes(run: RunConfig, dataset: Dataset) -> list[str]:
    """What evaluation will not do. Raises UsageError when it was asked for and cannot be done."""
    training, notes = run.training, []
    for name, tokens in (("valid", dataset.valid), ("test", dataset.test)):
        blocks = num_evaluation_blocks(len(tokens), training.global_batch_size, training.seq_length)
        needed = training.global_batch_size * (training.seq_length + 1)
        if blocks == 0:
            reason = f"the {name} split has {len(tokens):,} tokens, one block of every stream needs {needed:,}"
            if name == "valid" and training.eval_interval:
                raise usage_error("--eval-interval", training.eval_interval, reason, "give more text or set it to 0")
            notes.append(f"no evaluation on {name}: {reason}")
        elif training.eval_iters > blocks:
            notes.append(
                f"evaluation on {name} uses all {blocks} whole blocks (--eval-iters {training.eval_iters} asked)"
            )
    return notes


def _open_metrics(run: RunConfig, step_folder: Path | None) -> Metrics:
    """The first rank's, and its sinks, which a new run is refused before its folder is made and holds nothing."""
    check_own_folder(run)
    step = 0 if step_folder is None else save.read_state(step_folder, save.RUN_FIELDS)["step"]
    return Metrics(run.checkpoint.save, open_mirrors(run, step))
