"""Write on from prompts with a trained model. Exit code 0: done, 2: wrong usage, 1: anything else.

    python tools/generate.py --load RUN --prompt "In the beginning" --temperature 0.8 --top-p 0.95
    python tools/generate.py --load RUN --prompts-file prompts.jsonl --stop $'\\n' --json > answers.jsonl
    python tools/generate.py --load RUN --interactive
    torchrun --nproc-per-node 2 tools/generate.py --load RUN --tensor-model-parallel-size 2 --greedy < prompt.txt

Prints each prompt as the model reads it and what follows, token by token. A prompt is taken exactly as it is (a line
end at its end is part of it, but not in --prompts-file). The same command runs under python, deepspeed, torchrun,
mpirun and srun. Flags may be written with - or _.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config import UsageError, usage_error
from megatron_allattn.config.errors import flag
from megatron_allattn.config.reporting import refuse, run_program
from megatron_allattn.config.tool_flags import ToolParser, above_zero, count, integer, number, parallel_of, precision_of

SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "seed", "num_samples")  # those that --greedy leaves without effect
PROMPT_FLAGS = ("prompt", "prompt_file", "prompts_file", "interactive")  # one of them
BATCH_FLAGS = ("num_samples", "batch_size", "json")  # those that --interactive leaves without effect
DEFAULT_SEED = 1234
DEFAULT_BATCH_SIZE = 16


def _stop(text: str) -> str:
    try:
        os.fsencode(text).decode()
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be valid UTF-8") from None
    if not text:
        raise argparse.ArgumentTypeError("'': must have at least one character")
    return text


def _parser() -> ToolParser:
    parser = ToolParser("generate.py", __doc__, repeatable=("--prompt", "--stop"))
    add: Any = parser.add_argument
    add("--load", type=Path, required=True, metavar="RUN", help="run folder (its newest step), or one step folder")
    add("--prompt", action="append", metavar="TEXT", help="what to go on from; may be repeated (default: stdin)")
    add("--prompt-file", type=Path, metavar="FILE", help="a file with it")
    add("--prompts-file", type=Path, metavar="FILE", help="a file with one a line; FILE.jsonl: JSON lines")
    add("--interactive", action="store_true", default=None, help="a text that you and the model write in turns")
    add("--num-tokens-to-generate", type=count, default=256, metavar="N", help="tokens of a sample (default 256)")
    add("--num-samples", type=count, metavar="S", help="continuations of each prompt (default 1)")
    add("--batch-size", type=count, metavar="B", help=f"samples made together (default {DEFAULT_BATCH_SIZE})")
    add("--stop", type=_stop, action="append", metavar="TEXT", help="ends a sample and is not shown; may be repeated")
    add("--json", action="store_true", default=None, help="print a line of JSON for each sample instead of text")
    add("--greedy", action="store_true", help="always the likeliest token")
    add(
        "--temperature",
        type=above_zero,
        metavar="T",
        help="divides log-probabilities: below 1 likelier, above 1 more varied (default 1)",
    )
    add("--top-k", type=count, metavar="K", help="draw from the K likeliest tokens only")
    add(
        "--top-p",
        type=number("above 0, up to 1", lambda value: 0 < value <= 1),
        metavar="P",
        help="draw from the likeliest tokens only, as many as reach P together (after --top-k)",
    )
    add("--seed", type=integer(0, 2**63 - 1), metavar="N", help=f"of the draws (default {DEFAULT_SEED})")
    parser.add_rank_flags()
    return parser


def _check(given: argparse.Namespace) -> None:
    def having(names: Sequence[str]) -> list[str]:
        return [name for name in names if getattr(given, name) is not None]

    def refused(name: str, rule: str, fix: str) -> UsageError:
        value = getattr(given, name)
        what, shown = ("flag", flag(name)) if value is True else (flag(name), value)
        return usage_error(what, shown, rule, fix)

    first, *more = [*having(PROMPT_FLAGS), ""]
    if more and more[0]:
        raise refused(more[0], f"{flag(first)} is given too", "give one of the two")
    for name, useless in (("greedy", having(SAMPLING_FLAGS)), ("interactive", having(BATCH_FLAGS))):
        if getattr(given, name) and useless:
            raise refused(useless[0], f"has no effect with --{name}", "leave one of the two out")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        _check(given)
        precision, parallel = precision_of(given), parallel_of(given)
    except UsageError as error:
        return refuse(error)
    # torch is loaded from here on, so that --help and mistakes are answered at once.
    from megatron_allattn.inference.generation import GenerationOptions, run_generation  # noqa: PLC0415
    from megatron_allattn.inference.prompts import PromptSource  # noqa: PLC0415
    from megatron_allattn.inference.sampling import Sampling  # noqa: PLC0415

    texts = tuple(map(os.fsencode, given.prompt or ()))
    source = PromptSource(texts=texts, file=given.prompt_file, file_of_many=given.prompts_file)
    temperature = 1.0 if given.temperature is None else given.temperature
    return run_generation(
        GenerationOptions(
            load=given.load,
            prompts=None if given.interactive else source,
            num_tokens=given.num_tokens_to_generate,
            num_samples=given.num_samples or 1,
            batch_size=given.batch_size or DEFAULT_BATCH_SIZE,
            sampling=None if given.greedy else Sampling(temperature, given.top_k, given.top_p),
            seed=DEFAULT_SEED if given.seed is None else given.seed,
            stops=tuple(given.stop or ()),
            json=bool(given.json),
            parallel=parallel,
            precision=precision,
        )
    )


if __name__ == "__main__":
    run_program(main)
