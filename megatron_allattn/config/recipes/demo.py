"""A small model that two CPU cores train in minutes, on text that every Python brings along."""

from megatron_allattn.config.model import ModelConfig
from megatron_allattn.config.optimizer import OptimizerConfig
from megatron_allattn.config.recipes.recipe import Recipe
from megatron_allattn.config.run import LoggingConfig, RunConfig, TrainingConfig


def demo() -> RunConfig:
    """Bytes of the standard library's sources, 800 steps."""
    return RunConfig(
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


DEMO = Recipe(
    name="demo", about="small byte-level model that two CPU cores train in minutes", make=demo, vocab_size=256, gpus=2
)
