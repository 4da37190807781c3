"""`pretrain.py --dry-run`: what a user sees of a job that would run, and one line for one that would not."""

import re
from pathlib import Path

import pytest

import pretrain
from tests.support.template import ROOT

LAYOUT = ["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "4", "--micro-batch-size", "16"]
TINY = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --persistent-memory-size 16 --max-attention-span 64
--seq-length 16 --global-batch-size 32 --micro-batch-size 2 --tensor-model-parallel-size 4
--pipeline-model-parallel-size 4 --vocab-size 101"""

REFUSED = {
    "mismatched micro-batches": (
        64,
        [*LAYOUT[:4], "--micro-batch-size", "128"],
        r"--global-batch-size 256: must be a multiple of 512 \(4 data-parallel replicas × --micro-batch-size 128\); "
        r"the next one is 512",
    ),
    "micro-batches that do not divide the batch": (
        64,
        [*LAYOUT[:4], "--micro-batch-size", "6"],
        r"--global-batch-size 256: must be a multiple of --micro-batch-size 6; change one of the two",
    ),
    "indivisible heads": (
        64,
        ["--tensor-model-parallel-size", "32"],
        r"--tensor-model-parallel-size 32: must divide --num-attention-heads 16; possible are 1, 2, 4, 8, 16",
    ),
    "PP with ZeRO 2": (
        64,
        [*LAYOUT, "--zero-stage", "2"],
        r"--pipeline-model-parallel-size 4: ZeRO 2 cuts gradients, which a pipeline keeps whole while micro-batches "
        r"pass; give --zero-stage 1 \(or 0\), or leave the pipeline and keep the stage",
    ),
    "more stages than layers": (
        64,
        ["--pipeline-model-parallel-size", "32"],
        r"--pipeline-model-parallel-size 32: every stage needs a layer, and --num-layers is 24; give at most 24",
    ),
    "too many ranks for the batch": (
        512,
        [],
        r"--global-batch-size 256: must be a multiple of 512 \(512 data-parallel replicas\); the next one is 512",
    ),
    "ranks that form no replicas": (
        60,
        LAYOUT,
        r"--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4: 60 processes do not form replicas of 16; .*",
    ),
    "caches larger than the memory": (
        64,
        ["--no-adaptive-span", "--global-batch-size", "16384", "--micro-batch-size", "1", "--gpu", "h100-80"],
        r"--gpu h100-80: rank 0 \(data 0\) needs 103\.1 GB for caches alone, h100-80 has 80\.0 GB; give a smaller "
        r"--global-batch-size or --max-attention-span, start more processes, or share caches by "
        r"--tensor-model-parallel-size and --shard-caches",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_that_would_fail_is_refused_with_the_reason(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    world_size, flags, message = REFUSED[name]
    argv = ["--recipe", "allattn-1.3b", "--dry-run", "--world-size", str(world_size), *flags]
    assert pretrain.main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(f"error: {message}\n", output.err), output.err


def test_a_job_of_64_ranks_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = tmp_path / "run"
    argv = ["--dry-run", "--world-size", "64", "--gpus-per-node", "8", "--gpu", "h100-80", "--save", str(run_folder)]
    assert pretrain.main([*TINY.split(), *argv]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert output.err == "" and not run_folder.exists()
    assert lines[0].endswith("vocabulary 101 (--vocab-size); 64 ranks: tensor 4 × pipeline 4 × data 4, ZeRO 1")
    assert lines[1] == "nodes: 8 of 8 GPUs; tensor groups within a node, data and pipeline groups over several"
    assert lines[2] == "built: 16 ranks, each the same in 4 replicas"
    assert re.match(r"owned: 40 weights of [\d,]+ elements: ", lines[3])
    assert lines[4] == "run: the first and the last of 4 micro-batches of every rank built"
    assert re.match(r"met: 64 ranks, [\d,]+ collectives and [\d,]+ messages between stages in 97 groups: ", lines[5])
    header, *rows = (line.split() for line in lines[7:12])
    assert header[:5] == ["stage", "layers", "rank", "weights", "gradients"]
    assert [row[1] for row in rows] == ["0-0", "1-1", "2-2", "3-3"]
    assert lines[12].startswith("largest: rank ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dry-run"], "--dry-run: needs to know how many processes the job has; add --world-size N"),
        (["--world-size", "8"], "--world-size 8: has no effect without --dry-run: a launcher says how many"),
        (["--gpu", "h100-80"], "--gpu h100-80: has no effect without --dry-run"),
        (["--dry-run", "--world-size", "0"], "--world-size 0: must be at least 1"),
        (["--dry-run", "--world-size", "few"], "--world-size few: must be an integer"),
        (["--dry-run", "--world-size", "8", "--gpu", "a100"], "--gpu a100: there is no such device; did you mean"),
        (["--dry-run", "--world-size", "1"], "--dry-run: how large the vocabulary is only a recipe says"),
    ],
)
def test_flags_of_a_dry_run_are_checked(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["--recipe", "demo"] if "--gpu" in argv else []
    assert pretrain.main([*recipe, *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/dry_run.md").read_text()
    shown = [block.partition("```")[0] for block in page.split("```text\n")[1:]]
    job = ["--recipe", "allattn-1.3b", "--dry-run", "--world-size", "64", "--gpus-per-node", "8", "--gpu", "h100-80"]
    assert pretrain.main([*job, *LAYOUT[:4], "--micro-batch-size", "4"]) == 0
    assert capsys.readouterr().out == shown[0]
    too_much = ["--no-adaptive-span", "--global-batch-size", "16384", "--micro-batch-size", "1"]
    assert pretrain.main([*job, *too_much]) == 2
    assert capsys.readouterr().err == shown[1]
