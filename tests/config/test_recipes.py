"""The recipes are the paper's: its numbers are repeated here, and its parameter counts follow from them."""

import pytest

from megatron_allattn.config import RECIPES, ModelConfig, RunConfig, check_run, check_world

# section 5.1 of arXiv 1907.01470
PAPER = {
    "enwik8-small": {"layers": 18, "persistent": 1024, "dropout": 0.3, "vocabulary": 205, "millions": 39},
    "enwik8-large": {"layers": 36, "persistent": 2048, "dropout": 0.4, "vocabulary": 205, "millions": 114},
    "text8-small": {"layers": 18, "persistent": 1024, "dropout": 0.3, "vocabulary": 28, "millions": 38},
    "text8-large": {"layers": 36, "persistent": 2048, "dropout": 0.4, "vocabulary": 28, "millions": 114},
}


def count_parameters(model: ModelConfig, vocabulary: int) -> int:
    """Weights of the network by hand: per layer W_q,k,v,o, k' and v', a LayerNorm and H spans; one position table."""
    d, heads = model.hidden_size, model.num_attention_heads
    layer = 4 * d * d + 2 * model.persistent_memory_size * d + 2 * d + heads
    positions = d // heads * model.max_attention_span
    return model.num_layers * layer + positions + 2 * vocabulary * d + vocabulary


def test_names_are_the_documented_ones() -> None:
    assert list(RECIPES) == ["demo", "enwik8-small", "enwik8-large", "text8-small", "text8-large"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_consistent_and_knows_its_name(name: str) -> None:
    config = RECIPES[name]()
    assert config.recipe == name
    check_run(config, frozenset())
    for world_size in (1, 2, 4, 8):
        check_world(config, world_size)


@pytest.mark.parametrize("name", PAPER)
def test_paper_recipes_have_the_papers_numbers(name: str) -> None:
    config, paper = RECIPES[name](), PAPER[name]
    model, optimizer, training = config.model, config.optimizer, config.training
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (paper["layers"], 512, 8)
    assert (model.persistent_memory_size, model.attention_dropout) == (paper["persistent"], paper["dropout"])
    assert (model.adaptive_span, model.max_attention_span, model.span_loss, model.span_ramp) == (True, 8192, 1e-7, 32)
    assert (model.variant, model.position_values, model.empty_cache) == ("all-attn", "none", "attend")
    assert model.embedding_dropout == 0
    assert (optimizer.optimizer, optimizer.lr, optimizer.clip_grad) == ("adagrad", 0.07, 0.03)
    assert (optimizer.lr_warmup_iters, optimizer.lr_decay_style) == (32_000, "constant")
    assert (training.seq_length, training.global_batch_size) == (512, 64)
    assert config.data.data_path == f"data/{name.split('-')[0]}"


@pytest.mark.parametrize("name", PAPER)
def test_paper_recipes_have_the_papers_parameter_count(name: str) -> None:
    paper = PAPER[name]
    assert round(count_parameters(RECIPES[name]().model, int(paper["vocabulary"])) / 1e6) == paper["millions"]


def test_demo_splits_over_two_tensor_parallel_processes() -> None:
    config = RunConfig.from_dict(RECIPES["demo"]().to_dict() | {"parallel": {"tensor_model_parallel_size": 2}})
    check_world(config, 2)
    assert config.data.data_path is None
