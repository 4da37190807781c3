"""tools/convert_checkpoint.py: both directions, what other tools and training make of the result, one-line errors."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_allattn.checkpoint import adaptive_span, save
from megatron_allattn.checkpoint.conversion import read_run
from megatron_allattn.checkpoint.inspect import inspect
from megatron_allattn.config import ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from megatron_allattn.data.indexed import IndexedWriter
from megatron_allattn.data.tokenizers import NullTokenizer
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.hf.export import log_probabilities
from megatron_allattn.inference.model import load_model
from megatron_allattn.inference.scoring import score
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import Groups, single_process_groups
from tests.support.checkpoints import read_tensors
from tests.support.commands import run_ranks
from tests.support.pool import WorkerPools
from tests.support.saved_runs import saved_run
from tests.support.span_files import SHAPES, assert_equal, content
from tests.support.template import ROOT, Template
from tests.support.tools import Tool, in_process
from tests.support.trajectories import groups_of

TOOL = ROOT / "tools" / "convert_checkpoint.py"
CASES = ROOT / "tests/data/reference"
CHAR, WORD = CASES / "adaptive_span_char.pt", CASES / "adaptive_span_word.pt"
CPU = torch.device("cpu")
FROM, TO = ("--from", "adaptive-span"), ("--to", "adaptive-span")


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    return in_process(TOOL, capsys)


def loaded(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def test_what_is_assumed_is_told(tool: Tool, tmp_path: Path) -> None:
    note = (
        "note: the file does not say it, and this is assumed: --span-ramp 32, --span-loss 1e-06, "
        "--attention-dropout 0.0, --embedding-dropout 0.0"
    )
    assert note in tool(*FROM, CHAR, "--output", tmp_path / "a")[1]
    given = ["--span-ramp", "32", "--span-loss", "0", "--attention-dropout", "0"]
    output = tool(*FROM, CHAR, "--output", tmp_path / "b", *given)[1]
    assert output.endswith("this is assumed: --embedding-dropout 0.0\n")
    assert "note: --span-normalization window: that code normalizes over a layer's window, " in output
    given += ["--embedding-dropout", "0.1", "--span-normalization", "window"]
    assert "note" not in tool(*FROM, CHAR, "--output", tmp_path / "c", *given)[1]


def test_a_pipe_in_the_place_of_a_vocabulary_is_refused(tool: Tool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "v.json")
    code, _, errors = tool(*FROM, CHAR, "--output", tmp_path / "run", "--vocabulary", tmp_path / "v.json")
    assert code == 2 and "v.json: is not a regular file" in errors


@pytest.mark.parametrize("name", [*SHAPES, "adaptive_span_char", "adaptive_span_word"])
def test_there_and_back(tool: Tool, tmp_path: Path, name: str) -> None:
    path = CASES / f"{name}.pt"
    if name in SHAPES:
        torch.save(content(SHAPES[name]), path := tmp_path / "a.pt")
    code, output, errors = tool(*FROM, path, "--output", tmp_path / "run")
    assert (code, errors) == (0, "") and output.startswith(f"{tmp_path / 'run'}: step ")
    assert inspect(tmp_path / "run").intact
    code, output, errors = tool(*TO, "--load", tmp_path / "run", "--output", tmp_path / "b.pt")
    assert (code, errors) == (0, "") and output.startswith(f"{tmp_path / 'b.pt'}: step ")
    clipped = "note: the file does not say that gradients are clipped at 1.0" in output
    assert clipped == ("exp_avg" in loaded(path)["optimizer"]["state"][0])
    assert_equal(loaded(tmp_path / "b.pt"), loaded(path))


def test_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), *FROM, str(CHAR), "--output", "run", "--span-ramp=16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "run: step 120, 71,753 parameters, adagrad, null tokens\n"
        "note: --span-normalization window: that code normalizes over a layer's window, with 1e-8 added, and not over "
        "each head's span\n"
        "note: the file does not say it, and this is assumed: --span-loss 1e-06, --attention-dropout 0.0, "
        "--embedding-dropout 0.0\n"
    )
    assert os.listdir(tmp_path) == ["run"]


MODELS = {
    "plain": ModelConfig(hidden_size=32, num_layers=2, persistent_memory_size=5, max_attention_span=48, span_ramp=8),
    "tied": ModelConfig(
        hidden_size=32,
        num_layers=1,
        persistent_memory_size=0,
        max_attention_span=48,
        adaptive_cutoffs="4,10",
        untie_embeddings_and_output_weights=False,
    ),
    "transformer": ModelConfig(
        hidden_size=32,
        num_layers=1,
        persistent_memory_size=0,
        max_attention_span=48,
        variant="transformer",
        feed_forward_size=24,
        adaptive_span=False,
    ),
}


def engine_of(run: RunConfig, vocab_size: int, groups: Groups, dtype: torch.dtype = torch.float32) -> PlainEngine:
    network = Network(run.model, vocab_size, groups.tensor, FusedOps("torch"))
    initialize(network, run.training.seed)
    return PlainEngine(network, run, groups, CPU, dtype, FusedOps("torch"))


def stream(vocab_size: int, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, vocab_size, (batch, length + 1))


@pytest.mark.parametrize(("name", "optimizer"), [("plain", "adagrad"), ("tied", "adam"), ("transformer", "adam")])
def test_a_checkpoint_of_our_own_to_the_papers_code_and_back(
    tool: Tool, tmp_path: Path, name: str, optimizer: str
) -> None:
    """Trained, saved, exported and read back: the same tensors, step and settings, ready for the same scores."""
    run = RunConfig(
        model=MODELS[name],
        optimizer=OptimizerConfig(optimizer=optimizer, lr_warmup_iters=10, clip_grad=0.5),
        training=TrainingConfig(seq_length=12, global_batch_size=3),
    )
    engine, tokens = engine_of(run, 17, single_process_groups()), stream(17, 3, 24)
    for step in (1, 2):
        block = tokens[:, 12 * (step - 1) : 12 * step + 1]
        engine.train_step(block[:, :-1], block[:, 1:], step, 1e-3 * step / 10, engine.spans())
    null = NullTokenizer(17)
    state = {"config": run.to_dict(), "vocab_size": 17, "tokens": 72}
    state |= {"tokenizer": null.to_json(), "tokenizer_sha256": null.fingerprint}
    save.save(tmp_path / "ours", 2, engine, state)
    assert tool(*TO, "--load", tmp_path / "ours", "--output", tmp_path / "a.pt")[0] == 0
    exported = loaded(tmp_path / "a.pt")
    assert (exported["scheduler_iter"], exported["iter_no"], exported["logger"]) == (2, 0, {})
    assert exported["optimizer"]["param_groups"][0]["lr"] == pytest.approx(2e-4)
    assert exported["optimizer"]["param_groups"][0]["initial_lr"] == 1e-3
    flags = ["--lr-warmup-iters", 10, "--seq-length", 12, "--global-batch-size", 3]
    if run.model.adaptive_span:
        flags += ["--span-ramp", run.model.span_ramp, "--span-normalization", run.model.span_normalization]
    flags += ["--clip-grad", 0.5] if optimizer == "adam" else []
    assert tool(*FROM, tmp_path / "a.pt", "--output", tmp_path / "back", *flags)[0] == 0
    ours, back = read_run(tmp_path / "ours"), read_run(tmp_path / "back")
    for prefix in ("weights", "optimizer"):
        expected = dict(sorted(read_tensors(ours.step_folder, prefix)))
        assert_equal(dict(sorted(read_tensors(back.step_folder, prefix))), expected)
        assert expected
    assert back.run == run
    assert (back.state["step"], back.state["tokens"], back.state["data"]) == (2, 72, None)


def _score(rank: int, world_size: int, run_folder: str, tokens: list[int], block: int) -> float:
    groups = groups_of(world_size, 1)
    network = load_model(Path(run_folder), groups, CPU, torch.float64).network
    return score(network, groups, np.array(tokens), num_streams=1, block_length=block, device=CPU).mean_nats


@pytest.mark.parametrize("path", [CHAR, WORD], ids=["char", "word"])
def test_a_converted_run_scores_what_the_papers_code_does(
    tool: Tool, tmp_path: Path, pools: WorkerPools, path: Path
) -> None:
    beside = json.loads(path.with_suffix(".json").read_bytes())
    unsaid = ("--span-ramp", 16, "--span-loss", 0, "--attention-dropout", 0, "--embedding-dropout", 0)
    vocabulary = ("--vocabulary", path.with_suffix(".json"))
    code, output, _ = tool(*FROM, path, "--output", tmp_path / "run", *vocabulary, *unsaid)
    assert code == 0 and output.splitlines()[0].endswith(f", {'char' if path == CHAR else 'word'} tokens")
    found = pools(2).run(_score, str(tmp_path / "run"), beside["tokens"], beside["block"])
    assert found == [pytest.approx(beside["mean_nll"], rel=5e-7)] * 2


@pytest.mark.parametrize(("path", "between"), [(CHAR, ""), (WORD, " ")], ids=["char", "word"])
def test_from_text_to_the_papers_numbers(tool: Tool, tmp_path: Path, path: Path, between: str) -> None:
    """Text prepared with the checkpoint's vocabulary and evaluated: exactly, and by that code's own protocol."""
    beside = json.loads(path.with_suffix(".json").read_bytes())
    written = {"<eos>": "\n"} | ({"_": " "} if path == CHAR else {})
    tokens = [beside["vocabulary"][token] for token in beside["tokens"]]
    (tmp_path / "text").write_text(between.join(written.get(token, token) for token in tokens))
    flags = ("--vocabulary", path.with_suffix(".json"), "--span-ramp", 16, "--seq-length", beside["block"])
    assert tool(*FROM, path, "--output", tmp_path / "run", *flags)[0] == 0
    prepare, evaluate = (
        runpy.run_path(str(ROOT / f"tools/{name}.py"))["main"] for name in ("prepare_data", "evaluate")
    )
    state, data = next((tmp_path / "run").rglob("state.json")), str(tmp_path / "P")
    kind = ("char" if path == CHAR else "word", "--tokenizer-model", str(state), "--split", "0,0,1")
    assert prepare([*kind, "--input", str(tmp_path / "text"), "--output-prefix", data]) == 0
    where = ("--load", str(tmp_path / "run"), "--data-path", data, "--split-name", "test")
    assert evaluate([*where, "--float64", "--json", str(tmp_path / "card.json")]) == 0
    card = json.loads((tmp_path / "card.json").read_bytes())
    assert card["nats_per_token"] == pytest.approx(beside["mean_nll"], rel=5e-7)
    assert card["code_protocol"]["nats_per_token"] == pytest.approx(beside["code_protocol"]["batch_8"], rel=5e-7)


@pytest.mark.parametrize("kind", ["byte", "char", "word"])
def test_the_vocabulary_may_be_that_of_prepared_data_or_of_a_run(tool: Tool, tmp_path: Path, kind: str) -> None:
    """A model of a kind's text comes back with its tokenizer, newline rule included, and scores that text."""
    prepare, evaluate = (
        runpy.run_path(str(ROOT / f"tools/{name}.py"))["main"] for name in ("prepare_data", "evaluate")
    )
    (tmp_path / "text").write_text("a_b c\n\nb a_c\n" * 60)
    data = tmp_path / "P"
    flags = [kind, "--input", str(tmp_path / "text"), "--output-prefix", str(data), "--newline", "eos"]
    assert prepare([*flags, *(["--compact-vocabulary"] if kind == "byte" else [])]) == 0
    described = json.loads(Path(f"{data}.json").read_bytes())
    torch.save(content(replace(SHAPES["plain"], vocabulary=described["vocabulary_size"])), tmp_path / "a.pt")
    vocabulary = Path(f"{data}.json")
    for name in ("one", "two"):
        assert tool(*FROM, tmp_path / "a.pt", "--output", tmp_path / name, "--vocabulary", vocabulary)[0] == 0
        vocabulary = next((tmp_path / name).rglob("state.json"))
        assert json.loads(vocabulary.read_bytes())["tokenizer"] == described["tokenizer"]
        card = tmp_path / f"{name}.json"
        assert evaluate(["--load", str(tmp_path / name), "--data-path", str(data), "--json", str(card)]) == 0
        assert json.loads(card.read_bytes())["data"]["tokenizer"]["is_the_checkpoints"] is True
    code, _, errors = tool(*FROM, CHAR, "--output", tmp_path / "no", "--vocabulary", f"{data}.json")
    rule = f"has a vocabulary of {described['vocabulary_size']} tokens, the checkpoint one of 61"
    assert (code, errors.startswith(f"error: file {data}.json: {rule};")) == (2, True)
    code, _, errors = tool(
        *FROM, tmp_path / "a.pt", "--output", tmp_path / "no", "--vocabulary", vocabulary, "--span-ramp=7"
    )
    assert (code, "says 32; give --span-ramp 32" in errors) == (2, True)


def token_file(prefix: Path, tokens: np.ndarray) -> None:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_sequence(tokens.astype(np.uint16))
        writer.end_document()


def test_training_goes_on_from_the_converted_state_and_step(tool: Tool, tmp_path: Path, template: Template) -> None:
    """pretrain.py (DeepSpeed), at either layout, makes the steps that the plain engine makes from the .pt file."""
    text = np.tile(json.loads(CHAR.with_suffix(".json").read_bytes())["tokens"], 2)
    token_file(tmp_path / "text", text)
    flags = ["--span-ramp", "16", "--seq-length", "32", "--global_batch_size", "4"]
    assert tool(*FROM, CHAR, "--output", tmp_path / "run", *flags)[0] == 0
    model = [
        "--num-layers",
        "3",
        "--hidden-size",
        "64",
        "--persistent-memory-size",
        "32",
        "--max-attention-span",
        "128",
        "--span-normalization",
        "window",  # what that code computes
    ]
    optimizer = ["--optimizer", "adagrad", "--lr", "0.07", "--clip-grad", "0.03", "--train-iters", "123"]
    data = ["--data-path", "text", "--tokenizer-type", "null", "--vocab-size", "61", "--split", "1,0,0"]
    losses = {}
    for ranks in (1, 2):
        layout = ["--load", "run", "--save", f"tp{ranks}", "--tensor-model-parallel-size", str(ranks)]
        arguments = [*layout, *flags, *model, *optimizer, *data]
        done = run_ranks(ranks, *arguments, folder=tmp_path, template=template)
        assert [one.returncode for one in done] == [0] * ranks, done[0].output
        assert "it was converted" in done[0].output
        assert "the checkpoint does not say what its ids mean" in done[0].output
        records = [json.loads(line) for line in (tmp_path / f"tp{ranks}/metrics.jsonl").read_text().splitlines()]
        losses[ranks] = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    expected = continued(text, with_state=True)
    assert losses[1] == pytest.approx(expected, rel=1e-5) and losses[2] == pytest.approx(expected, rel=1e-5)
    without = continued(text, with_state=False)
    assert without[121] == expected[121] and abs(without[122] / expected[122] - 1) > 1e-3
    assert tool(*TO, "--load", tmp_path / "tp2", "--output", tmp_path / "b.pt")[0] == 0
    exported, original = adaptive_span.read(tmp_path / "b.pt"), adaptive_span.read(CHAR)
    assert (exported.step, exported.model.shape, exported.optimizer) == (123, original.model.shape, original.optimizer)
    assert all((exported.state[name] >= tensor).all() for name, tensor in original.state.items())  # sums only grow


def continued(text: np.ndarray, *, with_state: bool) -> dict[int, float]:
    """Losses of steps 121 to 123 of the plain engine, from the tensors of the .pt file."""
    found = adaptive_span.read(CHAR)
    chosen = RunConfig(model=ModelConfig(span_ramp=16), training=TrainingConfig(seq_length=32, global_batch_size=4))
    run = adaptive_span.configure(CHAR, found, chosen, frozenset())
    engine = engine_of(run, 61, single_process_groups())
    engine.load(found.model.weights.__getitem__, found.state.__getitem__ if with_state else None)
    streams, losses = text[: len(text) // 4 * 4].reshape(4, -1), {}
    for step in (121, 122, 123):
        block = streams[:, 32 * (step - 121) : 32 * (step - 120) + 1]
        losses[step] = engine.train_step(block[:, :-1], block[:, 1:], step, 0.07, engine.spans()).loss
    return losses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "run"), "one of the arguments --from --to is required; see --help"),
        ((*FROM, "a.pt"), "the following arguments are required: --output; see --help"),
        ((*FROM, "--output", "run"), "--from adaptive-span: FILE is missing; see --help"),
        ((*TO, "--output", "a.pt"), "--to adaptive-span: --load RUN is missing; see --help"),
        (
            (*TO, "--load", "run", "--output", "a.pt", "--span-ramp", "3"),
            "--to adaptive-span: --span-ramp has no effect",
        ),
        (
            (*TO, "--load", "run", "--output", "a.pt", "--vocabulary", "v"),
            "--to adaptive-span: --vocabulary has no eff",
        ),
        ((*TO, "--load", "run", "--output", "a.pt", "x.pt"), "--to adaptive-span: FILE has no effect"),
        ((*FROM, "a.pt", "--load", "run", "--output", "b"), "--from adaptive-span: --load RUN has no effect"),
        (("--from", "tensorflow", "a.pt", "--output", "run"), "argument --from: invalid choice: 'tensorflow'"),
        ((*FROM, "a.pt", "--output", "run", "--data-path", "P"), "flag --data-path: is unknown; "),
        (
            (*FROM, "a.pt", "--output", "run", "--span-ramp", "8", "--span-ramp", "9"),
            "flag --span-ramp: is given twice; give it once",
        ),
        (
            (*FROM, "a.pt", "--output", "run", "--span-ramp", "x"),
            "--span-ramp x: must be an integer; the default is 32",
        ),
        ((*FROM, "a.pt", "--output", "run", "--recipe", "x"), "--recipe x: unknown recipe; "),
        ((*FROM, "a.pt", "--output", "run"), "file a.pt: is not there; give a file that torch.save wrote"),
        ((*FROM, CHAR, "--output", "."), "--output .: exists already; name another one or remove it"),
        ((*FROM, CHAR, "--output", "no/run"), "--output no/run: there is no folder "),
        ((*FROM, CHAR, "--output", "run", "--num-layers", "4"), "--num-layers 4: "),
        ((*FROM, CHAR, "--output", "run", "--recipe", "enwik8-small"), "--num-layers 18: "),
        ((*FROM, CHAR, "--output", "run", "--optimizer", "adam"), "--optimizer adam: "),
        ((*FROM, CHAR, "--output", "run", "--no-adaptive-span"), "--adaptive-span False: "),
        (
            (*FROM, CHAR, "--output", "run", "--adam-beta1", "0.9"),
            "--adam-beta1 0.9: has no effect with --optimizer ad",
        ),
        ((*FROM, CHAR, "--output", "run", "--vocabulary", "none.json"), "file none.json: cannot be read (No such file"),
        (
            (*FROM, CHAR, "--output", "run", "--vocabulary", CHAR.with_suffix(".json")),
            f"--span-ramp 32: {CHAR.with_suffix('.json')} says 16; give --span-ramp 16",
        ),
        (
            (*FROM, CHAR, "--output", "run", "--vocabulary", WORD.with_suffix(".json")),
            f"file {WORD.with_suffix('.json')}: has a vocabulary of 4716 tokens, the checkpoint one of 61; give",
        ),
        ((*TO, "--load", "none", "--output", "a.pt"), "none: no checkpoint to load: there is no folder none/checkp"),
    ],
)
def test_a_mistake_is_one_line(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, errors = tool(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {message}") and errors.count("\n") == 1, errors
    assert os.listdir(tmp_path) == []


def test_nothing_of_a_malicious_file_runs(tool: Tool, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'canary'}",)

    saved = content(SHAPES["plain"])
    torch.save(saved | {"logger": Touch()}, tmp_path / "a.pt")
    code, _, errors = tool(*FROM, tmp_path / "a.pt", "--output", tmp_path / "run")
    assert code == 2 and "would call posix.system when loaded; it was refused" in errors
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_damaged_checkpoint_is_not_exported(tool: Tool, tmp_path: Path) -> None:
    assert tool(*FROM, CHAR, "--output", tmp_path / "run")[0] == 0
    weights = next((tmp_path / "run").rglob("weights-00001.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, errors = tool(*TO, "--load", tmp_path / "run", "--output", tmp_path / "b.pt")
    assert code == 2 and "weights-00001.safetensors: damaged" in errors and errors.count("\n") == 1
    assert os.listdir(tmp_path) == ["run"]


def test_what_another_normalization_changes_is_measured(tool: Tool, tmp_path: Path) -> None:
    """A head that sees little of what it would like to look at: there the 1e-8 of the paper's code counts."""
    saved = saved_run(tmp_path / "run", replace(MODELS["plain"], span_normalization="span"), optimizer="adagrad")
    output = tool(*TO, "--load", tmp_path / "run", "--output", tmp_path / "a.pt")[1]
    (told,) = re.findall(
        r"not over each head's span: of 512 tokens, ids in order, log-probabilities differ by (\S+) at", output
    )
    back = ("--output", tmp_path / "back", "--span-ramp", "8", "--lr-warmup-iters", "0")
    assert tool(*FROM, tmp_path / "a.pt", *back)[0] == 0
    ids = torch.arange(512)[None] % saved.state["vocab_size"]
    own, theirs = (log_probabilities(one, ids) for one in (saved, read_run(tmp_path / "back")))
    apart = (own - theirs).abs().amax((0, 2))
    assert float(told) == pytest.approx(apart.max().item(), rel=0.05)
    assert apart[:24].max() < apart.max()  # the text is longer than a head looks back
    output = tool(*TO, "--load", tmp_path / "run", "--output", tmp_path / "b.pt", "--no-compare-logits")[1]
    assert "and not over each head's span\n" in output


def test_a_name_that_is_no_text_is_refused(tool: Tool, tmp_path: Path) -> None:
    code, _, errors = tool(*FROM, CHAR, "--output", os.fsdecode(os.fsencode(tmp_path) + b"/a\xff"))
    assert code == 2 and errors.endswith("/a\\udcff: is not UTF-8; rename what it names\n")
    assert not list(tmp_path.iterdir())
