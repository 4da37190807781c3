"""One run of training: the remaining sections, and all sections together as `RunConfig`.

The path from a flag to a line of code is short: `--tensor-model-parallel-size` is
`run.parallel.tensor_model_parallel_size`, and a module gets that number as a constructor argument.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path
from typing import Any, Literal, Self

from megatron_allattn.config.checks import LARGEST, check_range, conform_types, field_types
from megatron_allattn.config.data import DataConfig
from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.model import ModelConfig
from megatron_allattn.config.optimizer import OptimizerConfig

Recompute = Literal["none", "selective", "full"]  # what is computed again in backward


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout: how model, optimizer state and batch are spread over processes."""

    tensor_model_parallel_size: int = 1
    """Processes that share the heads of every layer (TP)."""

    pipeline_model_parallel_size: int = 1
    """Stages that the layers are cut into (PP), with ZeRO 0 or 1."""

    pipeline_partition: Literal["cost", "current-cost", "parameters"] = "cost"
    """How layers are dealt to stages: by the work of a step at the spans that training starts from (cost) or at those
    of the checkpoint that a run goes on from (current-cost: equal losses but for rounding), or by weights."""

    pipeline_layers: str | None = None
    """Layers of every stage, instead: 2,1,2."""

    sequence_parallel: bool = False
    """Cut what lies between sublayers (norms, dropout, the residual stream) over the positions of a block among the
    processes that share heads, which saves memory for the same traffic."""

    shard_caches: bool = False
    """Keep each cached hidden state once over the processes that share heads instead of on each of them; costs
    gathering a layer's cache to read it, twice a step."""

    balance_heads: bool = False
    """Deal the heads of a layer to the processes that share them by what they cost at today's spans, anew at every
    save, instead of in their order; losses are equal but for rounding, checkpoints the same."""

    zero_stage: int = 1
    """DeepSpeed ZeRO stage over the replicas: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""

    deepspeed_config: Path | None = None
    """A DeepSpeed JSON for ZeRO, offload and communication: a file, or one of ds_configs/ by its name."""

    distributed_timeout_minutes: float = 10.0
    """Minutes after which a process that waits for another gives up."""

    startup_timeout_minutes: float = 60.0
    """Minutes that a run may take until its first step; after them it ends, with what every thread of every process is
    at."""

    step_timeout_minutes: float = 30.0
    """The same for a step."""

    evaluation_timeout_minutes: float = 120.0
    """The same for an evaluation."""

    save_timeout_minutes: float = 60.0
    """The same for saving a checkpoint; so long, too, do processes wait for each other in it."""

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        """--pipeline-layers as numbers; empty where it is left out."""
        return tuple(int(part) for part in self.pipeline_layers.split(",")) if self.pipeline_layers else ()

    def __post_init__(self) -> None:
        conform_types(self)
        check_range(self, "tensor_model_parallel_size", at_least=1, at_most=LARGEST)
        check_range(self, "pipeline_model_parallel_size", at_least=1, at_most=LARGEST)
        check_range(self, "zero_stage", at_least=0, at_most=3)
        for name in ("distributed", "startup", "step", "evaluation", "save"):
            check_range(self, f"{name}_timeout_minutes", above=0, at_most=7 * 24 * 60)
        if self.pipeline_model_parallel_size > 1 and self.zero_stage > 1:
            file = "a file with stage 1 (or 0), such as pipeline.json"
            lower = "--zero-stage 1 (or 0)" if self.deepspeed_config is None else file
            raise usage_error(
                "--pipeline-model-parallel-size",
                self.pipeline_model_parallel_size,
                f"ZeRO {self.zero_stage} cuts gradients, which a pipeline keeps whole while micro-batches pass",
                f"give {lower}, or leave the pipeline and keep the stage",
            )
        if self.pipeline_layers is not None:
            self._check_pipeline_layers(self.pipeline_layers)

    @property
    def deepspeed_json(self) -> Path:
        """The DeepSpeed JSON that is read, as the user knows it: one's own or that of the ZeRO stage."""
        return self.deepspeed_config or Path(f"zero{self.zero_stage}.json")

    def _check_pipeline_layers(self, given: str) -> None:
        stages, fix = self.pipeline_model_parallel_size, "give one number for every stage, such as 2,1,2"
        parts = given.split(",")
        if not all(part.isascii() and part.isdigit() and 0 < int(part) <= LARGEST for part in parts):
            raise usage_error("--pipeline-layers", given, "its parts must be numbers from 1 on", fix)
        if stages == 1:
            rule = "without a pipeline (--pipeline-model-parallel-size 1) there is nothing to cut"
            raise usage_error("--pipeline-layers", given, rule, "leave it out")
        if len(parts) != stages:
            rule = f"--pipeline-model-parallel-size {stages} has {stages} stages, it has {len(parts)}"
            raise usage_error("--pipeline-layers", given, rule, fix)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Training: batch, length, precision and evaluation."""

    seq_length: int = 128
    """Tokens M of every stream in one step."""

    micro_batch_size: int | None = None
    """Streams of one process in one forward pass; its whole share of the batch if left out."""

    global_batch_size: int = 16
    """Streams in one step, over all processes."""

    train_iters: int = 1000
    """Optimizer steps in the whole run."""

    seed: int = 1234
    """Decides initial weights, dropout and restarts of the data."""

    bf16: bool = False
    """Compute in bfloat16 with float32 master weights."""

    fp16: bool = False
    """Compute in float16 with loss scaling (GPU only)."""

    fused: Literal["auto", "apex", "torch"] = "auto"
    """Fused kernels: NVIDIA's apex where it is installed, always (an error without it), or PyTorch's only."""

    attention_backend: Literal["auto", "eager", "blocked", "triton"] = "auto"
    """How attention is computed: eager is the readable reference, blocked follows every head's span on any device,
    triton does so on NVIDIA GPUs; auto is triton where it can run and blocked elsewhere."""

    recompute_granularity: Recompute = "none"
    """What is computed again in backward to save memory: nothing; queries, keys and values (selective); or whole
    layers, of which only the input is kept (full). Losses and gradients are the same."""

    eval_interval: int = 0
    """Steps between two evaluations on the validation split; 0 evaluates at the end only."""

    eval_iters: int = 0
    """Blocks of --seq-length tokens per stream in one evaluation; 0 is the whole split."""

    max_nonfinite_steps: int = 5
    """Steps in a row whose loss or gradient is not finite, and whose updates are therefore not made, that end the run
    (exit code 4)."""

    def __post_init__(self) -> None:
        conform_types(self)
        for name in ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "max_nonfinite_steps"):
            check_range(self, name, at_least=1, at_most=LARGEST)
        for name in ("eval_interval", "eval_iters"):
            check_range(self, name, at_least=0, at_most=LARGEST)
        check_range(self, "seed", at_least=0, at_most=2**63 - 1)
        if self.bf16 and self.fp16:
            raise usage_error("--bf16", "--fp16", "a run has one precision", "give one of the two")
        if self.micro_batch_size is not None and self.global_batch_size % self.micro_batch_size:
            raise usage_error(
                "--global-batch-size",
                self.global_batch_size,
                f"must be a multiple of --micro-batch-size {self.micro_batch_size}",
                "change one of the two",
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: where a run is kept and where it goes on from."""

    save: Path | None = None
    """Run folder for the configuration, metrics and checkpoints."""

    load: Path | None = None
    """Run folder to resume from, at its newest checkpoint."""

    load_fallback: bool = False
    """Go on from an older checkpoint where the newest is damaged."""

    override: bool = False
    """Go on with other settings of the optimizer, its schedule or the precision than those of the checkpoint."""

    save_interval: int = 0
    """Steps between two checkpoints; 0 saves at the end only."""

    async_save: bool = False
    """Train on while a checkpoint is written, from a copy in host memory."""

    keep_latest_k: int = 0
    """How many of the newest checkpoints are kept; 0 keeps all."""

    save_retain_interval: int = 0
    """Checkpoints at multiples of this step are kept besides; 0 keeps none of them."""

    stop_deadline_minutes: float = 10.0
    """What a run gets, after SIGTERM or SIGUSR1 on any rank, to end its step and save it (exit code 3)."""

    def __post_init__(self) -> None:
        conform_types(self)
        check_range(self, "save_interval", at_least=0, at_most=LARGEST)
        check_range(self, "keep_latest_k", at_least=0, at_most=LARGEST)
        check_range(self, "save_retain_interval", at_least=0, at_most=LARGEST)
        check_range(self, "stop_deadline_minutes", above=0, at_most=7 * 24 * 60)

    @property
    def goes_on(self) -> bool:
        """Whether --load is --save, by whichever name: the run goes on in its own folder."""
        return self.load is not None and self.save is not None and realpath(self.load) == realpath(self.save)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging: what is said while training."""

    log_interval: int = 10
    """Steps between two log lines."""

    tensorboard_dir: Path | None = None
    """Folder for TensorBoard event files (pip install tensorboard)."""

    wandb_project: str | None = None
    """Weights & Biases project that gets the metrics (pip install wandb), offline unless WANDB_MODE says otherwise."""

    report: bool = True
    """Draw RUN/report once the run is done, where matplotlib is installed (pip install matplotlib)."""

    deepspeed_verbose: bool = False
    """Show DeepSpeed's own messages."""

    def __post_init__(self) -> None:
        conform_types(self)
        check_range(self, "log_interval", at_least=1, at_most=LARGEST)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run of training, section by section."""

    recipe: str | None = None
    """Named defaults that the other flags override; 'list' shows the names."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How it is spread over processes."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How the weights move."""

    data: DataConfig = field(default_factory=DataConfig)
    """Which text is read."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Batch, length, precision and evaluation."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Where the run is kept."""

    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """What is said while training."""

    def __post_init__(self) -> None:
        conform_types(self)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON's types, section by section; `from_dict` gives back an equal one."""
        return {
            name: {key: str(v) if isinstance(v, Path) else v for key, v in value.items()}
            if isinstance(value, dict)
            else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The configuration that `to_dict` wrote. A field that is left out has its default.

        Raises:
            UsageError: an unknown key, or a value that the field does not accept.
        """
        _check_keys("configuration", values, [f.name for f in dataclasses.fields(cls)])
        arguments: dict[str, Any] = {}
        for name, value in values.items():
            section = SECTIONS.get(name)
            if section is None:
                arguments[name] = value
            else:
                _check_keys(f"configuration section {name}", value, [f.name for f in dataclasses.fields(section)])
                arguments[name] = section(**value)
        return cls(**arguments)


SECTIONS: dict[str, type] = {
    name: kind
    for name, (kind, *_) in field_types(RunConfig).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
"""The sections of `RunConfig` by field name."""


def _check_keys(what: str, values: Any, known: list[str]) -> None:
    """Refuses anything but an object with known keys."""
    if not isinstance(values, dict):
        raise UsageError(f"{what}: must be an object with named values, not {type(values).__name__}")
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            fix = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise usage_error(what, key, "unknown key", fix)
