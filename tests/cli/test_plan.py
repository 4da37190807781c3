"""tools/plan.py: its table, its files, its mistakes."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_allattn.config.cli import parse
from tests.support.commands import corpus, environment
from tests.support.template import ROOT
from tests.support.tools import Tool, in_process

SMALL = ("--recipe", "demo", "--nodes", 1, "--gpus-per-node", 2)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Tool:
    return in_process(ROOT / "tools/plan.py", capsys)


def test_table_json_and_files(plan: Tool, tmp_path: Path) -> None:
    file, folder = tmp_path / "plan.json", tmp_path / "files"
    run_folder = ("--save", tmp_path / "run")
    code, out, err = plan(*SMALL, *run_folder, "--gpu", "a100-40", "--bf16", "--json", file, "--write", folder)
    assert (code, err) == (0, "")
    assert "TP×PP×DP" in out and "demo on 1 × 2 a100-40; vocabulary 256 (of the recipe demo)" in out
    found = json.loads(file.read_text())
    best = found["layouts"][0]
    assert best["refused"] is None and best["seconds"]["total"] > 0
    assert best["memory"]["total"] == sum(
        best["memory"][part] for part in ("weights", "gradients", "optimizer", "caches", "activations", "buffers")
    )
    assert {one["tensor_model_parallel_size"] for one in found["layouts"]} == {1, 2}

    lines = (folder / "command.sh").read_text().splitlines()
    words = shlex.split(lines[-1])
    run, _ = parse(words[words.index(str(ROOT / "pretrain.py")) + 1 :])
    assert run.parallel.tensor_model_parallel_size == best["tensor_model_parallel_size"]
    assert run.parallel.zero_stage == best["zero_stage"] and run.training.bf16
    assert run.training.micro_batch_size == best["micro_batch_size"]
    assert json.loads((folder / "deepspeed.json").read_text())["zero_optimization"]["stage"] == best["zero_stage"]
    script = folder / "job.sbatch"
    assert "--gpus-per-node=2" in script.read_text()
    for name in ("command.sh", "job.sbatch"):
        subprocess.run(["bash", "-n", folder / name], check=True)


def test_the_command_of_several_nodes_needs_their_hosts(plan: Tool, tmp_path: Path) -> None:
    """Where there is no hostfile the deepspeed launcher alone would train on one host."""
    size = ("--recipe", "demo", "--nodes", 2, "--gpus-per-node", 1, "--micro-batch-size", 4)
    code, out, err = plan(*size, "--gpu", "a100-40", "--write", tmp_path)
    assert (code, err) == (0, "") and "no job.sbatch: a job that lives again needs a run folder; add --save DIR" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["command.sh", "deepspeed.json"]
    done = subprocess.run([tmp_path / "command.sh"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "error: HOSTFILE hostfile: no such file" in done.stderr


def test_the_plot(plan: Tool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _, err = plan(*SMALL, "--gpu", "h100-80", "--bf16", "--micro-batch-size", 4, "--plot", tmp_path / "g.svg")
    assert (code, err) == (0, "")
    assert (tmp_path / "g.svg").read_text().count("<svg") == 1


def test_what_does_not_fit_is_exit_code_1(plan: Tool) -> None:
    code, out, _ = plan(
        *("--recipe", "allattn-13b", "--gpus-per-node", 1, "--gpu", "v100-32", "--zero-stage", 0),
        *("--micro-batch-size", 128, "--span-profile", "fresh"),
    )
    assert code == 1
    assert "GB more than the 32 GB of v100-32: " in out and "optimizer" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h100"), "--gpu h100: there is no such device; did you mean h100-80?"),
        (("--node", "8"), "flag --node: is unknown; did you mean --nodes?"),
        (("--plot", "growth.txt"), "--plot growth.txt: is neither .svg nor .png"),
        (("--span-profile", "nowhere"), "--span-profile nowhere"),
        (("--layout", "0"), "--layout"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], said: str, plan: Tool) -> None:
    code, _, err = plan("--recipe", "demo", *arguments)
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_vocabulary_must_be_known(plan: Tool) -> None:
    code, _, err = plan("--num-layers", 2)
    assert code == 2 and "--recipe ''" in err


def test_the_page_shows_what_is_printed(plan: Tool) -> None:
    page = (ROOT / "docs/planning.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    layout = ("--tensor-model-parallel-size", 4, "--pipeline-model-parallel-size", 4, "--micro-batch-size", 4)
    code, out, err = plan("--recipe", "allattn-1.3b", "--nodes", 8, "--gpus-per-node", 8, "--gpu", "h100-80", *layout)
    assert (code, err) == (0, "")
    assert shown in out


def test_the_vocabulary_is_that_of_the_data_where_they_are_there(plan: Tool, tmp_path: Path) -> None:
    data = corpus(tmp_path, num_words=50)
    out = plan(*SMALL, "--gpu", "a100-40", "--data-path", data)[1]
    assert f"vocabulary 256 (of {data})" in out
    assert "vocabulary 500 (--vocab-size)" in plan(*SMALL, "--gpu", "a100-40", "--vocab-size", 500)[1]
