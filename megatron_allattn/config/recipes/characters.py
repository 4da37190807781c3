"""The paper's character-level models on enwik8 and text8 (section 5.1) and its baselines, the transformers of
Sukhbaatar et al. 2019, *Adaptive Attention Span in Transformers* (arXiv 1905.07799).

Where this paper is silent:
- how long training goes on before "the loss on validation stops decreasing", and what that means. Here: no evaluation
  of the whole validation split, one every 1,000 steps, is better by 1e-4 nats 20 times in a row. --train-iters is a cap
  well above the lengths recalled of the baselines' paper (900k steps for small models, 150k to 250k for large ones).
- the baselines. Of their paper, recalled: 8 heads, dropout on attention weights and on the activations of the
  feed-forward sublayer, the same optimizer. The coefficient of their span loss, 5e-7, is recalled of the published
  scripts. With 12 heads the large one would have 208M parameters instead of 209M.
"""

from megatron_allattn.config.data import DataConfig
from megatron_allattn.config.model import ModelConfig
from megatron_allattn.config.optimizer import OptimizerConfig
from megatron_allattn.config.recipes.recipe import Recipe, until_plateau
from megatron_allattn.config.run import CheckpointConfig, LoggingConfig, RunConfig, TrainingConfig

VOCABULARY = {"enwik8": 205, "text8": 28}
"""Symbols of each corpus as the paper counts them, the end of a line included."""

CAP = {"small": 1_000_000, "large": 400_000}
"""--train-iters by size."""


def all_attention(corpus: str, size: str) -> RunConfig:
    """The paper's small or large all-attention network."""
    num_layers, persistent, dropout = (18, 1024, 0.3) if size == "small" else (36, 2048, 0.4)
    model = ModelConfig(
        num_layers=num_layers,
        hidden_size=512,
        num_attention_heads=8,
        persistent_memory_size=persistent,
        max_attention_span=8192,
        span_loss=1e-7,
        attention_dropout=dropout,
    )
    return character_run(corpus, model, CAP[size])


def transformer(corpus: str, size: str, *, adaptive_span: bool) -> RunConfig:
    """The baseline of about the same number of parameters (small), or of twice as many (large)."""
    num_layers, hidden_size, inner, dropout = (12, 512, 2048, 0.3) if size == "small" else (24, 768, 4096, 0.4)
    model = ModelConfig(
        variant="transformer",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=8,
        persistent_memory_size=0,
        feed_forward_size=inner,
        max_attention_span=8192,
        adaptive_span=adaptive_span,
        span_loss=5e-7,
        attention_dropout=dropout,
        feed_forward_dropout=dropout,
    )
    return character_run(corpus, model, CAP[size])


def character_run(corpus: str, model: ModelConfig, train_iters: int) -> RunConfig:
    """The paper's training of a character-level model; `corpus` is the prefix of the prepared data, under data/."""
    return RunConfig(
        model=model,
        optimizer=until_plateau(OptimizerConfig(optimizer="adagrad", lr=0.07, lr_warmup_iters=32_000, clip_grad=0.03)),
        data=DataConfig(data_path=f"data/{corpus}"),
        training=TrainingConfig(seq_length=512, global_batch_size=64, train_iters=train_iters, eval_interval=1000),
        checkpoint=CheckpointConfig(save_interval=1000),
        logging=LoggingConfig(log_interval=100),
    )


def _all_attention_recipe(corpus: str, size: str, *, millions: int, test: float, dev: float | None = None) -> Recipe:
    return Recipe(
        name=f"{corpus}-{size}",
        about=f"the paper's {size} all-attention network on {corpus}",
        make=lambda: all_attention(corpus, size),
        vocab_size=VOCABULARY[corpus],
        gpus=8 if size == "small" else 64,
        prepare=corpus,
        paper_millions=millions,
        paper_dev=dev,
        paper_test=test,
    )


def _transformer_recipes(
    corpus: str, size: str, *, millions: int, test: float, dev: float | None = None
) -> tuple[Recipe, Recipe]:
    """With adaptive span, which the paper compares with, and with the same span fixed, for which it has no number."""
    name, vocab_size, gpus = f"{corpus}-transformer-{size}", VOCABULARY[corpus], 8 if size == "small" else 64
    adaptive = Recipe(
        name=name,
        about="baseline: transformer with adaptive span",
        make=lambda: transformer(corpus, size, adaptive_span=True),
        vocab_size=vocab_size,
        gpus=gpus,
        prepare=corpus,
        paper_millions=millions,
        paper_dev=dev,
        paper_test=test,
    )
    fixed = Recipe(
        name=f"{name}-fixed-span",
        about="baseline: transformer, every span 8192",
        make=lambda: transformer(corpus, size, adaptive_span=False),
        vocab_size=vocab_size,
        gpus=gpus,
        prepare=corpus,
    )
    return adaptive, fixed


CHARACTERS: tuple[Recipe, ...] = (
    _all_attention_recipe("enwik8", "small", millions=39, test=1.01),
    _all_attention_recipe("enwik8", "large", millions=114, test=0.98),
    _all_attention_recipe("text8", "small", millions=38, test=1.11, dev=1.05),
    _all_attention_recipe("text8", "large", millions=114, test=1.08, dev=1.02),
    *_transformer_recipes("enwik8", "small", millions=39, test=1.02),
    *_transformer_recipes("enwik8", "large", millions=209, test=0.98),
    *_transformer_recipes("text8", "small", millions=38, test=1.11, dev=1.05),
    *_transformer_recipes("text8", "large", millions=209, test=1.07, dev=1.01),
)
"""Tables 1 and 2 of the paper."""
