"""Models beyond the paper, in the shapes that users know from GPT-3 (Brown et al. 2020, Table 2.1).

N = 4d persistent vectors take the parameters of a feed-forward sublayer of width 4d. All other settings are choices of
this project, none of them tuned and none of these models trained to the end here:
- vocabulary: SentencePiece with 50,000 pieces, plain and tied;
- learning rates, warm-up, betas and weight decay as published for GPT-3; cosine decay to a tenth;
- 256 streams of 1,024 tokens, 128 from 6.7b on: fewer than such models usually have, since every stream has a cache in
  every layer; spans of up to 2,048 tokens, as for words in the paper;
- about 20 tokens a parameter (Hoffmann et al. 2022).
"""

from collections.abc import Callable

from megatron_allattn.config.data import DataConfig
from megatron_allattn.config.model import ModelConfig
from megatron_allattn.config.optimizer import OptimizerConfig
from megatron_allattn.config.recipes.recipe import Recipe
from megatron_allattn.config.run import CheckpointConfig, LoggingConfig, RunConfig, TrainingConfig

VOCABULARY = 50_000


def scaled(
    *, num_layers: int, hidden_size: int, num_attention_heads: int, lr: float, num_streams: int, train_iters: int
) -> RunConfig:
    """An all-attention network of this shape."""
    return RunConfig(
        model=ModelConfig(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            persistent_memory_size=4 * hidden_size,
            max_attention_span=2048,
            span_loss=5e-7,
            untie_embeddings_and_output_weights=False,
        ),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=lr / 10,
            lr_decay_style="cosine",
            lr_warmup_iters=1500,
            clip_grad=1.0,
            weight_decay=0.1,
            adam_beta2=0.95,
        ),
        data=DataConfig(data_path="data/corpus"),
        training=TrainingConfig(
            seq_length=1024,
            global_batch_size=num_streams,
            train_iters=train_iters,
            bf16=True,
            eval_interval=1000,
            eval_iters=20,
        ),
        checkpoint=CheckpointConfig(save_interval=1000),
        logging=LoggingConfig(log_interval=10),
    )


def _recipe(size: str, gpus: int, make: Callable[[], RunConfig]) -> Recipe:
    model = make().model
    return Recipe(
        name=f"allattn-{size}",
        about=f"beyond the paper: {model.num_layers} layers of {model.hidden_size}, 4 x {model.hidden_size} vectors",
        make=make,
        vocab_size=VOCABULARY,
        gpus=gpus,
        prepare=f"sentencepiece --input FILE --vocab-size {VOCABULARY}",
    )


SCALED: tuple[Recipe, ...] = (
    _recipe(
        "125m",
        8,
        lambda: scaled(
            num_layers=12, hidden_size=768, num_attention_heads=12, lr=6e-4, num_streams=256, train_iters=10_000
        ),
    ),
    _recipe(
        "350m",
        8,
        lambda: scaled(
            num_layers=24, hidden_size=1024, num_attention_heads=16, lr=3e-4, num_streams=256, train_iters=27_000
        ),
    ),
    _recipe(
        "1.3b",
        64,
        lambda: scaled(
            num_layers=24, hidden_size=2048, num_attention_heads=16, lr=2e-4, num_streams=256, train_iters=100_000
        ),
    ),
    _recipe(
        "6.7b",
        64,
        lambda: scaled(
            num_layers=32, hidden_size=4096, num_attention_heads=32, lr=1.2e-4, num_streams=128, train_iters=1_020_000
        ),
    ),
    _recipe(
        "13b",
        64,
        lambda: scaled(
            num_layers=40, hidden_size=5120, num_attention_heads=40, lr=1e-4, num_streams=128, train_iters=1_960_000
        ),
    ),
)
