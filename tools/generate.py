"""Write on from a prompt with a trained model. Exit code 0: done, 2: wrong usage, 1: anything else.

    python tools/generate.py --load RUN --prompt "In the beginning" --temperature 0.8 --top-p 0.95
    torchrun --nproc-per-node 2 tools/generate.py --load RUN --tensor-model-parallel-size 2 --greedy < prompt.txt

Prints the prompt as the model reads it and what follows, token by token. The prompt comes from --prompt, --prompt-file
or standard input, exactly as it is (a line end at its end is part of it). The same command runs under python,
deepspeed, torchrun, mpirun and srun. Flags may be written with - or _.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config import UsageError, usage_error
from megatron_allattn.config.reporting import refuse, run_program
from megatron_allattn.config.tool_flags import ToolParser, count, parallel_of, precision_of

SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "seed", "num_samples")  # those that --greedy leaves without effect
DEFAULT_SEED = 1234


def _between(low: float, high: float, rule: str) -> Any:
    """A flag's number in (low, high]."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value <= high and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text!r}: must be a number {rule}")
        return value

    return number


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer from 0 to 2^63 - 1")
    return int(text)


def _parser() -> ToolParser:
    parser = ToolParser("generate.py", __doc__)
    add: Any = parser.add_argument
    add("--load", type=Path, required=True, metavar="RUN", help="run folder (its newest step), or one step folder")
    add("--prompt", metavar="TEXT", help="what to go on from (default: standard input)")
    add("--prompt-file", type=Path, metavar="FILE", help="a file with it")
    add("--num-tokens-to-generate", type=count, default=256, metavar="N", help="tokens of a sample (default 256)")
    add("--num-samples", type=count, metavar="S", help="continuations, made together (default 1)")
    add("--greedy", action="store_true", help="always the likeliest token")
    add(
        "--temperature",
        type=_between(0, math.inf, "above 0"),
        metavar="T",
        help="divides log-probabilities: below 1 likelier, above 1 more varied (default 1)",
    )
    add("--top-k", type=count, metavar="K", help="draw from the K likeliest tokens only")
    add(
        "--top-p",
        type=_between(0, 1, "above 0, up to 1"),
        metavar="P",
        help="draw from the likeliest tokens only, as many as reach P together (after --top-k)",
    )
    add("--seed", type=_seed, metavar="N", help=f"of the draws (default {DEFAULT_SEED})")
    parser.add_rank_flags()
    return parser


def _check(given: argparse.Namespace) -> None:
    if given.prompt is not None and given.prompt_file is not None:
        raise usage_error("--prompt-file", given.prompt_file, "--prompt is given too", "give one of the two")
    useless = [name for name in SAMPLING_FLAGS if getattr(given, name) is not None]
    if given.greedy and useless:
        name = f"--{useless[0].replace('_', '-')}"
        raise usage_error(name, getattr(given, useless[0]), "has no effect with --greedy", "leave one of the two out")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        _check(given)
        precision, parallel = precision_of(given), parallel_of(given)
    except UsageError as error:
        return refuse(error)
    # torch is loaded from here on, so that --help and mistakes are answered at once.
    from megatron_allattn.inference.generation import GenerationOptions, run_generation  # noqa: PLC0415
    from megatron_allattn.inference.sampling import Sampling  # noqa: PLC0415

    temperature = 1.0 if given.temperature is None else given.temperature
    return run_generation(
        GenerationOptions(
            load=given.load,
            prompt=given.prompt_file if given.prompt is None else os.fsencode(given.prompt),
            num_tokens=given.num_tokens_to_generate,
            num_samples=given.num_samples or 1,
            sampling=None if given.greedy else Sampling(temperature, given.top_k, given.top_p),
            seed=DEFAULT_SEED if given.seed is None else given.seed,
            parallel=parallel,
            precision=precision,
        )
    )


if __name__ == "__main__":
    run_program(main)
