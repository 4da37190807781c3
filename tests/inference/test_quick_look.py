"""The loss on the first validation tokens: against one pass of the network over them, and what has no such loss."""

from pathlib import Path

import pytest
import torch

from megatron_allattn.config import DataConfig, UsageError
from megatron_allattn.data.dataset import open_dataset
from megatron_allattn.hf.export import log_probabilities
from megatron_allattn.inference import quick_look
from tests.support.commands import corpus
from tests.support.saved_runs import MODELS, saved_run


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return DataConfig(data_path=str(corpus(tmp_path, num_words=900, tokenizer="char")))


def test_the_loss_is_that_of_one_pass(tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(data)
    saved = saved_run(tmp_path / "run", MODELS["transformer"], tokenizer=dataset.tokenizer)
    monkeypatch.setattr(quick_look, "TOKENS", 90)
    loss, count = quick_look.validation_loss(tmp_path / "run", data)
    ids = torch.from_numpy(dataset.valid[:90].astype("int64"))
    one_pass = log_probabilities(saved, ids[None, :-1])[0].double()
    assert count == 89
    assert loss == pytest.approx(-one_pass.gather(1, ids[1:, None]).mean().item(), rel=1e-6)


def test_a_short_split_is_used_whole(tmp_path: Path, data: DataConfig) -> None:
    dataset = open_dataset(data)
    saved_run(tmp_path / "run", MODELS["all-attn"], tokenizer=dataset.tokenizer)
    assert quick_look.validation_loss(tmp_path / "run", data)[1] == len(dataset.valid) - 1 < quick_look.TOKENS - 1


def test_data_of_another_tokenizer_is_refused(tmp_path: Path, data: DataConfig) -> None:
    saved_run(tmp_path / "run", MODELS["all-attn"], vocab_size=23)
    with pytest.raises(UsageError, match="data prepared with the same tokenizer"):
        quick_look.validation_loss(tmp_path / "run", data)
