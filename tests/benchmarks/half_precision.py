"""bfloat16 beside float32, in equal steps: mean training loss of the last 50 of 300 steps, by seed.

    python tests/benchmarks/half_precision.py --data-path P --output FOLDER [--seeds 1 2 3] [--train-iters 300]

All else is the same: data, order, dropout, optimizer. Runs that FOLDER holds already, finished, are not repeated. The
table is printed as Markdown; the commands go to standard error.
"""

import argparse
import statistics

from trained import comparison_flags, records_of

LAST = 50
FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --persistent-memory-size 256 --max-attention-span 256 "
    "--attention-dropout 0.1 --span-loss 1e-7 --optimizer adam --lr 3e-3 --lr-decay-style cosine --min-lr 1e-4 "
    "--lr-warmup-iters 30 --seq-length 64 --global-batch-size 16 --log-interval 1 --eval-interval 100000"
)
PRECISIONS = {"float32": "", "bfloat16": "--bf16"}


def train(precision: str, seed: int, options: argparse.Namespace) -> float:
    """The mean of a run's last losses."""
    flags = f"--data-path {options.data_path} {FLAGS} {PRECISIONS[precision]} --train-iters {options.train_iters}"
    records = records_of(options.output / f"{precision}-{seed}", f"{flags} --seed {seed}")
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    return statistics.fmean(losses[-LAST:])


def main() -> None:
    options = comparison_flags(__doc__, train_iters=300).parse_args()
    print("| seed | float32 | bfloat16 | difference |\n|---|---|---|---|")
    for seed in options.seeds:
        full, half = (train(precision, seed, options) for precision in PRECISIONS)
        print(f"| {seed} | {full:.4f} | {half:.4f} | {100 * (half / full - 1):+.2f} % |", flush=True)


if __name__ == "__main__":
    main()
