"""A transformer's feed-forward units as persistent vectors: the algebra, what is kept, and that it trains."""

import math
import re
from pathlib import Path

import pytest
import torch

from megatron_allattn.checkpoint.conversion import read_run
from megatron_allattn.checkpoint.inspect import inspect
from megatron_allattn.checkpoint.warm_start import read, vectors
from megatron_allattn.config import DataConfig, ModelConfig, UsageError
from megatron_allattn.config.parameters import count_parameters
from megatron_allattn.data.dataset import open_dataset
from megatron_allattn.hf.export import log_probabilities
from megatron_allattn.inference.quick_look import validation_loss
from tests.support.commands import corpus
from tests.support.saved_runs import saved_run
from tests.support.template import ROOT
from tests.support.tools import in_process

HEADS, SIZE, UNITS = 4, 8, 24
HIDDEN = HEADS * SIZE
TRANSFORMER = ModelConfig(
    num_layers=2,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    persistent_memory_size=0,
    max_attention_span=48,
    variant="transformer",
    feed_forward_size=UNITS,
    feed_forward_dropout=0.125,
)


def test_a_units_row_and_column_come_back_over_all_heads() -> None:
    generator = torch.Generator().manual_seed(2)
    query, out = (torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    inner = torch.randn(UNITS, HIDDEN, generator=generator, dtype=torch.float64)
    outer = torch.randn(HIDDEN, UNITS, generator=generator, dtype=torch.float64)
    key, value = vectors(query, out, inner, outer, HEADS)
    assert key.shape == (HEADS, SIZE, UNITS) and value.shape == (HEADS, UNITS, SIZE)
    x = torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
    weights = torch.rand(UNITS, generator=generator, dtype=torch.float64)
    scores, output = torch.zeros(UNITS, dtype=torch.float64), torch.zeros(HIDDEN, dtype=torch.float64)
    for head in range(HEADS):
        rows = slice(head * SIZE, (head + 1) * SIZE)
        scores += (query[rows] @ x) @ key[head]
        output += out[:, rows] @ (weights @ (math.sqrt(UNITS) * value[head]))
    assert torch.allclose(scores, inner @ x, atol=1e-9)
    assert torch.allclose(output, outer @ weights, atol=1e-9)


def test_directions_that_heads_do_not_see_stay_empty() -> None:
    """A query matrix of rank 1: only what it sees of a row is kept, and nothing becomes huge."""
    query = torch.zeros(4, 4, dtype=torch.float64)
    query[0, 0], query[1, 1] = 2.0, 1e-9
    key, _ = vectors(query, torch.eye(4), torch.ones(1, 4), torch.ones(4, 1), 2)
    assert key.flatten().tolist() == pytest.approx([0.5, 0, 0, 0], abs=1e-12)


def test_a_run_becomes_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = DataConfig(data_path=str(corpus(tmp_path, tokenizer="char")))
    saved = saved_run(tmp_path / "run", TRANSFORMER, tokenizer=open_dataset(data).tokenizer, data=data)
    tool = in_process(ROOT / "tools" / "convert_checkpoint.py", capsys)
    code, output, errors = tool("--from", "ff-transformer", tmp_path / "run", "--output", tmp_path / "new")
    assert (code, errors) == (0, "") and "new: 24 persistent vectors of a head, of as many units; " in output
    told = re.search(r"loss of ([\d,]+) validation tokens: ([\d.]+) before, ([\d.]+) after", output)
    assert told is not None
    (before, count), (after, _) = (validation_loss(tmp_path / name, data) for name in ("run", "new"))
    assert told.groups() == (f"{count:,}", f"{before:.4f}", f"{after:.4f}") and before != after
    assert inspect(tmp_path / "new", every_byte=True).intact
    new = read_run(tmp_path / "new")
    model, vocab_size = new.run.model, saved.state["vocab_size"]
    assert (model.variant, model.persistent_memory_size, model.feed_forward_size) == ("all-attn", UNITS, 0)
    assert (new.state["step"], new.state["tokenizer"], new.optimizer.names) == (0, saved.state["tokenizer"], [])
    biases, norms = TRANSFORMER.num_layers * (UNITS + HIDDEN), TRANSFORMER.num_layers * 2 * HIDDEN
    before = count_parameters(TRANSFORMER, vocab_size).total
    assert count_parameters(model, vocab_size).total == before - biases - norms
    assert new.weights.read("layers.1.norm1.weight").equal(saved.weights.read("layers.1.norm2.weight"))
    for name in ("embedding.weight", "output.bias", "layers.0.query.weight", "layers.1.span", "position.key"):
        assert new.weights.read(name).equal(saved.weights.read(name)), name
    assert log_probabilities(new, torch.arange(9)[None] % vocab_size).isfinite().all()


def test_without_its_data_the_loss_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_run(tmp_path / "run", TRANSFORMER, data=DataConfig(data_path=str(tmp_path / "gone")))
    tool = in_process(ROOT / "tools" / "convert_checkpoint.py", capsys)
    code, output, errors = tool("--from", "ff-transformer", tmp_path / "run", "--output", tmp_path / "new")
    assert (code, errors) == (0, "") and inspect(tmp_path / "new", every_byte=True).intact
    assert f"note: the loss before and after was not measured: --data-path {tmp_path / 'gone'}" in output


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", ModelConfig(num_layers=1, hidden_size=32, max_attention_span=48))
    with pytest.raises(UsageError, match="is of variant all-attn, which has no feed-forward sublayers with a ReLU"):
        read(tmp_path / "run", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
