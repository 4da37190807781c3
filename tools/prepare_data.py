"""Text to tokens: writes P_{train,valid,test}.{bin,idx} (Megatron-LM's format) and the manifest P.json, all or nothing.

byte: a token is a byte · char: a token is a character of the text · stdlib: the Python standard library's own sources,
as bytes. Each input file is a document; the splits are contiguous ranges of tokens, so a boundary may cut a document.
Text must be UTF-8; a byte-order mark at the start of a file is dropped, line ends are kept. Train with --data-path P.
"""

import argparse
import difflib
import signal
import sys
from pathlib import Path
from typing import Literal, NoReturn

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.data.corpora import files_corpus, standard_library
from megatron_allattn.data.manifest import Manifest
from megatron_allattn.data.prepare import DEFAULT_SPLIT, Preparation, prepare
from megatron_allattn.data.tokenizers import CharTokenizer, tokenizer_from_file

FLAGS = ("--input", "--output-prefix", "--split", "--tokenizer-model", "--raw-bytes", "--overwrite")
KINDS = ("byte", "char", "stdlib")
ONLY_WITH = {"--input": ("byte", "char"), "--tokenizer-model": ("char",), "--raw-bytes": ("byte",)}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(argv: list[str]) -> argparse.Namespace:
    """Flags of the command line; UsageError for unknown, repeated or ineffective ones."""
    parser = Parser(prog="prepare_data.py", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kind", choices=KINDS, help="what to make tokens of")
    parser.add_argument("--input", nargs="+", metavar="FILE", help="text files, a document each, in this order")
    parser.add_argument("--output-prefix", metavar="P", required=True, help="prefix of the files to write")
    parser.add_argument(
        "--split", default=DEFAULT_SPLIT, help=f"weights of train, valid, test (default {DEFAULT_SPLIT})"
    )
    parser.add_argument(
        "--tokenizer-model", type=Path, metavar="JSON", help="char: use this vocabulary (or a P.json's)"
    )
    parser.add_argument(
        "--raw-bytes", action="store_true", help="byte: take any bytes as they are, not only UTF-8 text"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there already")
    given = [word.partition("=")[0] for word in argv if word.startswith("--")]
    for flag in given:
        if flag not in (*FLAGS, "--help"):
            near = difflib.get_close_matches(flag, FLAGS, n=1)
            raise usage_error("flag", flag, "is unknown", f"did you mean {near[0]}?" if near else "see --help")
        if given.count(flag) > 1:
            raise usage_error("flag", flag, "is given twice", "give it once (files together after one --input)")
    # "--split -1,1,0" is a bad value, not a further flag: joined, so that the split itself is refused
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--split" and not word.startswith("--"):
            words[-1] = f"--split={word}"
        else:
            words.append(word)
    options = parser.parse_args(words)
    for flag, kinds in ONLY_WITH.items():
        if flag in given and options.kind not in kinds:
            raise usage_error(
                "flag", flag, f"has no effect with {options.kind}, only with {' and '.join(kinds)}", "leave it out"
            )
    if options.kind != "stdlib" and not options.input:
        raise usage_error(
            "flag", "--input", f"is missing, {options.kind} makes tokens of text files", "add --input FILE…"
        )
    if options.output_prefix.endswith(("/", "/.")) or not options.output_prefix:
        raise usage_error("--output-prefix", options.output_prefix, "is a folder", "add a name, such as data/corpus")
    return options


def job_of(options: argparse.Namespace) -> Preparation:
    """What the command line asks for."""
    corpus = standard_library() if options.kind == "stdlib" else files_corpus(options.input)
    tokenizer: Literal["byte", "char"] | CharTokenizer = "char" if options.kind == "char" else "byte"
    if options.tokenizer_model is not None:
        model = tokenizer_from_file(options.tokenizer_model)
        if not isinstance(model, CharTokenizer):
            rule = f"describes a {model.name} tokenizer, expected char"
            raise usage_error("--tokenizer-model", options.tokenizer_model, rule, "give a char vocabulary")
        tokenizer = model
    return Preparation(
        corpus=corpus,
        prefix=Path(options.output_prefix),
        tokenizer=tokenizer,
        split=options.split,
        raw_bytes=options.raw_bytes,
        existing="overwrite" if options.overwrite else "refuse",
    )


def report(prefix: Path, made: Manifest) -> None:
    """What was made, and how to train on it."""
    name, size = made.tokenizer.name, made.tokenizer.vocab_size
    documents = f"{made.documents:,} document{'s' if made.documents > 1 else ''}"
    print(f"{prefix}: {made.tokens:,} tokens ({name}, vocabulary of {size}) of {documents}, {made.corpus}")
    for split, record in made.splits.items():
        entropy = (
            ""
            if record.unigram_entropy_bits is None
            else f", unigram entropy {record.unigram_entropy_bits:.4f} bits per token"
        )
        print(f"  {split:5} {record.tokens:>14,} tokens{entropy}")
    print(f"  all   {made.tokens:>14,} tokens, unigram entropy {made.unigram_entropy_bits:.4f} bits per token")
    if marks := sum(record.byte_order_mark for record in made.inputs):
        print(f"  dropped the byte-order mark at the start of {marks} file(s)")
    if made.skipped_documents:
        print(f"  left out {made.skipped_documents} file(s) that are not UTF-8 text")
    print(f"train on it: python pretrain.py --data-path {prefix}")


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 wrong usage or input, 1 anything else (a full disk); errors are one line."""
    try:
        options = parse(argv)
        job = job_of(options)
        hidden = not sys.stderr.isatty()
        with tqdm(total=job.total_work(), unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
            made = prepare(job, bar.update)
        report(job.prefix, made)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {error.filename or options.output_prefix}: {error.strerror}; nothing was written", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the clean-up runs
    sys.exit(main(sys.argv[1:]))
