"""Score a split exactly and print its evaluation card. Exit code 0: done, 2: wrong usage, 1: anything else.

    python tools/evaluate.py --load RUN --split-name test --json card.json
    torchrun --nproc-per-node 8 tools/evaluate.py --load RUN --tensor-model-parallel-size 2 --json card.json

Every token but the first is scored once, with its full context through all layers, so that the value does not depend on
batch size, block length or layout. Processes that do not share heads share the split. The same command runs under
python, deepspeed, torchrun, mpirun and srun. Flags may be written with - or _.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config import DataConfig, UsageError
from megatron_allattn.config.reporting import refuse, run_program
from megatron_allattn.config.tool_flags import ToolParser, count, parallel_of, precision_of

BARE_FILE_FLAGS = ("--split", "--tokenizer-type", "--tokenizer-model", "--vocab-size")


def _parser() -> ToolParser:
    parser = ToolParser("evaluate.py", __doc__)
    add: Any = parser.add_argument
    add("--load", type=Path, required=True, metavar="RUN", help="run folder (its newest step), or one step folder")
    add("--data-path", metavar="P", help="prefix of prepared data (default: what the checkpoint was trained on)")
    for name in BARE_FILE_FLAGS:
        add(
            name,
            type=count if name == "--vocab-size" else str,
            metavar="X",
            help="of a bare token file (default: as in training)",
        )
    add("--split-name", choices=("valid", "test", "train"), default="valid", help="what to score (default valid)")
    add(
        "--batch-size",
        type=count,
        metavar="S",
        help="streams over all processes (default 8, or the next multiple of their number)",
    )
    add("--seq-length", type=count, metavar="M", help="tokens of a stream in one pass (default: as in training)")
    add("--no-overlap", action="store_true", help="start streams with empty caches: faster; lost context is counted")
    add("--no-code-protocol", action="store_true", help="do not compute what the paper's code would report")
    add(
        "--attention-backend",
        choices=("cached", "eager", "blocked", "triton"),
        default="cached",
        help="cached (default): keys and values are kept; or a backend of training, over hidden states",
    )
    add("--json", type=Path, metavar="FILE", help="write the card as JSON too")
    parser.add_rank_flags()
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        precision, parallel = precision_of(given), parallel_of(given)
        fields = [name.lstrip("-").replace("-", "_") for name in ("--data-path", *BARE_FILE_FLAGS)]
        data = {field: value for field in fields if (value := getattr(given, field)) is not None}
        DataConfig(**data)  # refuses what no data could have
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
            precision=precision,
            attention_backend=given.attention_backend,
            json=given.json,
        )
    )


if __name__ == "__main__":
    run_program(main)
