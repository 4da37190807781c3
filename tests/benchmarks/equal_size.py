"""All-attention beside the transformer of equal size, both with adaptive span, in equal steps: validation loss by seed.

    python tests/benchmarks/equal_size.py --data-path P --output FOLDER [--seeds 1 2 3] [--train-iters 1500] [--lr 3e-3]

The sizes relate as those of the paper's small models (18 layers with N = 2d beside 12 layers with d_f = 4d, 8 heads):
6 layers with N = 2d beside 4 layers with d_f = 4d have the same matrices, 48 d², and differ by biases and norms. All
else is the same: data, order, steps, optimizer, schedule, learning rate. Runs that FOLDER holds already, finished, are
not repeated. The table is printed as Markdown; the commands go to standard error.
"""

import argparse
import math
import statistics

from trained import comparison_flags, records_of

MODELS = {
    "all-attention": "--num-layers 6 --variant all-attn --persistent-memory-size 256",
    "transformer": "--num-layers 4 --variant transformer --persistent-memory-size 0 --feed-forward-size 512",
}
COMMON = (
    "--hidden-size 128 --num-attention-heads 8 --max-attention-span 256 --span-loss 1e-7 "
    "--optimizer adam --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 100 "
    "--seq-length 64 --global-batch-size 16 --zero-stage 0 --log-interval 100"
)


def train(model: str, seed: int, options: argparse.Namespace) -> float:
    """A run's last validation loss."""
    flags = f"--data-path {options.data_path} {MODELS[model]} {COMMON} {options.extra}"
    flags += f" --lr {options.lr} --train-iters {options.train_iters} --seed {seed}"
    records = records_of(options.output / f"{model}-{seed}", flags)
    return next(record["loss"] for record in reversed(records) if record["kind"] == "valid")


def main() -> None:
    parser = comparison_flags(__doc__, train_iters=1500)
    parser.add_argument("--lr", default="3e-3")
    parser.add_argument("--extra", default="", help="further flags for both models, in one word")
    options = parser.parse_args()
    losses = {model: [train(model, seed, options) for seed in options.seeds] for model in MODELS}
    print("| model | seed | validation, nats | bits |\n|---|---|---|---|")
    for model, results in losses.items():
        for seed, loss in zip(options.seeds, results, strict=True):
            print(f"| {model} | {seed} | {loss:.4f} | {loss / math.log(2):.4f} |")
    means = {model: statistics.mean(results) for model, results in losses.items()}
    for model, mean in means.items():
        print(f"| {model} | mean | {mean:.4f} | {mean / math.log(2):.4f} |")
    ratio = means["all-attention"] / means["transformer"]
    print(f"\nall-attention / transformer, mean validation loss: {ratio:.4f} ({100 * (ratio - 1):+.2f} %)")


if __name__ == "__main__":
    main()
