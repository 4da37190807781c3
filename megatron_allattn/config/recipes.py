"""Named configurations: the paper's character-level runs (its section 5.1) and a small one for a laptop.

Each is a function that returns a whole `RunConfig`; flags override it. The paper trains at the base learning rate and,
when the validation loss stops falling, "for an additional 20-30k steps" at a tenth of it: continue such a run with
`--load DIR --lr 0.007 --train-iters 170000`.
"""

from collections.abc import Callable

from megatron_allattn.config.data import DataConfig
from megatron_allattn.config.model import ModelConfig
from megatron_allattn.config.optimizer import OptimizerConfig
from megatron_allattn.config.run import CheckpointConfig, LoggingConfig, RunConfig, TrainingConfig


def demo() -> RunConfig:
    """A small byte-level model that two CPU cores train in minutes."""
    return RunConfig(
        recipe="demo",
        model=ModelConfig(
            num_layers=4,
            hidden_size=128,
            num_attention_heads=4,
            persistent_memory_size=256,
            max_attention_span=256,
            span_loss=1e-7,
        ),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=2e-3, lr_decay_style="cosine", min_lr=1e-4, lr_warmup_iters=50, clip_grad=1.0
        ),
        training=TrainingConfig(seq_length=64, global_batch_size=16, train_iters=800, eval_interval=200, eval_iters=40),
        logging=LoggingConfig(log_interval=50),
    )


def enwik8_small() -> RunConfig:
    """The paper's small model on enwik8: 39M parameters, 1.01 bits per character on its test set."""
    return _small("enwik8")


def enwik8_large() -> RunConfig:
    """The paper's large model on enwik8: 114M parameters, 0.98 bits per character on its test set."""
    return _large("enwik8")


def text8_small() -> RunConfig:
    """The paper's small model on text8: 38M parameters, 1.11 bits per character on its test set."""
    return _small("text8")


def text8_large() -> RunConfig:
    """The paper's large model on text8: 114M parameters, 1.08 bits per character on its test set."""
    return _large("text8")


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "demo": demo,
    "enwik8-small": enwik8_small,
    "enwik8-large": enwik8_large,
    "text8-small": text8_small,
    "text8-large": text8_large,
}
"""Every recipe by the name that --recipe takes."""


def recipe_table() -> str:
    """The recipes as a table of text, one line each: name and the first line of its description."""
    width = max(map(len, RECIPES))
    return "\n".join(f"{name:<{width}}  {(make.__doc__ or '').splitlines()[0]}" for name, make in RECIPES.items())


def _small(corpus: str) -> RunConfig:
    model = _paper_model(num_layers=18, persistent_memory_size=1024, attention_dropout=0.3)
    return _paper_run(corpus, "small", model)


def _large(corpus: str) -> RunConfig:
    model = _paper_model(num_layers=36, persistent_memory_size=2048, attention_dropout=0.4)
    return _paper_run(corpus, "large", model)


def _paper_model(*, num_layers: int, persistent_memory_size: int, attention_dropout: float) -> ModelConfig:
    """What the paper's character-level models have in common."""
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=512,
        num_attention_heads=8,
        persistent_memory_size=persistent_memory_size,
        max_attention_span=8192,
        adaptive_span=True,
        span_loss=1e-7,
        span_ramp=32,
        attention_dropout=attention_dropout,
    )


def _paper_run(corpus: str, size: str, model: ModelConfig) -> RunConfig:
    """The paper's training of a character-level model; `corpus` names the recipe and the prefix of prepared data."""
    return RunConfig(
        recipe=f"{corpus}-{size}",
        model=model,
        optimizer=OptimizerConfig(
            optimizer="adagrad", lr=0.07, lr_decay_style="constant", lr_warmup_iters=32_000, clip_grad=0.03
        ),
        data=DataConfig(data_path=f"data/{corpus}"),
        training=TrainingConfig(
            seq_length=512, global_batch_size=64, train_iters=150_000, eval_interval=1000, eval_iters=100
        ),
        checkpoint=CheckpointConfig(save_interval=1000),
        logging=LoggingConfig(log_interval=100),
    )
