"""tools/evaluate.py as one rank of however many the launcher has started: load, score, print the card.

Errors and exit codes are those of training (training/main.py): 0 done, 2 the user's mistake, 1 anything else.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from tqdm import tqdm

from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.config import ParallelConfig, UsageError, usage_error
from megatron_allattn.config.checks import check_output
from megatron_allattn.config.errors import flag
from megatron_allattn.config.rules import check_replicas
from megatron_allattn.config.tool_flags import Precision
from megatron_allattn.data.dataset import Dataset, open_dataset
from megatron_allattn.data.indexed import Tokens
from megatron_allattn.data.splits import SPLITS
from megatron_allattn.data.streams import num_evaluation_blocks
from megatron_allattn.inference.card import Card, card_text, evaluation_card
from megatron_allattn.inference.model import LoadedModel, load_model
from megatron_allattn.inference.reader import named_attend
from megatron_allattn.inference.scoring import CodeProtocol, Progress, Score, code_protocol, score
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.parallel.collectives import agree
from megatron_allattn.parallel.failures import Watch
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.training.main import as_rank
from megatron_allattn.training.resume import check_data
from megatron_allattn.training.session import exit_code

CODE_STREAMS = 8  # of the paper's code when it evaluates
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What the command line asks for; None: what tools/evaluate.py --help says.

    data: the fields of DataConfig that differ from the checkpoint's.
    """

    load: Path
    data: dict[str, Any]
    split_name: Literal["train", "valid", "test"]
    batch_size: int | None
    seq_length: int | None
    parallel: ParallelConfig
    overlap: bool
    code_protocol: bool
    precision: Precision
    attention_backend: str
    json: Path | None


def run_evaluation(options: EvaluationOptions) -> int:
    """Evaluate as one rank; returns the exit code."""

    def body(groups: Groups, device: torch.device, _: Watch) -> int:
        card = evaluate(options, groups, device)
        if groups.rank == 0:  # shown before it is written, which may fail
            print(card_text(card), flush=True)
        agree(
            lambda: write_json_atomic(options.json, card) if options.json and groups.rank == 0 else None,
            groups.world,
            exit_code,
        )
        return 0

    return as_rank(lambda world_size: check_replicas(options.parallel, world_size), options.parallel, body)


def evaluate(options: EvaluationOptions, groups: Groups, device: torch.device) -> Card:
    """The card of a checkpoint on a split; that --json can be written is checked before. Collective."""

    def agreed(action: Callable[[], T]) -> T:
        return agree(action, groups.world, exit_code)

    agreed(lambda: check_output("--json", options.json) if groups.rank == 0 else None)
    dtype = getattr(torch, options.precision)
    model = load_model(options.load, groups, device, dtype)
    attend = agreed(lambda: named_attend(options.attention_backend, model.run.model, device, dtype))
    dataset = agreed(lambda: _open_data(options, model))
    tokens = getattr(dataset, options.split_name)
    block_length = options.seq_length or model.run.training.seq_length
    size = groups.data.size
    with _bar("exact", groups) as progress:
        found = score(
            model.network,
            groups,
            tokens,
            num_streams=options.batch_size or -(-CODE_STREAMS // size) * size,
            block_length=block_length,
            device=device,
            overlap=options.overlap,
            attend=attend,
            progress=progress,
        )
    agreed(lambda: _check_finite(found, model))
    settings: Card = {
        "precision": options.precision,
        "device": device.type,
        "tensor_parallel_size": groups.tensor.size,
        "data_parallel_size": size,
        "attention_backend": options.attention_backend,
        "block_length": block_length,
        "overlap": options.overlap,
    }
    code = _code_protocol(options, model, tokens, groups, device, attend)
    return evaluation_card(model, dataset, options.split_name, found, code, settings)


def _open_data(options: EvaluationOptions, model: LoadedModel) -> Dataset:
    """The data that is asked for, or that of training; its tokenizer must be the checkpoint's."""
    data = replace(model.run.data, **options.data)
    dataset = open_dataset(data, frozenset(flag(name) for name in options.data))
    check_data(data.data_path, dataset, model.step_folder, model.state, same_text=False)
    if (count := len(getattr(dataset, options.split_name))) < 2:
        sizes = ", ".join(f"{name} {len(getattr(dataset, name)):,}" for name in SPLITS)
        rule = f"it has {count} token(s), scoring needs at least 2"
        raise usage_error("--split-name", options.split_name, rule, f"choose another split (tokens: {sizes})")
    if options.batch_size is not None and options.batch_size > count - 1:
        rule = f"the {options.split_name} split has {count - 1:,} predictions, and every stream needs one"
        fix = f"give at most {count - 1}; fewer are faster, since each first reads the tokens before its own"
        raise usage_error("--batch-size", options.batch_size, rule, fix)
    return dataset


def _check_finite(found: Score, model: LoadedModel) -> None:
    if not math.isfinite(found.total_nats):
        raise UsageError(f"{model.step_folder}: its loss on this split is not a finite number; load another step")


def _code_protocol(
    options: EvaluationOptions,
    model: LoadedModel,
    tokens: Tokens,
    groups: Groups,
    device: torch.device,
    attend: Attend | None,
) -> CodeProtocol | str:
    """What the paper's code would report with the blocks of training, or why that is not known."""
    block_length = model.run.training.seq_length
    if not options.code_protocol:
        return "not computed (--no-code-protocol)"
    if not num_evaluation_blocks(len(tokens), CODE_STREAMS, block_length):
        return f"would report nothing: the split has no block of {block_length} in each of {CODE_STREAMS} streams"
    with _bar("paper's code", groups) as progress:
        return code_protocol(
            model.network,
            groups,
            tokens,
            num_streams=CODE_STREAMS,
            block_length=block_length,
            device=device,
            attend=attend,
            progress=progress,
        )


@contextmanager
def _bar(what: str, groups: Groups) -> Iterator[Progress | None]:
    """A progress bar on the first rank's terminal."""
    if groups.rank != 0 or not sys.stderr.isatty():
        yield None
        return
    with tqdm(desc=what, unit="block", leave=False, dynamic_ncols=True) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
