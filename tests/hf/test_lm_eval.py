"""lm-evaluation-harness on an exported folder, without a network: its perplexity is that of tools/evaluate.py."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_allattn.checkpoint.conversion import read_run
from megatron_allattn.config import DataConfig
from megatron_allattn.data.dataset import open_dataset
from megatron_allattn.hf import export
from tests.support.commands import ROOT, corpus
from tests.support.runs import untrained_run
from tests.support.tools import in_process

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (docs/huggingface.md)")
TASK = """\
task: own_text
dataset_path: text
dataset_kwargs:
  data_files: {{test: {text}}}
  sample_by: document
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


@pytest.fixture(autouse=True)
def own_group() -> Iterator[None]:
    """The harness leaves a process group behind, which other tests of this process would meet."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def harness(folder: Path, text: str, first: int, max_length: int) -> float:
    """Bits per byte of a text that follows the token `first`."""
    from lm_eval.tasks import TaskManager

    (folder / "text.txt").write_text(text, newline="")
    (folder / "tasks").mkdir()
    (folder / "tasks/own_text.yaml").write_text(TASK.format(text=folder / "text.txt"))
    arguments: dict[str, Any] = {
        "pretrained": str(folder / "out"),
        "trust_remote_code": True,
        "dtype": "float32",
        "max_length": max_length,
        "prefix_token_id": first,
    }
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=["own_text"],
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )
    return float(found["results"]["own_text"]["bits_per_byte,none"])


def test_perplexity_is_that_of_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the split's first token as the prefix, and a window over the whole text, contexts are the same."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = corpus(tmp_path, num_words=600)
    untrained_run(tmp_path / "run", data)
    tool = in_process(ROOT / "tools/evaluate.py", capsys)
    code, _, errors = tool("--load", tmp_path / "run", "--split-name", "test", "--json", tmp_path / "card.json")
    assert code == 0, errors
    card = json.loads((tmp_path / "card.json").read_text())
    tokens = bytes(open_dataset(DataConfig(data_path=str(data))).test.astype("uint8"))
    export.write(read_run(tmp_path / "run"), tmp_path / "out", compare_logits=False)
    found = harness(tmp_path, tokens[1:].decode(), tokens[0], max_length=len(tokens))
    assert math.isclose(found, card["bits_per_byte"], rel_tol=1e-4)
