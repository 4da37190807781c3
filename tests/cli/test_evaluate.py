"""tools/evaluate.py: one value under every launcher, precision and batch; mistakes in one line; no DeepSpeed."""

import json
import math
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.config import DataConfig, ParallelConfig, UsageError
from megatron_allattn.data.dataset import open_dataset
from megatron_allattn.inference import evaluation
from megatron_allattn.inference.evaluation import EvaluationOptions
from megatron_allattn.inference.evaluation import evaluate as score_split
from megatron_allattn.parallel.groups import single_process_groups
from tests.support.commands import ROOT, Finished, corpus, free_port, run
from tests.support.dense import dense_network, reach_of
from tests.support.layouts import rest
from tests.support.runs import BLOCK, SMALL, untrained_run

TOOL = str(ROOT / "tools/evaluate.py")
# runs the tool as a program, then tells which of these packages it had loaded by its end
WATCHED = """
import atexit, runpy, sys
sys.argv = sys.argv[1:]
names = ("torch", "deepspeed", "tyro", "mpi4py", "sentencepiece")
atexit.register(lambda: print("loaded", [name for name in names if name in sys.modules]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
Card = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`: a checkpoint of byte-level data; `byte1` its data and `byte2` other data of the same kind."""
    found = tmp_path_factory.mktemp("evaluate")
    untrained_run(found / "run", corpus(found, split="6,2,2"))
    corpus(found, seed=2, num_words=500)
    return found


@pytest.fixture(scope="module")
def exact(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Nats of the valid split's predictions, from the dense reference."""
    weights = untrained_run(tmp_path_factory.mktemp("again") / "run", folder / "byte1")
    tokens = torch.from_numpy(split(folder / "byte1", "valid"))
    return dense_network(weights, SMALL, tokens)[0].numpy()


def split(prefix: Path, name: str) -> np.ndarray:
    return getattr(open_dataset(DataConfig(data_path=str(prefix))), name).astype(np.int64)


def evaluate(folder: Path, *flags: str, launcher: tuple[str, ...] = (sys.executable,)) -> tuple[Finished, Card]:
    """Run it on `run` in `folder`, as JSON too."""
    file = folder / "card.json"
    file.unlink(missing_ok=True)
    done = run(*launcher, TOOL, "--load", "run", "--json", "card.json", *flags, folder=folder)
    assert done.returncode == 0, done.output
    assert done.left == []
    return done, json.loads(file.read_text())


def main(*argv: str) -> int:
    """The tool in this process."""
    return runpy.run_path(TOOL)["main"](list(argv))


@pytest.fixture
def card_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Card]:
    """The card that it writes with these flags in this process."""

    def card(*flags: str) -> Card:
        monkeypatch.chdir(folder)
        assert main("--load", "run", "--json", "card.json", *flags) == 0
        return json.loads(Path("card.json").read_text())

    return card


def test_a_single_process(folder: Path, exact: np.ndarray) -> None:
    done, card = evaluate(folder, "--float64", launcher=(sys.executable, "-c", WATCHED))
    *text, loaded = done.stdout.splitlines()
    assert done.stderr == ""
    assert loaded == "loaded ['torch']"
    assert card["predictions"] == len(exact) == card["tokens"] - 1
    assert card["nats_per_token"] == pytest.approx(exact.mean(), rel=1e-12)
    assert card["total_nats"] == pytest.approx(exact.sum(), rel=1e-12)
    assert card["bits_per_byte"] == pytest.approx(exact.mean() / math.log(2), rel=1e-12)
    assert card["checkpoint"]["step"] == 7
    assert card["settings"] == {
        "precision": "float64",
        "device": "cpu",
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "attention_backend": "cached",
        "block_length": BLOCK,
        "overlap": True,
    }
    assert [line.split("  ")[0] for line in text] == [
        "checkpoint", "data", "computed", "scored", "loss", "bits", "perplexity", "context", "paper's code",
    ]  # fmt: skip
    assert f"{card['nats_per_token']:.6f} nats" in done.stdout


def test_the_codes_protocol_is_that_of_eight_separate_texts(
    folder: Path, exact: np.ndarray, card_of: Callable[..., Card]
) -> None:
    weights = untrained_run(folder / "same", folder / "byte1")
    tokens = split(folder / "byte1", "valid")
    size = len(tokens) // 8
    blocks = (size - 1) // BLOCK
    streams = [torch.from_numpy(tokens[start : start + blocks * BLOCK + 1]) for start in range(0, 8 * size, size)]
    expected = np.mean([dense_network(weights, SMALL, stream)[0].numpy() for stream in streams])
    card = card_of("--float64", "--batch_size=3", "--seq_length=50", "--no-overlap")
    code = card["code_protocol"]
    assert code["nats_per_token"] == pytest.approx(expected, rel=1e-12)
    assert code["bpc"] == pytest.approx(expected / math.log(2), rel=1e-12)
    assert (code["num_streams"], code["block_length"], code["predictions"]) == (8, BLOCK, 8 * blocks * BLOCK)
    reach = sum(reach_of(weights, SMALL, layer) for layer in range(2))
    assert card["context"] == {
        "full": reach,
        "predictions_with_less": 2 * reach,
        "num_streams": 3,
        "before_the_split": "attend",
    }
    assert card["nats_per_token"] != pytest.approx(exact.mean(), rel=1e-9)


@pytest.mark.parametrize("launcher", ["torchrun", *rest("mpirun")])
def test_two_processes(folder: Path, exact: np.ndarray, launcher: str) -> None:
    port = str(free_port())
    sizes = {"torchrun": (1, 2), "mpirun": (2, 1)}[launcher]
    if launcher == "mpirun":
        pytest.importorskip("mpi4py", reason="ranks under mpirun are found through mpi4py")
    commands = {
        "torchrun": ("torchrun", "--nproc-per-node", "2", "--master-port", port),
        "mpirun": ("mpirun", "-n", "2", sys.executable),
    }
    flags = ("--tensor-model-parallel-size", str(sizes[0]), "--no-code-protocol", "--batch-size", "3")
    done, card = evaluate(folder, *flags, launcher=commands[launcher])
    assert done.stdout.count("checkpoint ") == done.stdout.count("paper's code  not computed (--no-code-protocol)") == 1
    assert (card["settings"]["tensor_parallel_size"], card["settings"]["data_parallel_size"]) == sizes
    assert card["nats_per_token"] == pytest.approx(exact.mean(), abs=1e-6, rel=0)
    assert card["code_protocol"] == {"missing": "not computed (--no-code-protocol)"}


def test_a_backend_of_training_gives_the_same_value(exact: np.ndarray, card_of: Callable[..., Card]) -> None:
    card = card_of("--float64", "--attention-backend", "blocked", "--no-code-protocol")
    assert card["nats_per_token"] == pytest.approx(exact.mean(), rel=1e-12)
    assert card["settings"]["attention_backend"] == "blocked"


def test_other_data_of_the_same_tokenizer(folder: Path, card_of: Callable[..., Card]) -> None:
    card = card_of("--data-path", "byte2", "--split-name", "test", "--bf16")
    tokens = split(folder / "byte2", "test")
    assert (card["tokens"], card["predictions"]) == (len(tokens), len(tokens) - 1)
    assert card["data"]["split"] == "test"
    assert card["settings"]["precision"] == "bfloat16"
    assert "no block of 32 in each of 8 streams" in card["code_protocol"]["missing"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "error: the following arguments are required: --load; see --help"),
        (["--load"], "error: argument --load: expected one argument; see --help"),
        (["--load", "R", "--load=S"], "error: flag --load: is given twice; give it once"),
        (["--load", "R", "--splitname", "test"], "error: flag --splitname: is unknown; did you mean --split-name?"),
        (["--load", "R", "--tokenizer-type", "bpe"], "error: --tokenizer-type bpe: must be one of byte, char, word"),
        (["--load", "R", "--zoom"], "error: flag --zoom: is unknown; see --help"),
        (["--load", "R", "extra"], "error: unrecognized arguments: extra; see --help"),
        (["--load", "R", "--batch-size", "0"], "error: argument --batch-size: '0': must be an integer from 1 to"),
        (["--load", "R", "--batch-size", "-8"], "error: argument --batch-size: '-8': must be an integer from 1 to"),
        (["--load", "R", "--seq-length=1e3"], "error: argument --seq-length: '1e3': must be an integer from 1 to"),
        (["--load", "R", "--split-name", "dev"], "error: argument --split-name: invalid choice: 'dev'"),
        (
            ["--local_rank=1", "--load", "R", "--bf16", "--float64"],
            "error: --bf16 --float64: there is one precision",
        ),
        (["--load", "R", "--no-overlap=1"], "error: argument --no-overlap: ignored explicit argument '1'; see --help"),
        (["--load", "R", "--distributed-timeout-minutes", "0"], "error: --distributed-timeout-minutes 0.0: must be"),
    ],
)
def test_a_bad_flag_is_one_line(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(line) and captured.err.count("\n") == 1, captured.err


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"load": Path("nowhere")}, "nowhere: no checkpoint to load: there is no folder nowhere/checkpoints"),
        ({"json": Path("no/card.json")}, "--json no/card.json: the folder no does not exist"),
        ({"json": Path("run")}, "--json run: is a folder; name a file in a folder that exists"),
        ({"data": {"data_path": "byte9"}}, "--data-path byte9: neither byte9.json nor byte9.bin exists"),
        (
            {"data": {"data_path": "char3"}},
            r"--data-path char3: its vocabulary size is \d+, run/.*/step_00000007 was trained with 256",
        ),
        (
            {"data": {"data_path": "byte4"}, "split_name": "test"},
            r"--split-name test: it has 0 token\(s\), scoring needs at least 2",
        ),
        (
            {"batch_size": 100_000},
            "--batch-size 100000: the valid split has 2,940 predictions, and every stream needs one; give at most 2940",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(
    folder: Path, changes: dict, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if not (folder / "char3.json").exists():
        corpus(folder, seed=3, num_words=500, tokenizer="char")
        corpus(folder, seed=4, num_words=500, split="1,1,0")
    options = EvaluationOptions(
        load=Path("run"),
        data={},
        split_name="valid",
        batch_size=None,
        seq_length=None,
        parallel=ParallelConfig(),
        overlap=True,
        code_protocol=True,
        precision="float32",
        attention_backend="cached",
        json=None,
    )
    with pytest.raises(UsageError, match=line):
        score_split(replace(options, **changes), single_process_groups(), torch.device("cpu"))


def test_too_few_processes_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main("--load", "run", "--tensor-model-parallel-size", "2") == 2
    line = "error: --tensor-model-parallel-size 2: 1 process does not form a replica of 2 processes; start 2 processes"
    assert capsys.readouterr().err.startswith(line)


def test_a_card_that_cannot_be_written_has_been_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, card: Card) -> None:
        raise StorageError(f"{path}: no space")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(evaluation, "write_json_atomic", full)
    assert main("--load", "run", "--json", "late.json") == 1
    shown = capsys.readouterr()
    assert "perplexity" in shown.out and "late.json: no space" in shown.err, shown
    assert not (folder / "late.json").exists()
