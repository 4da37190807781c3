"""tools/generate.py as one rank of those that share the heads of a model: read the prompts, load, write on.

The first rank reads the prompts and prints; every rank draws the same tokens and ends at the same ones. Errors and exit
codes are those of training (training/main.py): 0 done, 2 the user's mistake, 1 anything else.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from megatron_allattn.config import ParallelConfig, UsageError, usage_error
from megatron_allattn.config.rules import check_replicas
from megatron_allattn.config.tool_flags import Precision
from megatron_allattn.data.tokenizers import Tokenizer, tokenizer_from_json
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.inference.answer import Answer
from megatron_allattn.inference.conversation import Conversation, converse
from megatron_allattn.inference.decoding import continuations, read_prompts
from megatron_allattn.inference.model import LoadedModel, load_model
from megatron_allattn.inference.printing import JsonPrinter, Printer, Sample, TextPrinter
from megatron_allattn.inference.prompts import PromptSource, encode_all
from megatron_allattn.inference.reader import Reader
from megatron_allattn.inference.sampling import Choose, Sampler, Sampling, greedy
from megatron_allattn.parallel.collectives import agree, broadcast_object
from megatron_allattn.parallel.failures import Watch
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.training.main import as_rank
from megatron_allattn.training.session import exit_code

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What the command line asks for.

    prompts: None: a conversation on standard input · num_tokens: at most, of a sample · num_samples: of each prompt ·
    batch_size: samples that are written side by side · sampling: None: always the likeliest token · stops: not empty ·
    json: print lines of JSON.
    """

    load: Path
    prompts: PromptSource | None
    num_tokens: int
    num_samples: int
    batch_size: int
    sampling: Sampling | None
    seed: int
    stops: tuple[str, ...]
    json: bool
    parallel: ParallelConfig
    precision: Precision

    def choose(self, samples: list[tuple[int, int]]) -> Choose:
        """What chooses the tokens of these samples (`Sampler`)."""
        return greedy if self.sampling is None else Sampler(self.sampling, self.seed, samples)


@dataclass(frozen=True)
class Writer:
    """A model that is ready to write. new_reader: of one stream that has not started."""

    tokenizer: Tokenizer
    new_reader: Callable[[], Reader]


def run_generation(options: GenerationOptions) -> int:
    """Generate as one rank; returns the exit code."""

    def body(groups: Groups, device: torch.device, _: Watch) -> int:
        generate(options, groups, device)
        return 0

    return as_rank(lambda world_size: _check_processes(options.parallel, world_size), options.parallel, body)


def generate(options: GenerationOptions, groups: Groups, device: torch.device) -> list[Answer]:
    """Print the prompts and their continuations on the first rank; returns these, prompt after prompt.

    Or have a conversation, of which nothing is returned. Collective.
    """

    def agreed(action: Callable[[], T]) -> T:
        return agree(action, groups.world, exit_code)

    source, first = options.prompts, groups.rank == 0
    texts = agreed(lambda: source.read() if first and source is not None else [])
    writer = _load(options, groups, device)
    if source is None:
        conversation = Conversation(
            writer.tokenizer,
            writer.new_reader,
            lambda turn: options.choose([(turn, 0)]),
            num_tokens=options.num_tokens,
            stops=options.stops,
        )
        converse(conversation, groups.world, 60 * options.parallel.distributed_timeout_minutes)
        return []
    prompts = broadcast_object(agreed(lambda: encode_all(texts, writer.tokenizer) if first else []), groups.world)
    numbers = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(options.num_samples)]
    found = []
    for start in range(0, len(numbers), options.batch_size):
        found += _write(options, writer, prompts, numbers[start : start + options.batch_size], first)
    return found


def _write(
    options: GenerationOptions, writer: Writer, prompts: list[list[int]], numbers: list[tuple[int, int]], shows: bool
) -> list[Answer]:
    """Continue these prompts' samples side by side, until the last is over."""
    copies = Counter(prompt for prompt, _ in numbers)
    samples = [
        Sample(prompt, sample, Answer(writer.tokenizer, prompts[prompt], options.num_tokens, options.stops))
        for prompt, sample in numbers
    ]
    printer = _printer(options, samples, len(prompts)) if shows else None
    reader, log_probs = read_prompts(writer.new_reader, [prompts[prompt] for prompt in copies], list(copies.values()))
    for tokens in continuations(reader, log_probs, options.choose(numbers)):
        for sample, token in zip(samples, tokens, strict=True):
            if sample.answer.finish is None:
                sample.answer.add(token)
        if printer is not None:
            printer.show()
        if all(sample.answer.finish for sample in samples):
            break
    return [sample.answer for sample in samples]


def _printer(options: GenerationOptions, samples: list[Sample], num_prompts: int) -> Printer:
    if options.json:
        return JsonPrinter(samples)

    def title(sample: Sample) -> str:
        places = (("prompt", sample.prompt, num_prompts), ("sample", sample.sample, options.num_samples))
        words = ", ".join(f"{what} {number + 1} of {count}" for what, number, count in places if count > 1)
        return f"--- {words} ---\n" if words else ""

    return TextPrinter(samples, title)


def _load(options: GenerationOptions, groups: Groups, device: torch.device) -> Writer:
    """Collective. Raises UsageError: there is no model, or none that can write."""
    model = load_model(options.load, groups, device, getattr(torch, options.precision))
    if groups.rank == 0:
        for note in model.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
    agree(lambda: _check_finite(model), groups.world, exit_code)
    source = str(model.step_folder / "state.json")
    tokenizer = agree(lambda: tokenizer_from_json(model.state["tokenizer"], source), groups.world, exit_code)
    network = model.network
    network.fold_scales()
    spans = find_spans(network, local_spans(network))
    return Writer(tokenizer, lambda: Reader(network, spans, 1))


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
