"""`python pretrain.py` as a user meets it before anything is trained: help, recipes, and one line for a mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_allattn.config import RECIPES

ROOT = Path(__file__).resolve().parents[2]

RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}

DOCUMENTED = """
--num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size --global-batch-size
--train-iters --optimizer --lr --lr-decay-style --lr-warmup-iters --clip-grad --weight-decay --adam-beta1
--adam-beta2 --adam-eps --attention-dropout --embedding-dropout --bf16 --fp16 --tensor-model-parallel-size
--pipeline-model-parallel-size --zero-stage --deepspeed-config --data-path --split --tokenizer-type
--tokenizer-model --save --load --save-interval --log-interval --eval-interval --eval-iters --seed
--tensorboard-dir --wandb-project --recipe --persistent-memory-size --max-attention-span --adaptive-span
--span-loss --span-ramp --span-normalization --position-values --empty-cache --fused --attention-backend
"""

# runs pretrain.py as a program, then tells which heavy packages it had loaded by its end
WATCHED = """
import atexit, runpy, sys
sys.argv = sys.argv[1:]
heavy = ("torch", "numpy", "deepspeed")
atexit.register(lambda: print("loaded", [name for name in heavy if name in sys.modules], file=sys.stderr))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A fresh Python in the repository's root, without variables that launchers or CI set."""
    kept = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=kept | (environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("argv", "exit_code", "beginning"),
    [
        (["--help"], 0, "usage: pretrain.py"),
        (["--recipe", "enwik8-small", "-h"], 0, "usage: pretrain.py"),
        (["--recipe", "list"], 0, "recipe "),
        (["--num-layer", "2"], 2, ""),
    ],
)
def test_help_and_mistakes_are_answered_before_anything_heavy_is_imported(
    argv: list[str], exit_code: int, beginning: str
) -> None:
    done = run("-c", WATCHED, "pretrain.py", *argv)
    assert done.stdout.startswith(beginning)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (exit_code, "loaded []")


def test_help_names_every_flag_of_the_documented_interface() -> None:
    text = run("pretrain.py", "--help").stdout
    words = set(text.replace(",", " ").split())
    assert [name for name in DOCUMENTED.split() if name not in words] == []


def test_recipe_list_is_a_table_of_names_and_descriptions() -> None:
    header, *lines = run("pretrain.py", "--recipe", "list").stdout.splitlines()
    assert header.startswith("recipe ")
    assert [line.split()[0] for line in lines] == list(RECIPES)
    numbers = ["38.5M", "49", "%", "32,768", "8"]
    assert lines[1].split(maxsplit=6)[1:] == [*numbers, RECIPES["enwik8-small"].about]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--presistent-memory-size", "8"],
            "--presistent-memory-size: unknown flag; did you mean --persistent-memory-",
        ),
        (["--recipe", "enwik9-small"], "--recipe enwik9-small: unknown recipe; did you mean enwik8-small?"),
        (["--lr", "fast"], "--lr fast: must be a number; the default is 0.001"),
        (
            ["--hidden-size", "130"],
            "--hidden-size 130: must be a multiple of --num-attention-heads 4; the next one is 1",
        ),
        (["--ffn-hidden-size", "64"], "--ffn-hidden-size: an all-attention layer has no feed-forward sublayer"),
        (["--deepspeed_config", "absent/ds.json"], "--deepspeed-config absent/ds.json: no such file"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(argv: list[str], line: str) -> None:
    done = run("pretrain.py", *argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {line}")
    assert done.stderr.count("\n") == 1


def test_of_several_ranks_only_the_first_says_it() -> None:
    def stderr_of(rank: int) -> str:
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        done = run("pretrain.py", "--lr", "fast", environment=ranks)
        assert done.returncode == 2
        return done.stderr

    assert stderr_of(0) == "error: --lr fast: must be a number; the default is 0.001\n"
    assert stderr_of(1) == ""
