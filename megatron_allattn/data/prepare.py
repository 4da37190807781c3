"""Text → token files: the streaming preparation behind tools/prepare_data.py and the default corpus.

Two passes over the text, each in chunks, so memory does not grow with it. The first checks it, hashes it, counts its
tokens and finds its characters; only then is anything written. The second writes the tokens. Splits are contiguous
ranges of tokens in the order of the documents, so a boundary may cut a document: then its parts are a document in each.
A document is one sequence (more if it is longer than 2^31 − 1 tokens).

The unigram entropy of tokens with counts n_i and sum n is −Σ n_i/n · log2(n_i/n), in bits per token: what a model pays
that knows only how often each token occurs.
"""

import hashlib
import itertools
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_allattn.config.errors import usage_error
from megatron_allattn.data import corpora, manifest, staging
from megatron_allattn.data.corpora import Corpus, Document
from megatron_allattn.data.indexed import IndexedWriter, Tokens, dtype_for_vocabulary
from megatron_allattn.data.manifest import InputRecord, Manifest, SplitRecord
from megatron_allattn.data.splits import SPLITS, split_boundaries
from megatron_allattn.data.tokenizers import NUM_CODE_POINTS, ByteTokenizer, CharTokenizer, Tokenizer, code_points

CHUNK_BYTES = 2**20
DEFAULT_SPLIT = "90,5,5"
Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What to prepare: a corpus, the prefix of the files to write, and how.

    tokenizer: "byte" or "char" (the sorted characters of the corpus), or a CharTokenizer to use as it is ·
    raw_bytes: take any bytes, not only text (byte tokenizer only) · existing: what to do about files that are there
    already; "reuse" takes complete data as it is, also from a process that is at it now, and replaces incomplete data.
    """

    corpus: Corpus
    prefix: Path
    tokenizer: Literal["byte", "char"] | CharTokenizer
    split: str = DEFAULT_SPLIT
    raw_bytes: bool = False
    existing: Literal["refuse", "overwrite", "reuse"] = "refuse"
    chunk_bytes: int = CHUNK_BYTES

    def total_work(self) -> int:
        """Bytes that `prepare` will have reported to its `progress` at the end."""
        return 2 * sum(document.path.stat().st_size for document in self.corpus.documents)


def prepare(job: Preparation, progress: Progress = lambda num_bytes: None) -> Manifest:
    """Write P_{train,valid,test}.{bin,idx} and P.json; all of them or none.

    `progress` is called with the bytes done since the last call. UsageError: text, split, vocabulary or output refused.
    """
    _check_output(job)
    with staging.staging_folder(job.prefix, wait=job.existing == "reuse") as folder:
        if job.existing == "reuse" and (present := manifest.read_manifest(job.prefix)):
            return present
        present_bytes = _Survey.presence() if job.tokenizer == "char" else None
        surveys = [_Survey.of(document, job, present_bytes, progress) for document in job.corpus.documents]
        tokenizer = _tokenizer(job, present_bytes)
        boundaries = split_boundaries(job.split, sum(survey.record.tokens for survey in surveys))
        _check_space(job.prefix, boundaries[-1] * dtype_for_vocabulary(tokenizer.vocab_size).itemsize)
        splits, counts = _write_splits(folder / job.prefix.name, job, tokenizer, boundaries, surveys, progress)
        result = Manifest(
            tokenizer=tokenizer,
            dtype=dtype_for_vocabulary(tokenizer.vocab_size).name,
            corpus=job.corpus.description,
            split=job.split,
            tokens=boundaries[-1],
            bytes=sum(survey.text_bytes for survey in surveys),
            documents=len(surveys),
            skipped_documents=job.corpus.num_skipped,
            unigram_entropy_bits=unigram_entropy(counts),
            splits=splits,
            files={n: manifest.describe_file(p) for n, p in manifest.data_paths(folder / job.prefix.name).items()},
            inputs=tuple(survey.record for survey in surveys),
        )
        result.write(manifest.manifest_path(folder / job.prefix.name))
        staging.publish(folder, job.prefix)
    return result


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in bits per token of tokens that occur `counts` [vocabulary] times; there must be at least one."""
    occurring = counts[counts > 0]
    total = int(occurring.sum())
    return math.fsum(n / total * math.log2(total / n) for n in occurring.tolist())


def default_corpus() -> Path:
    """Prefix of the standard library's prepared sources (bytes, 90,5,5) in the user's cache folder, made on first use.

    The folder is $XDG_CACHE_HOME/megatron_allattn, else ~/.cache/megatron_allattn. Of several processes that come at
    once, one prepares and the others wait for it and use what it made.
    """
    prefix = cache_folder() / f"stdlib-byte-{platform.python_version()}-{manifest.VERSION}"
    if manifest.read_manifest(prefix) is None:
        corpus = corpora.standard_library()
        prepare(Preparation(corpus=corpus, prefix=prefix, tokenizer="byte", existing="reuse"))
    return prefix


def cache_folder() -> Path:
    """Where this program keeps what it can make again; not made by this function."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and not Path(base).is_absolute():
        raise usage_error("XDG_CACHE_HOME", base, "is not an absolute path", "set it to one, or unset it")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "megatron_allattn"
    except RuntimeError:
        raise usage_error("HOME", "", "no home folder is known", "set HOME or XDG_CACHE_HOME") from None


@dataclass(frozen=True)
class _Survey:
    """What the first pass found of a document."""

    record: InputRecord
    text_bytes: int

    @staticmethod
    def presence() -> npt.NDArray[np.bool_]:
        """No character seen yet [NUM_CODE_POINTS]."""
        return np.zeros(NUM_CODE_POINTS, np.bool_)

    @classmethod
    def of(
        cls, document: Document, job: Preparation, present: npt.NDArray[np.bool_] | None, progress: Progress
    ) -> "_Survey":
        """Read a document through; marks its characters in `present`, if given."""
        digest, text_bytes, tokens = hashlib.sha256(), 0, 0
        for chunk in _pieces(document, job, digest.update):
            if job.tokenizer == "byte":
                tokens += len(chunk)
            else:
                codes = code_points(chunk)
                tokens += len(codes)
                if present is not None:
                    present[codes] = True
            text_bytes += len(chunk)
            progress(len(chunk))
        size = document.path.stat().st_size
        if not tokens:
            raise usage_error("--input", document.name, "holds no text", "leave it out")
        record = InputRecord(
            name=document.name, bytes=size, sha256=digest.hexdigest(), tokens=tokens, byte_order_mark=text_bytes < size
        )
        return cls(record, text_bytes)


def _pieces(document: Document, job: Preparation, digest: Callable[[bytes], None]) -> Iterator[bytes]:
    """The document in pieces as its tokenizer wants it; `digest` gets the file's own bytes."""
    chunks = corpora.read_bytes(document, job.chunk_bytes)
    return _tee(chunks, digest) if job.raw_bytes else corpora.whole_characters(document, _tee(chunks, digest))


def _tee(chunks: Iterator[bytes], also: Callable[[bytes], None]) -> Iterator[bytes]:
    for chunk in chunks:
        also(chunk)
        yield chunk


def _tokenizer(job: Preparation, present: npt.NDArray[np.bool_] | None) -> Tokenizer:
    if present is not None:
        return CharTokenizer.from_presence(present)
    return job.tokenizer if isinstance(job.tokenizer, CharTokenizer) else ByteTokenizer()


def _write_splits(
    prefix: Path,
    job: Preparation,
    tokenizer: Tokenizer,
    boundaries: list[int],
    surveys: list[_Survey],
    progress: Progress,
) -> tuple[dict[str, SplitRecord], npt.NDArray[np.int64]]:
    """The second pass: tokens into their splits' files. Returns the splits' records and all counts [vocabulary]."""
    dtype, counts = dtype_for_vocabulary(tokenizer.vocab_size), np.zeros((3, tokenizer.vocab_size), np.int64)
    documents, position = [0, 0, 0], 0
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(manifest.split_prefix(prefix, name), dtype)) for name in SPLITS]
        for document, survey in zip(job.corpus.documents, surveys, strict=True):
            touched: dict[int, None] = {}
            for tokens in _encoded(document, survey, job, tokenizer, progress):
                for split, part in _cut(tokens, position, boundaries):
                    writers[split].append(part)
                    counts[split] += np.bincount(part, minlength=tokenizer.vocab_size)
                    touched[split] = None
                position += len(tokens)
            for split in touched:
                writers[split].end_document()
                documents[split] += 1
    records = {
        name: SplitRecord(
            tokens=boundaries[split + 1] - boundaries[split],
            documents=documents[split],
            unigram_entropy_bits=unigram_entropy(counts[split]) if counts[split].any() else None,
        )
        for split, name in enumerate(SPLITS)
    }
    return records, counts.sum(axis=0)


def _encoded(
    document: Document, survey: _Survey, job: Preparation, tokenizer: Tokenizer, progress: Progress
) -> Iterator[Tokens]:
    """The document's tokens in pieces; refuses a file that is no longer the one surveyed."""
    digest, offset = hashlib.sha256(), survey.record.bytes - survey.text_bytes
    for chunk in _pieces(document, job, digest.update):
        yield tokenizer.encode(chunk, source=document.name, offset=offset)
        offset += len(chunk)
        progress(len(chunk))
    if digest.hexdigest() != survey.record.sha256:
        raise usage_error("--input", document.name, "changed while it was read", "prepare it when nothing writes to it")


def _cut(tokens: Tokens, position: int, boundaries: list[int]) -> Iterator[tuple[int, Tokens]]:
    """Parts of `tokens`, which start at `position` of the corpus, with the splits they belong to."""
    for split, (start, end) in enumerate(itertools.pairwise(boundaries)):
        part = tokens[max(start - position, 0) : max(end - position, 0)]
        if len(part):
            yield split, part


def _check_output(job: Preparation) -> None:
    """Nothing there is overwritten unasked, and never an input."""
    prefix = job.prefix
    if not prefix.name or prefix.is_dir():
        raise usage_error("--output-prefix", prefix, "is a folder", f"add a name, for example {prefix / 'corpus'}")
    outputs = [manifest.manifest_path(prefix), *manifest.data_paths(prefix).values()]
    existing = [path for path in outputs if path.exists()]
    if existing and job.existing == "refuse":
        raise usage_error("--output-prefix", prefix, f"{existing[0]} exists already", "choose another, or --overwrite")
    inputs = {document.path.resolve() for document in job.corpus.documents}
    for path in existing:
        if path.resolve() in inputs:
            raise usage_error("--output-prefix", prefix, f"would overwrite the input {path}", "choose another prefix")


def _check_space(prefix: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(prefix.parent).free
    if free < num_bytes:
        rule = f"needs {num_bytes:,} bytes, {free:,} are free in {prefix.parent}"
        raise usage_error("--output-prefix", prefix, rule, "choose another disk")
