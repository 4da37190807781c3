"""tools/generate.py as one rank of those that share the heads of a model: read the prompt, load, write on.

The first rank reads the prompt and prints; every rank draws the same tokens. Errors and exit codes are those of
training (training/main.py): 0 done, 2 the user's mistake, 1 anything else.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from megatron_allattn.config import ParallelConfig, UsageError, usage_error
from megatron_allattn.config.checks import check_regular
from megatron_allattn.config.rules import check_replicas
from megatron_allattn.config.tool_flags import Precision
from megatron_allattn.data.tokenizers import Tokenizer, tokenizer_from_json
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.inference.decoding import continuations
from megatron_allattn.inference.model import LoadedModel, load_model
from megatron_allattn.inference.reader import Reader
from megatron_allattn.inference.sampling import Sampler, Sampling, greedy
from megatron_allattn.inference.text_stream import TextStream
from megatron_allattn.parallel.collectives import agree, broadcast_object
from megatron_allattn.parallel.failures import Watch
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.training.main import as_rank
from megatron_allattn.training.session import exit_code

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What the command line asks for.

    prompt: the text itself, a file, or None: standard input · sampling: None: always the likeliest token.
    """

    load: Path
    prompt: bytes | Path | None
    num_tokens: int
    num_samples: int
    sampling: Sampling | None
    seed: int
    parallel: ParallelConfig
    precision: Precision


def run_generation(options: GenerationOptions) -> int:
    """Generate as one rank; returns the exit code."""

    def body(groups: Groups, device: torch.device, _: Watch) -> int:
        generate(options, groups, device)
        return 0

    return as_rank(lambda world_size: _check_processes(options.parallel, world_size), options.parallel, body)


def generate(options: GenerationOptions, groups: Groups, device: torch.device) -> list[list[int]]:
    """Print the prompt and its continuations on the first rank; returns the tokens of each sample's continuation.

    The first sample is printed as it comes. Collective.
    """

    def agreed(action: Callable[[], T]) -> T:
        return agree(action, groups.world, exit_code)

    text, source = agreed(lambda: _text_of(options.prompt) if groups.rank == 0 else (b"", ""))
    model = load_model(options.load, groups, device, getattr(torch, options.precision))
    if groups.rank == 0:
        for note in model.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
    agreed(lambda: _check_finite(model))
    tokenizer = agreed(lambda: tokenizer_from_json(model.state["tokenizer"], str(model.step_folder / "state.json")))
    prompt = broadcast_object(
        agreed(lambda: _prompt_tokens(text, source, tokenizer) if groups.rank == 0 else None), groups.world
    )
    network = model.network
    network.fold_scales()
    choose = greedy if options.sampling is None else Sampler(options.sampling, options.seed, options.num_samples)
    reader = Reader(network, find_spans(network, local_spans(network)), 1)
    steps = islice(continuations(reader, prompt, choose, options.num_samples), options.num_tokens)
    writer = _Writer(tokenizer, prompt, options.num_samples) if groups.rank == 0 else None
    positions = []
    for tokens in steps:
        positions.append(tokens)
        if writer is not None:
            writer.add(tokens[0])
    samples = [list(sample) for sample in zip(*positions, strict=True)]
    if writer is not None:
        writer.end(samples)
    return samples


def _check_processes(parallel: ParallelConfig, world_size: int) -> None:
    """Every process must hold a part of the one model."""
    check_replicas(parallel, world_size)
    size = parallel.tensor_model_parallel_size
    if world_size != size:
        rule = f"{world_size} processes would be {world_size // size} copies of the model, and one is used"
        fix = f"start {size} process{'es' if size > 1 else ''}, or let {world_size} share the heads"
        raise usage_error("--tensor-model-parallel-size", size, rule, fix)


def _check_finite(model: LoadedModel) -> None:
    for logical, parameter in model.network.logical_parameters():
        if not parameter.isfinite().all():
            rule = f"{logical.name} holds numbers that are not finite"
            raise UsageError(f"{model.step_folder}: {rule}; load another step")


def _prompt_tokens(text: bytes, source: str, tokenizer: Tokenizer) -> list[int]:
    """The prompt's tokens. Raises UsageError: it is not of the model's vocabulary, or is empty."""
    if tokenizer.unit != "byte":
        try:
            text.decode()
        except UnicodeDecodeError as error:
            rule = f"byte {error.start} (0x{text[error.start]:02x}) is not valid UTF-8"
            raise usage_error("text of", source, rule, "give UTF-8 text") from None
    try:
        ids, unknown = tokenizer.encode_counting(text, source=source)
    except UsageError as error:  # its way out is for those who prepare data
        raise UsageError(f"{str(error).rpartition('; ')[0]}; leave it out of the prompt") from None
    if not len(ids):
        fix = "give at least one token to go on from"
        what, value = ("--prompt", repr(os.fsdecode(text))) if source == "--prompt" else ("text of", source)
        raise usage_error(what, value, f"has no token of the {tokenizer.name} vocabulary", fix)
    if unknown:
        what = f"{unknown:,} of the prompt's {len(ids):,} tokens are <unk>: the vocabulary lacks what they stand for"
        print(f"note: {what}", file=sys.stderr, flush=True)
    return ids.tolist()


def _text_of(given: bytes | Path | None) -> tuple[bytes, str]:
    """The prompt's text and the name of where it is from. Raises UsageError: it cannot be read."""
    if isinstance(given, bytes):
        return given, "--prompt"
    if given is None:
        if sys.stdin is None or sys.stdin.isatty():
            rule = "standard input has no text"
            raise usage_error("--prompt", "(left out)", rule, "give --prompt or --prompt-file, or pipe a text in")
        return sys.stdin.buffer.read(), "standard input"
    fix = "give a text file, or pipe the text in"
    try:
        check_regular("--prompt-file", given, fix)
        return given.read_bytes(), str(given)
    except OSError as error:
        raise usage_error("--prompt-file", given, f"cannot be read ({error.strerror})", fix) from None


class _Writer:
    """Prints the prompt and the first sample as it comes, and the other samples behind it."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], num_samples: int) -> None:
        self._tokenizer, self._prompt, self._num_samples = tokenizer, prompt, num_samples
        self._start(0)

    def _start(self, sample: int) -> None:
        self._stream = TextStream(self._tokenizer)
        if self._num_samples > 1:
            self._show(f"--- sample {sample + 1} of {self._num_samples} ---\n")
        self._show("".join(map(self._stream.add, self._prompt)))

    def add(self, token: int) -> None:
        """The next token of the sample that is being printed."""
        self._show(self._stream.add(token))

    def end(self, samples: list[list[int]]) -> None:
        """All is generated; samples: the tokens of each one."""
        self._show(self._stream.end() + "\n")
        for number, sample in enumerate(samples[1:], start=1):
            self._start(number)
            self._show("".join(map(self._stream.add, sample)) + self._stream.end() + "\n")

    def _show(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
