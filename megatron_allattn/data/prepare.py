"""Text → token files: the streaming preparation behind tools/prepare_data.py and the default corpus.

The text is read two or three times, each time in chunks, so memory does not grow with it. The first pass checks, hashes
and counts it; the second, if the vocabulary is to be made of the text, learns it; only then is anything written: the
last pass writes the tokens. Which text belongs to which split is settled before (data/parts.py). What is in one file
and one split is encoded on its own, a document of one sequence (more if it is longer than 2^31 − 1 tokens).

The unigram entropy of tokens with counts n_i and sum n is −Σ n_i/n · log2(n_i/n), in bits per token: what a model pays
that knows only how often each token occurs.
"""

import hashlib
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.data import corpora, manifest, staging
from megatron_allattn.data.corpora import Corpus, Document
from megatron_allattn.data.indexed import IndexedWriter, dtype_for_vocabulary
from megatron_allattn.data.manifest import InputRecord, Manifest, SplitRecord
from megatron_allattn.data.notes import notes_on
from megatron_allattn.data.parts import Part, Source, sources_of_files, sources_of_text
from megatron_allattn.data.pieces import TextCounter, TextCounts, TooLongError, ended
from megatron_allattn.data.splits import SPLITS, split_weights
from megatron_allattn.data.tokenizers import ByteTokenizer, CharLearner, Learner, Tokenizer

CHUNK_BYTES = 2**16  # larger ones are no faster, and leave the heap in shreds that grow with the text
DEFAULT_SPLIT = "90,5,5"
BY_FILES = "by files"
Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What to prepare, the prefix of the files to write, and how.

    corpus: the whole text, which `split` cuts, or the training text if `valid` or `test` is given (then `split` is not
    used, and a split without a corpus is empty) · tokenizer: one to use as it is, or how to learn one; "byte" and
    "char" are all bytes and the sorted characters of the text · raw_bytes: take any bytes, not only text (byte
    tokenizers only) · existing: what to do about files that are there already; "reuse" takes complete data as it is,
    also from a process that is at it now, and replaces incomplete data · source: where the text comes from, for the
    manifest · check: is shown the manifest before anything is published; gives further notes for it, or a UsageError.

    The text is UTF-8 in regular files. The paper's data: enwik8 is ByteLearner(newline="eos") and text8
    CharLearner(newline="eos"), each with the split "90000000,5000000,5000000" (cuts are exact: bytes, characters);
    wikitext-103 is WordLearner(newline="eos") with three corpora.
    """

    corpus: Corpus
    prefix: Path
    tokenizer: Literal["byte", "char"] | Tokenizer | Learner
    valid: Corpus | None = None
    test: Corpus | None = None
    split: str = DEFAULT_SPLIT
    raw_bytes: bool = False
    existing: Literal["refuse", "overwrite", "reuse"] = "refuse"
    source: Mapping[str, Any] | None = None
    check: Callable[[Manifest], tuple[str, ...]] | None = None
    chunk_bytes: int = CHUNK_BYTES

    @property
    def maker(self) -> Tokenizer | Learner:
        """The tokenizer or learner that `tokenizer` means."""
        named: dict[object, Tokenizer | Learner] = {"byte": ByteTokenizer(), "char": CharLearner()}
        return named[self.tokenizer] if isinstance(self.tokenizer, str) else self.tokenizer

    @property
    def by_weights(self) -> bool:
        """Whether one corpus is cut."""
        return self.valid is None and self.test is None

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """The corpora there are, in the order of the splits."""
        return tuple(corpus for corpus in (self.corpus, self.valid, self.test) if corpus)

    @property
    def documents(self) -> tuple[Document, ...]:
        """All documents, in the order of the splits."""
        return tuple(document for corpus in self.corpora for document in corpus.documents)

    def total_work(self) -> int:
        """Bytes that `prepare` will have reported to its `progress` at the end."""
        return (3 if isinstance(self.maker, Learner) else 2) * self.num_bytes()

    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(document.num_bytes for document in self.documents)


def prepare(job: Preparation, progress: Progress = lambda num_bytes: None) -> Manifest:
    """Write P_{train,valid,test}.{bin,idx} and P.json; all of them or none.

    `progress` is called with the bytes done since the last call. UsageError: text, split, vocabulary or output refused.
    """
    assert job.maker.name == "byte" or not job.raw_bytes, f"raw bytes for {job.maker.name}"
    _check_output(job)
    with staging.staging_folder(job.prefix, wait=job.existing == "reuse") as folder:
        if job.existing == "reuse" and (present := manifest.read_manifest(job.prefix)):
            return present
        sources = _sources(job)
        counters = tuple(TextCounter() for _ in SPLITS)
        surveys = [_Survey.of(source, job, counters, progress) for source in sources]
        texts = [counter.counts() for counter in counters]
        tokenizer = _tokenizer(job, sources, texts, progress)
        dtype = dtype_for_vocabulary(tokenizer.vocab_size)
        _check_space(job.prefix, _tokens_at_least(texts, tokenizer) * dtype.itemsize)
        written = _write_splits(folder / job.prefix.name, job, tokenizer, sources, surveys, progress)
        splits = {name: written.record(number, texts[number]) for number, name in enumerate(SPLITS)}
        inputs = tuple(survey.record(tokens) for survey, tokens in zip(surveys, written.tokens_of_input, strict=True))
        result = Manifest(
            tokenizer=tokenizer,
            dtype=dtype.name,
            corpus=job.corpus.description,
            source=job.source,
            split=job.split if job.by_weights else BY_FILES,
            tokens=int(written.counts.sum()),
            bytes=sum(text.bytes for text in texts),
            documents=len(sources),
            skipped_documents=sum(corpus.num_skipped for corpus in job.corpora),
            unigram_entropy_bits=unigram_entropy(written.counts.sum(axis=0)),
            notes=notes_on(
                tokenizer, splits, inputs, written.unknown_in_training(tokenizer), by_files=not job.by_weights
            ),
            splits=splits,
            files={n: manifest.describe_file(p) for n, p in manifest.data_paths(folder / job.prefix.name).items()},
            inputs=inputs,
        )
        if job.check:
            result = replace(result, notes=result.notes + job.check(result))
        result.write(manifest.manifest_path(folder / job.prefix.name))
        staging.publish(folder, job.prefix)
    return result


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in bits per token of tokens that occur `counts` [vocabulary] times; there must be at least one."""
    occurring = counts[counts > 0]
    shares = occurring / occurring.sum()
    return math.fsum(shares * -np.log2(shares))


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


def _sources(job: Preparation) -> list[Source]:
    """Which text belongs to which split."""
    if not job.by_weights:
        groups = [corpus.documents if corpus else () for corpus in (job.corpus, job.valid, job.test)]
        return sources_of_files(groups, raw_bytes=job.raw_bytes)
    unit = job.maker.name if job.maker.name in ("byte", "char") else "line"
    split_weights(job.split)  # a wrong one is told before any text is read
    try:
        return sources_of_text(job.corpus.documents, job.split, unit, raw_bytes=job.raw_bytes)
    except UsageError:  # no split of it is possible: that it is no text, if so, is the better reason
        for document in () if job.raw_bytes else job.corpus.documents:
            corpora.check_text(document)
        raise


@dataclass(frozen=True)
class _Survey:
    """What the first pass found of a file."""

    document: Document
    bytes: int
    sha256: str
    byte_order_mark: bool
    crlf_lines: int

    @classmethod
    def of(cls, source: Source, job: Preparation, counters: Sequence[TextCounter], progress: Progress) -> "_Survey":
        """Read a file through, check that it is text, and count each part's in its split's counter."""
        digest, crlf, last, offset = hashlib.sha256(), 0, b"", source.parts[0].start

        def also(chunk: bytes) -> None:
            digest.update(chunk)
            progress(len(chunk))

        chunks = _tee(corpora.read_bytes(source.document, job.chunk_bytes), also)
        for piece in chunks if job.raw_bytes else corpora.whole_characters(source.document, chunks):
            crlf += piece.count(b"\r\n") + (last == b"\r" and piece.startswith(b"\n"))
            last = piece[-1:]
            for part in source.parts:
                if inside := piece[max(part.start - offset, 0) : max(part.end - offset, 0)]:
                    counters[part.split].add(inside)
            offset += len(piece)
        for part in source.parts:
            counters[part.split].end_file()
        size = source.document.num_bytes
        return cls(source.document, size, digest.hexdigest(), source.parts[0].start > 0, crlf)

    def record(self, num_tokens: int) -> InputRecord:
        """The manifest's record of the file."""
        return InputRecord(
            name=self.document.name,
            bytes=self.bytes,
            sha256=self.sha256,
            tokens=num_tokens,
            byte_order_mark=self.byte_order_mark,
            crlf_lines=self.crlf_lines,
        )


def _tee(chunks: Iterator[bytes], also: Callable[[bytes], None]) -> Iterator[bytes]:
    for chunk in chunks:
        also(chunk)
        yield chunk


def _pieces(
    document: Document, part: Part, job: Preparation, maker: Tokenizer | Learner, also: Callable[[bytes], None]
) -> Iterator[bytes]:
    """A part's text as its tokenizer wants it; `also` gets the file's own bytes."""
    chunks = _tee(corpora.read_bytes(document, job.chunk_bytes, part.start, part.end), also)
    pieces = maker.cutter.pieces(chunks)
    try:
        yield from ended(pieces) if maker.newline == "eos" else pieces
    except TooLongError as error:
        offset = part.start + error.offset
        place = f"line {corpora.line_number(document, offset)}, byte offset {offset}"
        rule = f"{place} starts a {maker.cutter.uncuttable} of more than 1 MiB"
        raise usage_error(document.flag, document.name, rule, "use the byte or char tokenizer") from None


def _tokenizer(
    job: Preparation, sources: Sequence[Source], texts: Sequence[TextCounts], progress: Progress
) -> Tokenizer:
    """The tokenizer that was given, or the one that is learned now."""
    maker = job.maker
    if not isinstance(maker, Learner):
        return maker
    done = 0

    def also(chunk: bytes) -> None:
        nonlocal done
        done += len(chunk)
        progress(len(chunk))

    def text(splits: Sequence[int]) -> Iterator[bytes]:
        for source in sources:
            for part in source.parts:
                if part.split in splits:
                    yield from _pieces(source.document, part, job, maker, also)

    tokenizer = maker.learn(text([0]), text([1, 2]), texts[0].lines)
    progress(job.num_bytes() - done)
    return tokenizer


@dataclass(frozen=True)
class _Written:
    """What the last pass wrote: counts [3, vocabulary] of tokens; per split documents and <unk>s; tokens per input."""

    counts: npt.NDArray[np.int64]
    documents: list[int]
    unknown: list[int]
    tokens_of_input: list[int]

    def record(self, split: int, text: TextCounts) -> SplitRecord:
        """The manifest's record of a split; refuses one whose text has no token."""
        counts = self.counts[split]
        if text.bytes and not counts.any():
            rule = "its text has no tokens: it is nothing but white space or line ends that are dropped"
            raise usage_error("split", SPLITS[split], rule, "give it other text")
        return SplitRecord(
            tokens=int(counts.sum()),
            documents=self.documents[split],
            unigram_entropy_bits=unigram_entropy(counts) if counts.any() else None,
            unknown_words=self.unknown[split],
            **asdict(text),
        )

    def unknown_in_training(self, tokenizer: Tokenizer) -> int:
        """How often <unk>, if there is one, is a token of the training split."""
        number = getattr(tokenizer, "unknown_id", None)
        return 0 if number is None else int(self.counts[0, number])


def _write_splits(
    prefix: Path,
    job: Preparation,
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    surveys: Sequence[_Survey],
    progress: Progress,
) -> _Written:
    """The last pass: tokens into their splits' files."""
    size = tokenizer.vocab_size
    written = _Written(np.zeros((3, size), np.int64), [0, 0, 0], [0, 0, 0], [0] * len(sources))
    with ExitStack() as stack:
        dtype = dtype_for_vocabulary(size)
        writers = [stack.enter_context(IndexedWriter(manifest.split_prefix(prefix, name), dtype)) for name in SPLITS]
        for number, (source, survey) in enumerate(zip(sources, surveys, strict=True)):
            digest = hashlib.sha256()

            def also(chunk: bytes, digest: "hashlib._Hash" = digest) -> None:
                digest.update(chunk)
                progress(len(chunk))

            for chunk in corpora.read_bytes(source.document, job.chunk_bytes, 0, source.parts[0].start):
                also(chunk)
            for part in source.parts:
                before = written.tokens_of_input[number]
                offset = part.start
                for piece in _pieces(source.document, part, job, tokenizer, also):
                    tokens, unknown = tokenizer.encode_counting(piece, source=source.document.name, offset=offset)
                    writers[part.split].append(tokens)
                    np.add.at(written.counts[part.split], tokens, 1)
                    written.unknown[part.split] += unknown
                    written.tokens_of_input[number] += len(tokens)
                    offset += len(piece)
                if written.tokens_of_input[number] > before:
                    writers[part.split].end_document()
                    written.documents[part.split] += 1
            if digest.hexdigest() != survey.sha256:
                rule, fix = "changed while it was read", "prepare it when nothing writes to it"
                raise usage_error(source.document.flag, source.document.name, rule, fix)
    return written


def _tokens_at_least(texts: Sequence[TextCounts], tokenizer: Tokenizer) -> int:
    """About how many tokens there will be; of subwords there may be several a word."""
    field = {"byte": "bytes", "char": "characters"}.get(tokenizer.unit, "words")
    return sum(getattr(text, field) for text in texts)


def _check_output(job: Preparation) -> None:
    """Nothing there is overwritten unasked, and never an input."""
    prefix = job.prefix
    if not prefix.name or prefix.is_dir():
        raise usage_error("--output-prefix", prefix, "is a folder", f"add a name, for example {prefix / 'corpus'}")
    outputs = [manifest.manifest_path(prefix), *manifest.data_paths(prefix).values()]
    existing = [path for path in outputs if path.exists()]
    if existing and job.existing == "refuse":
        raise usage_error("--output-prefix", prefix, f"{existing[0]} exists already", "choose another, or --overwrite")
    inputs = {document.path.resolve() for document in job.documents}
    for path in existing:
        if path.resolve() in inputs:
            raise usage_error("--output-prefix", prefix, f"would overwrite the input {path}", "choose another prefix")


def _check_space(prefix: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(prefix.parent).free
    if free < num_bytes:
        rule = f"needs {num_bytes:,} bytes, {free:,} are free in {prefix.parent}"
        raise usage_error("--output-prefix", prefix, rule, "choose another disk")
