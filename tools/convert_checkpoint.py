"""Convert checkpoints of other programs to run folders of this one, and back. Exit code 0: done, 2: wrong usage.

    python tools/convert_checkpoint.py --from adaptive-span checkpoint.pt --output runs/converted
    python tools/convert_checkpoint.py --to adaptive-span --load runs/converted --output back.pt
    python tools/convert_checkpoint.py --to huggingface --load runs/books --output books-hf

Formats:
    adaptive-span   a .pt file of the paper's published code: weights, optimizer state and step. That code knows
                    --span-normalization window alone; of a run with the other one it is told how far apart they are
    safetensors     one file with the weights, and in its header all that is needed to use them here
    shards          a folder for every rank of a TP × PP grid, mp_rank_XX_YYY, as Megatron-LM lays them out: weights,
                    optimizer state and step; with --tensor-model-parallel-size, --pipeline-model-parallel-size and
                    the flags of pretrain.py that deal layers to stages
    deepspeed-universal   a folder that DeepSpeed's engines load at any layout: weights, Adam's state and step; it has
                    no other optimizer's
    huggingface     a folder for transformers 5.20 or newer, AutoModelForCausalLM.from_pretrained(DIR,
                    trust_remote_code=True), with its tokenizer and a model card (--evaluation-card, --license); if
                    transformers is installed its logits are compared with those here, which takes the memory of all
                    weights; --no-compare-logits leaves it out
    ff-transformer  a run of ours with --variant transformer (with --from alone): its feed-forward sublayers become
                    persistent vectors, and training goes on from there (docs/warm_start.md). If the data that it was
                    trained on are here, the loss before and after is told

RUN is what `pretrain.py --save` makes, with one checkpoint: `pretrain.py --load RUN`, tools/evaluate.py and
tools/inspect_checkpoint.py take it; --load takes a step folder too. What a file of adaptive-span does not say of its
run comes from flags: all those of pretrain.py about the model, the optimizer and the training, or a --recipe, with the
same defaults. These are

    --span-ramp (32)   --span-loss (1e-6)   --attention-dropout, --embedding-dropout, --feed-forward-dropout (0)
    --seq-length (128)   --global-batch-size (16)   --lr-warmup-iters (0)   --clip-grad (1, with Adam)

A flag that contradicts the file is an error. A file of somebody else is safe to convert: no code in it is ever run.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config.reporting import refuse, run_program, tell_early_ends

if __name__ == "__main__":
    tell_early_ends()  # torch is loaded next

from megatron_allattn.checkpoint import adaptive_span, shards, single_file, universal, warm_start
from megatron_allattn.checkpoint.companion import check_companion, check_vocabulary_size, read_companion
from megatron_allattn.checkpoint.conversion import SavedRun, Tensors, converted_state, read_run, write_run
from megatron_allattn.checkpoint.described import Description
from megatron_allattn.checkpoint.files import StorageError, check_new
from megatron_allattn.checkpoint.folder import told_if_gone
from megatron_allattn.checkpoint.pickled import write_pickled
from megatron_allattn.checkpoint.progress import Progress
from megatron_allattn.checkpoint.run_folder import check_outside
from megatron_allattn.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
    UsageError,
    parse,
)
from megatron_allattn.config.checks import field_types
from megatron_allattn.config.errors import flag, usage_error
from megatron_allattn.config.tool_flags import ToolParser
from megatron_allattn.data.code_vocabulary import tokenizer_of
from megatron_allattn.data.tokenizers import NullTokenizer, Tokenizer, tokenizer_from_json
from megatron_allattn.hf import export
from megatron_allattn.hf.model_card import Told
from megatron_allattn.inference.card import text_of_file
from megatron_allattn.inference.quick_look import validation_loss
from megatron_allattn.training.schedules import learning_rate

NOT_KEPT = (
    "note: the run's place in the data and its caches are not in it: who goes on from it begins the data anew, with "
    "empty caches"
)
NORMALIZATION = "that code normalizes over a layer's window, with 1e-8 added, and not over each head's span"
WEIGHTS_ALONE = "note: it has the weights alone: a run from it begins at step 0, with a new optimizer and schedule"


class Given(NamedTuple):
    """The configuration from the command line, and which of its flags were given."""

    run: RunConfig
    explicit: frozenset[str]
    vocabulary: Path | None


class Wanted(NamedTuple):
    """What the command line says of a format to be written: the grid of shards; whether transformers is to run, and
    what the model card is to say."""

    parallel: ParallelConfig
    compare_logits: bool
    evaluation_card: Path | None
    license: str | None


def from_adaptive_span(source: Path, output: Path, given: Given) -> str:
    """A .pt file of the paper's code → a run folder; lines that say what it holds."""
    found = adaptive_span.read(source)
    run = adaptive_span.configure(source, found, given.run, given.explicit)
    tokenizer = read_tokenizer(given.vocabulary, run.model, found.model.vocab_size)
    described = (tokenizer.to_json(), tokenizer.fingerprint)
    progress = Progress.at(found.step, run)
    state = converted_state(run, progress, tokenizer.vocab_size, *described, found.source)
    write_run(source, output, run, found.step, state, Tensors.of(found.model.weights), Tensors.of(found.state))
    parameters = sum(weight.numel() for weight in found.model.weights.values())
    lines = [
        f"{output}: step {found.step}, {parameters:,} parameters, {run.optimizer.optimizer}, {tokenizer.name} tokens"
    ]
    model = run.model
    if model.adaptive_span and "--span-normalization" not in given.explicit:
        lines.append(f"note: --span-normalization {model.span_normalization}: {NORMALIZATION}")
    unsaid = {"--span-ramp": model.span_ramp, "--span-loss": model.span_loss} if model.adaptive_span else {}
    unsaid |= {"--attention-dropout": model.attention_dropout, "--embedding-dropout": model.embedding_dropout}
    assumed = [f"{name} {value}" for name, value in unsaid.items() if name not in given.explicit]
    if assumed and run.recipe is None:
        lines.append(f"note: the file does not say it, and this is assumed: {', '.join(assumed)}")
    return "\n".join(lines)


def read_tokenizer(path: Path | None, model: ModelConfig, vocab_size: int) -> Tokenizer:
    """The tokenizer of --vocabulary, which must fit the model; bare numbers without one.

    A list is one of the paper's code, and tells what its tokens are; a P.json or state.json says it itself.
    """
    if path is None:
        return NullTokenizer(vocab_size)
    content = read_companion(path)
    own = content.get("tokenizer")  # of prepared data, or of a step of a run, which has its configuration too
    if own is not None:
        configuration = content.get("config")
        content = {"config": configuration.get("model", {}) if isinstance(configuration, dict) else {}}
    check_companion(path, content, model, vocab_size)
    if own is not None:
        tokenizer = tokenizer_from_json(own, str(path))
        check_vocabulary_size(path, tokenizer.vocab_size, vocab_size)
        return tokenizer
    if "vocabulary" not in content:
        fix = "give a list of tokens, an object that has one under `vocabulary`, a P.json or a state.json"
        raise usage_error("--vocabulary", path, "has no vocabulary", fix)
    try:
        return tokenizer_of(content["vocabulary"])
    except UsageError as error:
        raise UsageError(f"--vocabulary {path}: {error}") from None


def to_adaptive_span(saved: SavedRun, output: Path, wanted: Wanted) -> str:
    """A run's checkpoint → a .pt file of the paper's code; lines that say what it holds."""
    run, progress, step = saved.run, saved.progress, saved.state["step"]
    if step and not saved.optimizer.names:
        rule = "has no optimizer state, without which the paper's code loads no file"
        raise usage_error("--load", saved.step_folder, rule, "convert to safetensors")
    dropped_at = (progress.plateau or {}).get("dropped_at")
    source = saved.state.get("source") or {}
    content = adaptive_span.write(
        run,
        step - progress.skipped,
        learning_rate(run.optimizer, run.training.train_iters, step, dropped_at),
        saved.weights.map,
        saved.optimizer.map if saved.optimizer.names else None,
        source if source.get("format") == adaptive_span.FORMAT else None,
    )
    write_pickled(output, content)
    lines = [f"{output}: step {step} of {saved.step_folder}", NOT_KEPT]
    if progress.skipped:
        lines.append(
            f"note: that code counts updates, it is at {step - progress.skipped}: {progress.skipped} are left out"
        )
    if run.optimizer.optimizer == "adam" and run.optimizer.clip_grad:
        lines.append(f"note: the file does not say that gradients are clipped at {run.optimizer.clip_grad}")
    if run.model.adaptive_span and run.model.span_normalization != "window":
        lines.append(f"note: {NORMALIZATION}{_apart(saved) if wanted.compare_logits else ''}")
    if run.optimizer.lr_decay_style != "constant":
        lines.append(f"note: that code has no {run.optimizer.lr_decay_style} decay, its rate stays as it is")
    return "\n".join(lines)


def _apart(saved: SavedRun) -> str:
    """How far the log-probabilities with that code's normalization are from the run's own."""
    run, ids = saved.run, export.tried(saved)
    theirs = replace(saved, run=replace(run, model=replace(run.model, span_normalization="window")))
    apart = (export.log_probabilities(saved, ids) - export.log_probabilities(theirs, ids)).abs().max().item()
    return (
        f": of {ids.numel()} tokens, ids in order, log-probabilities differ by {apart:.1e} at most, of others by more"
    )


def from_safetensors(source: Path, output: Path, _: Given) -> str:
    """One of our single files → a run folder; a line that says what it holds."""
    found = single_file.read(source, output)
    return f"{output}: the weights of step {found.step}, as step 0"


def to_safetensors(saved: SavedRun, output: Path, _: Wanted) -> str:
    """A run's weights → one file; a line that says what it holds."""
    digest = single_file.write(saved, output)
    return f"{output}: {len(saved.weights.names)} weights of {saved.step_folder}, SHA-256 {digest}\n{WEIGHTS_ALONE}"


def from_described(read: Callable[[Path, Path], Description], source: Path, output: Path, _: Given) -> str:
    """Shards of a grid, or a universal checkpoint → a run folder; a line that says what it holds."""
    return f"{output}: step {read(source, output).step} of {source}"


def to_shards(saved: SavedRun, output: Path, wanted: Wanted) -> str:
    """A run's checkpoint → shards of a grid; a line that says what it holds."""
    grid = shards.write(saved, output, wanted.parallel)
    step = f"step {saved.state['step']} of {saved.step_folder}"
    return f"{output}: {step} for TP {grid.tensor} × PP {grid.pipeline}\n{NOT_KEPT}"


def to_universal(saved: SavedRun, output: Path, _: Wanted) -> str:
    """A run's checkpoint → a universal one; a line that says what it holds."""
    name = universal.write(saved, output)
    return f"{output}: {name}, of {saved.step_folder}\n{NOT_KEPT}"


def from_huggingface(source: Path, output: Path, given: Given) -> str:
    """A folder for transformers → a run folder; a line that says what it holds."""
    found = export.read(source, output, given.run)
    return f"{output}: the weights of {source}, as step 0, {found.tokenizer['type']} tokens"


def to_huggingface(saved: SavedRun, output: Path, wanted: Wanted) -> str:
    """A run's weights → a folder for transformers; lines that say what it holds."""
    card = wanted.evaluation_card
    if wanted.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", wanted.license):
        rule = "is no licence as the Hub spells them: small letters, digits, dots, + and -"
        raise usage_error("--license", wanted.license, rule, "give one such as apache-2.0, or leave it out")
    told = Told(wanted.license, None if card is None else text_of_file("--evaluation-card", card, saved))
    compared = export.write(saved, output, compare_logits=wanted.compare_logits, told=told)
    head = f"{output}: {len(saved.weights.names)} weights of {saved.step_folder}"
    load_it = f'load it: transformers.AutoModelForCausalLM.from_pretrained("{output}", trust_remote_code=True)'
    return "\n".join((head, WEIGHTS_ALONE, compared, load_it))


def from_transformer(source: Path, output: Path, _: Given) -> str:
    """A run of the transformer baseline → an all-attention one to go on from; a line that says what it holds."""
    run = warm_start.read(source, output)
    size = run.model.persistent_memory_size
    left = "left out are the biases of the feed-forward sublayers and the first norm of each layer"
    told = f"{output}: {size:,} persistent vectors of a head, of as many units; {left}"
    return "\n".join((told, _losses(source, output, run.data), WEIGHTS_ALONE))


def _losses(source: Path, output: Path, data: DataConfig) -> str:
    """What the conversion did to the loss, where the data that the run was trained on are here."""
    try:
        (before, count), (after, _) = validation_loss(source, data), validation_loss(output, data)
    except UsageError as error:
        return f"note: the loss before and after was not measured: {error}"
    return f"loss of {count:,} validation tokens: {before:.4f} before, {after:.4f} after"


class Format(NamedTuple):
    """How a format is read and written; None where it is only read."""

    read: Callable[[Path, Path, Given], str]
    write: Callable[[SavedRun, Path, Wanted], str] | None


FORMATS = {
    adaptive_span.FORMAT: Format(from_adaptive_span, to_adaptive_span),
    single_file.FORMAT: Format(from_safetensors, to_safetensors),
    shards.FORMAT: Format(partial(from_described, shards.read), to_shards),
    universal.FORMAT: Format(partial(from_described, universal.read), to_universal),
    export.FORMAT: Format(from_huggingface, to_huggingface),
    warm_start.FORMAT: Format(from_transformer, None),
}
WRITTEN = {name: write for name, (_, write) in FORMATS.items() if write is not None}
COMPARE, CARD, LICENSE = "--no-compare-logits", "--evaluation-card", "--license"
COMPARED = (export.FORMAT, adaptive_span.FORMAT)
GRID: dict[str, type] = {
    "tensor_model_parallel_size": int,
    "pipeline_model_parallel_size": int,
    "pipeline_partition": str,
    "pipeline_layers": str,
}


class _PassOn(argparse.Action):
    """A flag of pretrain.py: kept as it is for its parser, which says what is wrong with it."""

    def __call__(self, parser: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        given = f"{option_string}={values}" if isinstance(values, str) else str(option_string)
        namespace.flags.append(given)  # type: ignore[attr-defined]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line, and under `flags` those of pretrain.py. Raises UsageError."""
    parser = ToolParser("convert_checkpoint.py", __doc__)
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--from", dest="source", choices=FORMATS, help="the format of FILE")
    direction.add_argument("--to", dest="target", choices=WRITTEN, help="the format to write")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="what to convert (with --from)")
    parser.add_argument("--load", type=Path, metavar="RUN", help="the run folder to convert (with --to)")
    parser.add_argument("--output", type=Path, required=True, help="what to make: a run folder, or a file (with --to)")
    help_text = (
        "JSON list of tokens, an object with it under `vocabulary`, the P.json of prepared data or the state.json of a "
        "run's step (with --from); else tokens are numbers, and nothing can check that data fits"
    )
    parser.add_argument("--vocabulary", type=Path, metavar="FILE", help=help_text)
    parser.add_argument(COMPARE, action="store_true", help=f"compare tensors alone (with --to {' or '.join(COMPARED)})")
    help_text = "the card of tools/evaluate.py --json FILE, for the model card (with --to huggingface)"
    parser.add_argument(CARD, type=Path, metavar="FILE", help=help_text)
    help_text = "for the model card, such as apache-2.0; else it has none (with --to huggingface)"
    parser.add_argument(LICENSE, metavar="ID", help=help_text)
    parser.set_defaults(flags=[])
    passed_on: Any = {"action": _PassOn, "dest": "flags", "help": argparse.SUPPRESS}
    parser.add_argument("--recipe", **passed_on)
    for name, kind in GRID.items():
        parser.add_argument(flag(name), type=kind, metavar="X", help=argparse.SUPPRESS)
    for section in (ModelConfig, OptimizerConfig, TrainingConfig):
        for name, types in field_types(section).items():
            parser.add_argument(flag(name), **passed_on, nargs=0 if types == (bool,) else None)
            if types == (bool,):
                parser.add_argument(flag(f"no_{name}"), **passed_on, nargs=0)
    options = parser.parse_args(argv)
    _check_options(parser, options)
    return options


def _check_options(parser: ToolParser, options: argparse.Namespace) -> None:
    """Each direction has its own options; those of the other would be ignored."""
    needed, other = ("file", "load") if options.source else ("load", "file")
    names = {"file": "FILE", "load": "--load RUN"}
    direction = f"--from {options.source}" if options.source else f"--to {options.target}"
    if getattr(options, needed) is None:
        parser.error(f"{direction}: {names[needed]} is missing")
    ignored = [names[other]] if getattr(options, other) is not None else []
    given = [one.partition("=")[0] for one in options.flags]
    if options.target != shards.FORMAT:
        ignored += [flag(name) for name in GRID if getattr(options, name) is not None]
    if options.target not in COMPARED and options.no_compare_logits:
        ignored.append(COMPARE)
    if options.target != export.FORMAT:
        cards = {CARD: options.evaluation_card, LICENSE: options.license}
        ignored += [name for name, value in cards.items() if value is not None]
    if options.source == export.FORMAT:
        model = {flag(name) for name in field_types(ModelConfig)}
        ignored += [one for one in given if one in model]
    elif options.source != adaptive_span.FORMAT:
        ignored += given
    if options.source != adaptive_span.FORMAT and options.vocabulary is not None:
        ignored.append("--vocabulary")
    if ignored:
        parser.error(f"{direction}: {ignored[0]} has no effect")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse_arguments(sys.argv[1:] if argv is None else argv)
        check_new(options.output)
        check_outside("--output", options.output)
        if options.source:
            run, explicit = parse(options.flags)
            given = Given(run, explicit, options.vocabulary)
            print(FORMATS[options.source].read(options.file, options.output, given))
        else:
            grid = {name: value for name in GRID if (value := getattr(options, name)) is not None}
            compare, card, license = not options.no_compare_logits, options.evaluation_card, options.license
            wanted, saved = Wanted(ParallelConfig(**grid), compare, card, license), read_run(options.load)
            for line in saved.skipped:
                print(f"passed over {line}", file=sys.stderr)
            with told_if_gone(saved.step_folder):
                print(WRITTEN[options.target](saved, options.output, wanted))
    except UsageError as error:
        return refuse(error)
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_program(main)
