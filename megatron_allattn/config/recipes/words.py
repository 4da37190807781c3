"""The paper's word-level model on WikiText-103 (section 5.1), with adaptive input and softmax.

The text names three clusters "of size 20k, 40k and 200k" and the code makes four from the cumulative cut-offs 20000,
40000 and 200000. Only the four give the 133M parameters of the paper's table, so `wikitext103` has those;
`wikitext103-three-clusters` is the text's reading.

Where the paper is silent: whether the learning rate falls at a plateau here too (yes, as for characters, in the
absence of another rule), after how many evaluations without improvement (20, one every 1,000 steps, by 1e-4 nats), the
steps after it (20,000) and the cap (300,000 steps, 48 passes over the training text).
"""

from dataclasses import replace

from megatron_allattn.config.data import DataConfig
from megatron_allattn.config.model import ModelConfig
from megatron_allattn.config.optimizer import OptimizerConfig
from megatron_allattn.config.recipes.recipe import Recipe, until_plateau
from megatron_allattn.config.run import CheckpointConfig, LoggingConfig, RunConfig, TrainingConfig

VOCABULARY = 267_735
"""Words of WikiText-103's training text and the end of a line."""


def wikitext103() -> RunConfig:
    """Four clusters, as in the paper's code."""
    return RunConfig(
        model=ModelConfig(
            num_layers=36,
            hidden_size=512,
            num_attention_heads=8,
            persistent_memory_size=2048,
            max_attention_span=2048,
            span_loss=5e-7,
            attention_dropout=0.3,
            embedding_dropout=0.1,
            adaptive_cutoffs="20000,40000,200000",
            adaptive_div_value=4,
            untie_embeddings_and_output_weights=False,
        ),
        optimizer=until_plateau(OptimizerConfig(optimizer="adam", lr=2.5e-4, lr_warmup_iters=8000, clip_grad=1.0)),
        data=DataConfig(data_path="data/wikitext-103"),
        training=TrainingConfig(seq_length=256, global_batch_size=64, train_iters=300_000, eval_interval=1000),
        checkpoint=CheckpointConfig(save_interval=1000),
        logging=LoggingConfig(log_interval=100),
    )


def wikitext103_three_clusters() -> RunConfig:
    """Clusters of 20k, of 40k and of the remaining 208k words."""
    run = wikitext103()
    return replace(run, model=replace(run.model, adaptive_cutoffs="20000,60000"))


WORDS: tuple[Recipe, ...] = (
    Recipe(
        name="wikitext103",
        about="the paper's word-level model on WikiText-103",
        make=wikitext103,
        vocab_size=VOCABULARY,
        gpus=64,
        prepare="wikitext-103",
        paper_millions=133,
        paper_dev=19.7,
        paper_test=20.6,
    ),
    Recipe(
        name="wikitext103-three-clusters",
        about="the same with the three clusters of the paper's text",
        make=wikitext103_three_clusters,
        vocab_size=VOCABULARY,
        gpus=64,
        prepare="wikitext-103",
    ),
)
"""Table 3 of the paper."""
