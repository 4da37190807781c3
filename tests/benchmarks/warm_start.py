"""A transformer made an all-attention model and trained on, beside the same model from scratch: losses by step.

    python tests/benchmarks/warm_start.py --data-path P --output FOLDER [--seeds 1 2 3] [--train-iters 1500] [--lr 3e-3]

The transformer is that of equal_size.py, trained for --train-iters steps; what it becomes trains for as many again, on
the same data with the same schedule as the one from scratch. Runs that FOLDER holds already, finished, are not
repeated. The table is printed as Markdown, and for every seed the first evaluation at which each is as good as the
transformer was; commands, and the loss before and after the conversion, go to standard error.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from trained import ROOT, comparison_flags, records_of

TRANSFORMER = "--variant transformer --persistent-memory-size 0 --feed-forward-size 512"
ALL_ATTENTION = "--variant all-attn --persistent-memory-size 512"
COMMON = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --max-attention-span 256 --span-loss 1e-7 "
    "--optimizer adam --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 100 "
    "--seq-length 64 --global-batch-size 16 --zero-stage 0 --log-interval 100 --eval-interval 50 --no-report"
)
Losses = dict[int, float]
"""Validation loss by step."""


def train(folder: Path, model: str, seed: int, options: argparse.Namespace, more: str = "") -> Losses:
    flags = f"--data-path {options.data_path} {model} {COMMON}"
    flags += f" --lr {options.lr} --train-iters {options.train_iters} --seed {seed}{more}"
    return {record["step"]: record["loss"] for record in records_of(folder, flags) if record["kind"] == "valid"}


def convert(transformer: Path, output: Path) -> None:
    if not output.exists():
        command = f"tools/convert_checkpoint.py --from ff-transformer {transformer} --output {output}"
        print(f"python {command}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, *command.split()], cwd=ROOT, stdout=sys.stderr, check=True)


def first_as_good(losses: Losses, goal: float) -> str:
    return next((f"{step:,}" for step, loss in losses.items() if loss <= goal), "–")


def main() -> None:
    parser = comparison_flags(__doc__, train_iters=1500)
    parser.add_argument("--lr", default="3e-3")
    options = parser.parse_args()
    goals, warm, scratch = [], [], []
    for seed in options.seeds:
        transformer, start = (options.output / f"{name}-{seed}" for name in ("transformer", "converted"))
        goals.append(list(train(transformer, TRANSFORMER, seed, options).values())[-1])
        convert(transformer, start)
        warm.append(train(options.output / f"warm-{seed}", ALL_ATTENTION, seed, options, f" --load {start}"))
        scratch.append(train(options.output / f"scratch-{seed}", ALL_ATTENTION, seed, options))
    print(f"transformer, mean of seeds: {statistics.mean(goals):.4f}\n\n| step | warm | from scratch |\n|---|---|---|")
    for step in warm[0]:
        means = (statistics.mean(losses[step] for losses in runs) for runs in (warm, scratch))
        print(f"| {step:,} | {' | '.join(f'{mean:.4f}' for mean in means)} |")
    print("\n| seed | transformer | warm, as good at step | from scratch, as good at step |\n|---|---|---|---|")
    for seed, goal, one, other in zip(options.seeds, goals, warm, scratch, strict=True):
        print(f"| {seed} | {goal:.4f} | {first_as_good(one, goal)} | {first_as_good(other, goal)} |")


if __name__ == "__main__":
    main()
