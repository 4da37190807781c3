"""A checkpoint that was trained at TP 2 × PP 2, through tools/convert_checkpoint.py to every format and back."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_allattn.checkpoint.conversion import read_run
from megatron_allattn.checkpoint.header import read_metadata
from megatron_allattn.config import ModelConfig
from megatron_allattn.hf.export import log_probabilities
from tests.support.commands import TINY, corpus, run_ranks
from tests.support.pool import WorkerPools
from tests.support.saved_runs import same_state, same_weights, saved_run
from tests.support.template import ROOT, Template
from tests.support.tools import Tool, in_process
from tests.support.written import nats, written_nats

NOT_COMPARED = {"huggingface": ("--no-compare-logits",)}
GRID = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, template: Template) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    data = corpus(folder, tokenizer="char")
    flags = [*TINY, "--optimizer", "adam", "--train-iters", "6", "--micro-batch-size", "2", "--save", "run", *GRID]
    done = run_ranks(4, *flags, "--data-path", str(data), folder=folder, template=template)
    assert [one.returncode for one in done] == [0] * 4, done[0].output
    return folder / "run"


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    return in_process(ROOT / "tools" / "convert_checkpoint.py", capsys)


@pytest.mark.parametrize(
    ("name", "flags", "keeps_state"),
    [
        ("safetensors", (), False),
        ("shards", GRID, True),
        ("shards", ("--tensor-model-parallel-size", "4"), True),
        ("deepspeed-universal", (), True),
        ("adaptive-span", (), True),
        ("huggingface", (), False),
    ],
)
def test_every_target_has_the_same_weights_and_losses(
    trained: Path,
    tmp_path: Path,
    tool: Tool,
    pools: WorkerPools,
    name: str,
    flags: tuple[str, ...],
    keeps_state: bool,
) -> None:
    """What was written computes what was trained, without any of what reads it here; and it comes back the same."""
    if name == "huggingface":
        pytest.importorskip("transformers", reason="transformers is not installed")
    code, _, errors = tool("--to", name, "--load", trained, "--output", tmp_path / "out", *flags)
    assert (code, errors.replace("Loading weights", "").count("error")) == (0, 0), errors
    before = read_run(trained)
    ids = torch.arange(40)[None] % before.state["vocab_size"]
    expected = nats({one: before.weights.read(one) for one in before.weights.names}, before.run.model, ids[0])
    found = written_nats(name, tmp_path / "out", before.run.model, ids[0], pools)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)
    given = ["--span-ramp", "32", "--clip-grad", "0.03"] if name == "adaptive-span" else []
    code, _, errors = tool("--from", name, tmp_path / "out", "--output", tmp_path / "back", *given)
    assert code == 0, errors
    after = read_run(tmp_path / "back")
    assert not given or after.run.optimizer.clip_grad == 0.03
    torch.testing.assert_close(log_probabilities(after, ids), log_probabilities(before, ids), rtol=0.0, atol=1e-6)
    if name != "adaptive-span":  # it knows one way to normalize
        assert same_weights(before, after)
    if keeps_state:
        assert same_state(before, after)
        assert name == "adaptive-span" or before.progress == after.progress


def test_weights_alone_become_a_file_of_the_papers_code_that_has_trained_nothing(
    trained: Path, tmp_path: Path, tool: Tool
) -> None:
    """That code loads no file without an optimizer: it gets one as it is before the first update."""
    steps = [("--to", "safetensors", "--load", trained, "--output", tmp_path / "weights")]
    steps += [("--from", "safetensors", tmp_path / "weights", "--output", tmp_path / "run")]
    steps += [("--to", "adaptive-span", "--load", tmp_path / "run", "--output", tmp_path / "a.pt")]
    for step in steps:
        code, _, errors = tool(*step)
        assert code == 0, errors
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    states = content["optimizer"]["state"].values()
    assert states and all(int(value.count_nonzero()) == 0 for state in states for value in state.values())
    code, _, errors = tool(
        *("--from", "adaptive-span", tmp_path / "a.pt", "--output", tmp_path / "back", "--span-ramp", "32")
    )
    assert code == 0, errors
    before, after = read_run(trained), read_run(tmp_path / "back")
    ids = torch.arange(40)[None] % before.state["vocab_size"]
    torch.testing.assert_close(log_probabilities(after, ids), log_probabilities(before, ids), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "safetensors", *GRID), "--to safetensors: --tensor-model-parallel-size has no effect"),
        (("--to", "shards", "--vocabulary", "v.json"), "--to shards: --vocabulary has no effect"),
        (("--to", "shards", "--no-compare-logits"), "--to shards: --no-compare-logits has no effect"),
        (("--to", "shards", "--evaluation-card", "x"), "--to shards: --evaluation-card has no effect"),
        (("--to", "safetensors", "--license", ""), "--to safetensors: --license has no effect"),
        (("--to", "shards", "--lr", "1"), "--to shards: --lr has no effect"),
        (("--to", "huggingface", "--hidden-size", "3"), "--to huggingface: --hidden-size has no effect"),
        (("--to", "shards", "--tensor-model-parallel-size", "3"), "must divide --num-attention-heads 4"),
        (("--to", "shards", "--pipeline-model-parallel-size", "9"), "2 layers fill at most 2"),
        (("--to", "nothing"), "invalid choice: 'nothing'"),
    ],
)
def test_a_mistake_is_one_line(
    trained: Path, tmp_path: Path, tool: Tool, arguments: tuple[str, ...], message: str
) -> None:
    code, output, errors = tool(*arguments, "--load", trained, "--output", tmp_path / "out")
    assert (code, output, len(errors.splitlines())) == (2, "", 1) and message in errors, errors
    assert not (tmp_path / "out").exists()


def test_logits_that_are_not_compared_are_told(trained: Path, tmp_path: Path, tool: Tool) -> None:
    arguments = ("--to", "huggingface", "--load", trained, "--output", tmp_path / "out", "--no-compare-logits")
    code, output, errors = tool(*arguments)
    assert (code, errors) == (0, "")
    assert output.splitlines()[1:] == [
        "note: it has the weights alone: a run from it begins at step 0, with a new optimizer and schedule",
        "logits were not compared (--no-compare-logits), only the tensors were",
        f'load it: transformers.AutoModelForCausalLM.from_pretrained("{tmp_path}/out", trust_remote_code=True)',
    ]


def test_the_model_card_has_the_evaluation(
    trained: Path, tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What tools/evaluate.py wrote of this step, and of no other."""
    path, evaluate = tmp_path / "card.json", in_process(ROOT / "tools" / "evaluate.py", capsys)
    code, printed, errors = evaluate("--load", trained, "--json", path)
    assert code == 0, errors
    arguments = ("--to", "huggingface", "--load", trained, "--output", tmp_path / "out", "--no-compare-logits")
    given = (*arguments, "--evaluation-card", path, "--license", "apache-2.0")
    card = json.loads(path.read_text())
    step = {"checkpoint": card["checkpoint"] | {"step": 5}}
    folder = {"checkpoint": card["checkpoint"] | {"folder": "other/checkpoints/step_00000006"}}
    for change, message in (
        ({"format": "another"}, "is no evaluation card of version 1"),
        ({"context": 3}, "is damaged"),
        (step, "step 5; give what tools/evaluate.py"),
        (folder, "is of other/checkpoints/step_00000006, step 6"),
    ):
        path.write_text(json.dumps(card | change))
        code, output, errors = tool(*given)
        assert (code, output, len(errors.splitlines())) == (2, "", 1) and message in errors, errors
        assert errors.startswith(f"error: --evaluation-card {path}: ") and not (tmp_path / "out").exists()
    path.write_text(json.dumps(card))
    code, _, errors = tool(*arguments, "--license", "MIT licence")
    assert code == 2 and errors.startswith("error: --license MIT licence: is no licence as the Hub spells them")
    code, _, errors = tool(*given)
    assert (code, errors) == (0, "")
    written = (tmp_path / "out/README.md").read_text()
    assert printed.strip() in written and '\nlicense: "apache-2.0"\n' in written
    code, output, errors = tool("--from", "huggingface", tmp_path / "out", "--output", tmp_path / "back")
    assert (code, errors) == (0, "") and "char tokens" in output
    assert read_run(tmp_path / "back").state["tokenizer_sha256"] == read_run(trained).state["tokenizer_sha256"]


@pytest.mark.parametrize("name", ["safetensors", "shards", "deepspeed-universal", "huggingface"])
def test_what_is_none_of_it_is_refused(tmp_path: Path, tool: Tool, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"nothing of the kind")
    for source in ("folder", "file", "missing"):
        code, output, errors = tool("--from", name, tmp_path / source, "--output", tmp_path / "back")
        assert (code, output, len(errors.splitlines())) == (2, "", 1) and errors.startswith("error: "), errors
        assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 2_000_000), ("hidden_size", 2**30), ("adaptive_cutoffs", None)]
)
@pytest.mark.parametrize("name", ["safetensors", "shards", "deepspeed-universal", "huggingface"])
def test_a_model_that_its_files_cannot_hold_is_not_built(
    tmp_path: Path, tool: Tool, name: str, field: str, value: int | None
) -> None:
    """It would take minutes and all memory."""
    saved_run(tmp_path / "run", ModelConfig(num_layers=1, hidden_size=32, max_attention_span=48), vocab_size=2000)
    out = tmp_path / "out"
    assert tool("--load", tmp_path / "run", "--to", name, "--output", out, *NOT_COMPARED.get(name, ()))[0] == 0

    def changed(model: dict[str, Any]) -> None:
        model[field] = ",".join(map(str, range(1, 1990))) if value is None else value
        beside = {"hidden_size": {"num_attention_heads": value}, "adaptive_cutoffs": {"adaptive_div_value": 1}}
        model.update(beside.get(field, {}))

    if name == "safetensors":
        tensors = load_file(out)
        metadata = read_metadata(out)
        content = json.loads(metadata["megatron_allattn"])
        changed(content["config"]["model"])
        save_file(tensors, out, metadata | {"megatron_allattn": json.dumps(content)})
    else:
        (path,) = [one for one in out.rglob("*.json") if one.name in ("layout.json", "megatron_allattn.json")]
        content = json.loads(path.read_text())
        changed(content.get("description", content)["config"]["model"])
        path.write_text(json.dumps(content))
    if name == "huggingface":
        content = json.loads((out / "config.json").read_text())
        changed(content)
        (out / "config.json").write_text(json.dumps(content))
    start = time.monotonic()
    code, _, errors = tool("--from", name, out, "--output", tmp_path / "back")
    assert code == 2 and f"has a model with {field} " in errors and errors.count("\n") == 1
    assert time.monotonic() - start < 30
    assert not (tmp_path / "back").exists()
