"""Score a split exactly and print its evaluation card. Exit code 0: done, 2: wrong usage, 1: anything else.

    python tools/evaluate.py --load RUN --split-name test
    torchrun --nproc-per-node 8 tools/evaluate.py --load RUN --tensor-model-parallel-size 2 --json card.json

Every token but the first is scored once, with its full context through all layers, so that the value does not depend on
batch size, block length or layout. Processes that do not share heads share the split. The same command runs under
python, deepspeed, torchrun, mpirun and srun. Flags may be written with - or _.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config import DataConfig, ParallelConfig, UsageError, usage_error
from megatron_allattn.config.checks import LARGEST
from megatron_allattn.config.reporting import refuse, run_program

BARE_FILE_FLAGS = ("--split", "--tokenizer-type", "--tokenizer-model", "--vocab-size")


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors, whose flags are given at most once and never abbreviated."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")

    def parse_args(self, argv: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        words, given = [], set()
        for word in argv:
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                name = name.replace("_", "-")
                if name not in self._option_string_actions:
                    near = difflib.get_close_matches(name, self._option_string_actions, n=1)
                    raise usage_error("flag", name, "is unknown", f"did you mean {near[0]}?" if near else "see --help")
                if name in given:
                    raise usage_error("flag", name, "is given twice", "give it once")
                given.add(name)
            words.append(name + equals + value)
        return super().parse_args(words)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer from 1 to {LARGEST}")
    return int(text)


def _parser() -> _Parser:
    parser = _Parser(
        prog="evaluate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add: Any = parser.add_argument
    add("--load", type=Path, required=True, metavar="RUN", help="run folder (its newest step), or one step folder")
    add("--data-path", metavar="P", help="prefix of prepared data (default: what the checkpoint was trained on)")
    for name in BARE_FILE_FLAGS:
        add(
            name,
            type=_count if name == "--vocab-size" else str,
            metavar="X",
            help="of a bare token file (default: as in training)",
        )
    add("--split-name", choices=("valid", "test", "train"), default="valid", help="what to score (default valid)")
    add(
        "--batch-size",
        type=_count,
        metavar="S",
        help="streams over all processes (default 8, or the next multiple of their number)",
    )
    add("--seq-length", type=_count, metavar="M", help="tokens of a stream in one pass (default: as in training)")
    add("--tensor-model-parallel-size", type=_count, default=1, metavar="N", help="processes that share the heads")
    add(
        "--distributed-timeout-minutes",
        type=float,
        default=10.0,
        metavar="T",
        help="how long a process waits for another (default 10)",
    )
    add("--no-overlap", action="store_true", help="start streams with empty caches: faster; lost context is counted")
    add("--no-code-protocol", action="store_true", help="do not compute what the paper's code would report")
    add("--bf16", action="store_true", help="compute in bfloat16 instead of float32")
    add("--float64", action="store_true", help="compute in float64 instead of float32")
    add("--json", type=Path, metavar="FILE", help="write the card as JSON too")
    add("--local-rank", type=int, help=argparse.SUPPRESS)  # launchers add it; ranks are found by the environment
    add("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        if given.bf16 and given.float64:
            raise usage_error("--bf16", "--float64", "an evaluation has one precision", "give one of the two")
        fields = [name.lstrip("-").replace("-", "_") for name in ("--data-path", *BARE_FILE_FLAGS)]
        data = {field: value for field in fields if (value := getattr(given, field)) is not None}
        DataConfig(**data)  # refuses what no data could have
        parallel = ParallelConfig(
            tensor_model_parallel_size=given.tensor_model_parallel_size,
            distributed_timeout_minutes=given.distributed_timeout_minutes,
        )
    except UsageError as error:
        return refuse(error)
    # torch is loaded from here on, so that --help and mistakes are answered at once.
    from megatron_allattn.inference.evaluation import EvaluationOptions, run_evaluation  # noqa: PLC0415

    return run_evaluation(
        EvaluationOptions(
            load=given.load,
            data=data,
            split_name=given.split_name,
            batch_size=given.batch_size,
            seq_length=given.seq_length,
            parallel=parallel,
            overlap=not given.no_overlap,
            code_protocol=not given.no_code_protocol,
            precision="bfloat16" if given.bf16 else "float64" if given.float64 else "float32",
            json=given.json,
        )
    )


if __name__ == "__main__":
    run_program(main)
