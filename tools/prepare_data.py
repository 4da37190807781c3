"""Text to tokens: writes P_{train,valid,test}.{bin,idx} (Megatron-LM's format) and the manifest P.json, all or nothing.

    python tools/prepare_data.py byte --input books.txt notes.txt --output-prefix data/text
    python tools/prepare_data.py text8 --output-prefix data/text8

byte: a token is a byte · char: a token is a character of the text · word: a token is what white space separates, in a
vocabulary of the training split by descending frequency · sentencepiece: a token is a piece of a SentencePiece model,
learned from the training split or given · stdlib: the Python standard library's own sources, as bytes · enwik8, text8,
wikitext-103: the corpora of the paper (see the end).

Each input file is a document. One text is cut into contiguous splits: byte and char at any byte or character, so that
a boundary may cut a document and a line; word and sentencepiece at the nearest start of a line. Text must be UTF-8; a
byte-order mark at the start of a file is dropped. Only \\n ends a line. Train with --data-path P.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config.reporting import Output, run_program, tell_early_ends

if __name__ == "__main__":
    tell_early_ends()  # numpy is loaded next

from tqdm import tqdm

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.tool_flags import ToolParser
from megatron_allattn.data.corpora import Corpus, files_corpus, standard_library
from megatron_allattn.data.manifest import Manifest
from megatron_allattn.data.partial import DownloadError
from megatron_allattn.data.prepare import DEFAULT_SPLIT, Preparation, cache_folder, prepare
from megatron_allattn.data.published import (
    PUBLISHED,
    Archive,
    fetched_archive,
    given_archive,
    preparation,
    wanted_sha256,
)
from megatron_allattn.data.subwords import ModelType
from megatron_allattn.data.tokenizers import (
    NEWLINES,
    ByteLearner,
    ByteTokenizer,
    CharLearner,
    Learner,
    Newline,
    SubwordLearner,
    Tokenizer,
    WordLearner,
    tokenizer_from_file,
)

PAPER = """
The paper's corpora are downloaded once (a download that was cut off goes on where it was), or read from --archive, and
prepared from their zip without unpacking it: enwik8 and text8 cut into 90, 5 and 5 million bytes, wikitext-103 as it is
split. With --newline eos, the default and what the paper's code does, a line end is <eos>, and the last line of a split
has one too: 205 symbols (enwik8), 28 (text8), 267,735 words. Published figures differ on that, hence the option. The
archive's SHA-256 and the counts are checked; another archive of the same structure needs --archive-sha256, and P.json
says so.
"""

TEXT_KINDS = ("byte", "char", "word", "sentencepiece")
PAPER_KINDS = tuple(PUBLISHED)
KINDS = (*TEXT_KINDS, "stdlib", *PAPER_KINDS)
VALUED = (
    "--split",
    "--min-frequency",
    "--vocab-size",
    "--sentencepiece-sentences",
    "--unk-id",
    "--bos-id",
    "--eos-id",
    "--pad-id",
)
# flag → the kinds it has an effect with; flags that are not here have one with all
ONLY_WITH = {
    "--input": TEXT_KINDS,
    "--valid-input": TEXT_KINDS,
    "--test-input": TEXT_KINDS,
    "--split": (*TEXT_KINDS, "stdlib"),
    "--newline": (*TEXT_KINDS, *PAPER_KINDS),
    "--tokenizer-model": TEXT_KINDS,
    "--raw-bytes": ("byte",),
    "--compact-vocabulary": ("byte",),
    "--min-frequency": ("word",),
    "--vocab-size": ("sentencepiece",),
    "--sentencepiece-model-type": ("sentencepiece",),
    "--sentencepiece-sentences": ("sentencepiece",),
    "--unk-id": ("sentencepiece",),
    "--bos-id": ("sentencepiece",),
    "--eos-id": ("sentencepiece",),
    "--pad-id": ("sentencepiece",),
    "--archive": PAPER_KINDS,
    "--archive-sha256": PAPER_KINDS,
    "--mirror": PAPER_KINDS,
    "--download-dir": PAPER_KINDS,
    "--download-only": PAPER_KINDS,
}
# how a vocabulary is learned
LEARNING = tuple(flag for flag, kinds in ONLY_WITH.items() if set(kinds) <= {"word", "sentencepiece"})
# flag → flags that have no effect beside it
WITHOUT_EFFECT = {
    "--tokenizer-model": (*LEARNING, "--compact-vocabulary"),
    "--valid-input": ("--split",),
    "--test-input": ("--split",),
    "--archive": ("--mirror", "--download-dir", "--download-only"),
    "--download-only": ("--output-prefix", "--newline", "--overwrite"),
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Flags of the command line; UsageError for unknown, repeated or ineffective ones."""
    parser = _parser()
    # "--split -1,1,0" is a bad value, not a further flag: joined, so that the value itself is refused
    words: list[str] = []
    for word in argv:
        if words and words[-1] in VALUED and word[:1] == "-" and word[1:2].isdigit():
            words[-1] = f"{words[-1]}={word}"
        else:
            words.append(word)
    options = parser.parse_args(words)
    _check_effects(options, parser.given)
    if options.output_prefix is None and not options.download_only:
        raise usage_error("flag", "--output-prefix", "is missing", "add --output-prefix P, where to write the tokens")
    if options.output_prefix is not None and (options.output_prefix or "/").endswith(("/", "/.")):
        raise usage_error("--output-prefix", options.output_prefix, "is a folder", "add a name, such as data/corpus")
    return options


def _parser() -> ToolParser:
    parser = ToolParser("prepare_data.py", __doc__)
    parser.epilog = PAPER
    add: Any = parser.add_argument
    add("kind", choices=KINDS, help="what to make tokens of")
    add("--input", nargs="+", metavar="FILE", help="text files, a document each, in this order")
    add("--valid-input", nargs="+", metavar="FILE", help="validation text; then --input is training text, not split")
    add("--test-input", nargs="+", metavar="FILE", help="test text, likewise")
    add("--output-prefix", metavar="P", help="prefix of the files to write")
    add("--split", default=DEFAULT_SPLIT, help=f"weights of train, valid, test (default {DEFAULT_SPLIT})")
    add(
        "--newline",
        choices=NEWLINES,
        help="a line end is <eos> (default of words and the paper's corpora), a symbol, or nothing",
    )
    add("--tokenizer-model", type=Path, metavar="FILE", help="use this vocabulary (JSON, or a P.json's) or FILE.model")
    add("--raw-bytes", action="store_true", help="take any bytes as they are, not only UTF-8 text")
    add("--compact-vocabulary", action="store_true", help="ids for only the bytes that occur")
    add("--min-frequency", type=int, metavar="N", help="words that occur less often in training become <unk>")
    add("--vocab-size", type=int, metavar="N", help="number of pieces to learn")
    add("--sentencepiece-model-type", choices=get_args(ModelType), help="how to learn pieces (default unigram)")
    add("--sentencepiece-sentences", type=int, metavar="N", help="learn pieces from about N lines, evenly spread")
    for name, default in (("unk", "0"), ("bos", "none"), ("eos", "1 with --newline eos, else none"), ("pad", "none")):
        add(f"--{name}-id", type=int, metavar="ID", help=f"id of this special piece, -1 for none (default {default})")
    add("--archive", type=Path, metavar="ZIP", help="the corpus' zip, which is here already; nothing is downloaded")
    add("--archive-sha256", metavar="HASH", help="another archive is meant: the one with this SHA-256, or any: none")
    add(
        "--mirror",
        nargs="+",
        metavar="URL",
        help="addresses (of the zip or its folder) to try instead of the known ones",
    )
    add("--download-dir", type=Path, metavar="DIR", help="where zips are kept (default: the user's cache folder)")
    add("--download-only", action="store_true", help="bring the zip here, check it and print its path; prepare nothing")
    add("--overwrite", action="store_true", help="replace files that are there already")
    return parser


def _check_effects(options: argparse.Namespace, given: Collection[str]) -> None:
    """Refuse flags that would change nothing, and a missing one."""
    for flag, kinds in ONLY_WITH.items():
        if flag in given and options.kind not in kinds:
            rule = f"has no effect with {options.kind}, only with {' and '.join(kinds)}"
            raise usage_error("flag", flag, rule, "leave it out")
    for flag, others in WITHOUT_EFFECT.items():
        for other in others:
            if flag in given and other in given:
                raise usage_error("flag", other, f"has no effect with {flag}", "leave one of them out")
    if options.kind in TEXT_KINDS and not options.input:
        rule = f"is missing, {options.kind} makes tokens of text files"
        raise usage_error("flag", "--input", rule, "add --input FILE…")
    if options.kind == "sentencepiece" and not options.tokenizer_model and options.vocab_size is None:
        rule = "is missing: how many pieces to learn"
        raise usage_error("flag", "--vocab-size", rule, "add --vocab-size N, or --tokenizer-model FILE.model")


def tokenizer_of(options: argparse.Namespace) -> Tokenizer | Learner:
    """The tokenizer that was asked for, or how to learn it."""
    if options.tokenizer_model is not None:
        return _given_tokenizer(options)
    newline: Newline = options.newline or ("eos" if options.kind == "word" else "symbol")
    learned = {flag.removeprefix("--").replace("-", "_") for flag in LEARNING}
    settings: dict[str, Any] = {
        name.removeprefix("sentencepiece_"): value
        for name, value in vars(options).items()
        if name in learned and value is not None
    }
    match options.kind:
        case "word":
            return WordLearner(newline=newline, **settings)
        case "sentencepiece":
            return SubwordLearner(newline=newline, **settings)
        case "char":
            return CharLearner(newline=newline)
    return ByteLearner(newline=newline) if options.compact_vocabulary else ByteTokenizer(newline=newline)


def _given_tokenizer(options: argparse.Namespace) -> Tokenizer:
    """The tokenizer of --tokenizer-model; it is of the kind wanted, and --newline does not contradict it."""
    model = tokenizer_from_file(options.tokenizer_model, options.newline or "symbol")
    if model.name != options.kind:
        rule = f"describes a {model.name} tokenizer, expected {options.kind}"
        raise usage_error("--tokenizer-model", options.tokenizer_model, rule, f"give a {options.kind} vocabulary")
    if options.newline not in (None, model.newline):
        rule = f"contradicts {options.tokenizer_model}, which says {model.newline}"
        raise usage_error("--newline", options.newline, rule, "leave it out")
    return model


def text_job(options: argparse.Namespace) -> Preparation:
    """Preparation of the user's files, or of the standard library."""

    def corpus(flag: str) -> Corpus | None:
        files = getattr(options, flag.removeprefix("--").replace("-", "_"))
        return files_corpus(files, flag) if files else None

    return Preparation(
        corpus=corpus("--input") or standard_library(),
        valid=corpus("--valid-input"),
        test=corpus("--test-input"),
        prefix=Path(options.output_prefix),
        tokenizer=tokenizer_of(options),
        split=options.split,
        raw_bytes=options.raw_bytes,
        existing="overwrite" if options.overwrite else "refuse",
    )


def archive_of(options: argparse.Namespace) -> Archive:
    """The archive of a corpus of the paper: given, or brought here now."""
    corpus = PUBLISHED[options.kind]
    sha256 = wanted_sha256(corpus, options.archive_sha256)
    if options.archive:
        return given_archive(corpus, options.archive, sha256)
    folder = options.download_dir or cache_folder() / "downloads"
    with tqdm(unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        def notify(line: str) -> None:
            bar.write(line, file=sys.stderr)

        return fetched_archive(corpus, folder, sha256, options.mirror or (), progress, notify)


def paper_job(options: argparse.Namespace) -> Preparation:
    """Preparation of a corpus of the paper."""
    newline: Newline = options.newline or "eos"
    corpus, archive, prefix = PUBLISHED[options.kind], archive_of(options), Path(options.output_prefix)
    return preparation(corpus, archive, prefix, newline, overwrite=options.overwrite)


# kind → what the command line asks for
JOBS: dict[str, Callable[[argparse.Namespace], Preparation]] = {
    **dict.fromkeys((*TEXT_KINDS, "stdlib"), text_job),
    **dict.fromkeys(PAPER_KINDS, paper_job),
}


def report(prefix: Path, made: Manifest) -> None:
    """What was made, and how to train on it."""
    name, size = made.tokenizer.name, made.tokenizer.vocab_size
    documents = f"{made.documents:,} document{'s' if made.documents > 1 else ''}"
    print(f"{prefix}: {made.tokens:,} tokens ({name}, vocabulary of {size}) of {documents}, {made.corpus}")
    for split, record in made.splits.items():
        entropy = record.unigram_entropy_bits
        counts = ", ".join(f"{name} {getattr(record, name):,}" for name in ("bytes", "characters", "words", "lines"))
        rest = "" if entropy is None else f" (text: {counts}), unigram entropy {entropy:.4f} bits per token"
        print(f"  {split:5} {record.tokens:>14,} tokens{rest}")
    print(f"  all   {made.tokens:>14,} tokens, unigram entropy {made.unigram_entropy_bits:.4f} bits per token")
    if marks := sum(record.byte_order_mark for record in made.inputs):
        print(f"  dropped the byte-order mark at the start of {marks} file(s)")
    if made.skipped_documents:
        print(f"  left out {made.skipped_documents} file(s) that are not UTF-8 text")
    for note in made.notes:
        print(f"  note: {note}")
    if made.splits["train"].tokens:
        print(f"train on it: python pretrain.py --data-path {shlex.quote(str(prefix))}")


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 wrong usage or input, 1 anything else (a full disk); errors are one line."""
    try:
        options = parse(argv)
        if options.download_only:
            print(archive_of(options).path)
            return 0
        job = JOBS[options.kind](options)
        hidden = not sys.stderr.isatty()
        with tqdm(total=job.total_work(), unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
            made = prepare(job, bar.update)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DownloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"error: {error.filename or options.output_prefix}: {error.strerror}; nothing was written", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    report(job.prefix, made)
    sys.stdout.flush()
    lost = sys.stdout.failure if isinstance(sys.stdout, Output) else None
    if lost is not None and not isinstance(lost, BrokenPipeError):
        print(f"{job.prefix}: the data is complete, only this report could not be printed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the clean-up runs
    run_program(lambda: main(sys.argv[1:]))
