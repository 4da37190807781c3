"""The paper's corpora as they were published: where their archives are, how they are cut, and what must come out.

enwik8: the first 10^8 bytes of a Wikipedia dump, cut into 90, 5 and 5 million bytes; a symbol is a byte, and the
newline byte is <eos>: 204 others occur, so 205 symbols. text8: 10^8 characters of that text in lower case (a-z and
space), cut likewise; 27 symbols, and an <eos> at the end of each split, since it has no newline. wikitext-103: words,
split at any Unicode white space, and <eos> after every line; 267,735 words by their frequency in the training text,
<eos> and the text's own <unk> among them.

So does the paper's code (for text8 its script also strips the white space at the ends of each split; here every
character stays). Others make a symbol of the newline or drop it, and figures per character or word differ with that;
the newline rule chooses.

Addresses, sizes, hashes and counts are public facts. An archive with the known hash must give exactly the known counts;
another of the same structure, which has to be asked for, may give others, and the manifest notes them.
"""

import functools
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_allattn.config.disk import sha256_of
from megatron_allattn.config.errors import usage_error
from megatron_allattn.data.archives import ArchiveMember
from megatron_allattn.data.corpora import Corpus
from megatron_allattn.data.download import Notify, Progress, Remote, download, mirror_url
from megatron_allattn.data.interface import Newline
from megatron_allattn.data.manifest import Manifest
from megatron_allattn.data.prepare import Preparation
from megatron_allattn.data.splits import SPLITS
from megatron_allattn.data.tokenizers import ByteLearner, CharLearner, WordLearner

UNCHECKED = "none"  # the value of --archive-sha256 that takes any archive


@dataclass(frozen=True, kw_only=True)
class Published:
    """One corpus: its archive, the members to read, and what is known of them.

    members: one, cut 90 : 5 : 5, or those of train, valid and test · member_sha256: of each, where known ·
    learner: what makes the tokenizer · counts: field of a split's record → its value in train,
    valid and test · vocabulary: newline rule → size.
    """

    name: str
    archive: Remote
    members: tuple[str, ...]
    member_sha256: tuple[str | None, ...]
    learner: type[ByteLearner] | type[CharLearner] | type[WordLearner]
    raw_bytes: bool
    counts: Mapping[str, tuple[int, int, int]]
    vocabulary: Mapping[Newline, int]


PUBLISHED: Mapping[str, Published] = {
    corpus.name: corpus
    for corpus in (
        Published(
            name="enwik8",
            archive=Remote(
                name="enwik8.zip",
                urls=(
                    "https://mattmahoney.net/dc/enwik8.zip",
                    "http://mattmahoney.net/dc/enwik8.zip",
                    "https://data.deepai.org/enwik8.zip",
                ),
                num_bytes=36_445_475,
                sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            ),
            members=("enwik8",),
            member_sha256=("2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",),
            learner=ByteLearner,
            raw_bytes=True,  # a cut may fall inside a character
            counts={"bytes": (90_000_000, 5_000_000, 5_000_000)},
            vocabulary={"eos": 205, "symbol": 205, "drop": 204},
        ),
        Published(
            name="text8",
            archive=Remote(
                name="text8.zip",
                urls=("https://mattmahoney.net/dc/text8.zip", "http://mattmahoney.net/dc/text8.zip"),
                num_bytes=31_344_016,
                sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
            ),
            members=("text8",),
            member_sha256=("6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",),
            learner=CharLearner,
            raw_bytes=False,
            counts={"bytes": (90_000_000, 5_000_000, 5_000_000), "characters": (90_000_000, 5_000_000, 5_000_000)},
            vocabulary={"eos": 28, "symbol": 27, "drop": 27},
        ),
        Published(
            name="wikitext-103",
            archive=Remote(
                name="wikitext-103-v1.zip",
                urls=(  # the author's copy; the first publisher's answers no longer
                    "https://wikitext.smerity.com/wikitext-103-v1.zip",
                    "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
                ),
                num_bytes=190_229_076,
                sha256="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
            ),
            members=tuple(f"wikitext-103/wiki.{split}.tokens" for split in SPLITS),
            member_sha256=(None, None, None),
            learner=WordLearner,
            raw_bytes=False,
            # words and line ends together are the 103,227,021 + 217,646 + 245,569 tokens of the literature
            counts={"words": (101_425_671, 213_886, 241_211), "lines": (1_801_350, 3_760, 4_358)},
            vocabulary={"eos": 267_735, "symbol": 267_735, "drop": 267_734},
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A corpus' archive on this machine, accepted: the known one, or another that was asked for."""

    path: Path
    num_bytes: int
    sha256: str
    published: bool


def wanted_sha256(corpus: Published, value: str | None) -> str | None:
    """The SHA-256 the archive must have, by --archive-sha256: the known one without it, "none" for any (None)."""
    if value is None:
        return corpus.archive.sha256
    if value == UNCHECKED:
        return None
    if not re.fullmatch("[0-9a-fA-F]{64}", value):
        raise usage_error("--archive-sha256", value, "is not a SHA-256", f"give 64 hexadecimal digits, or {UNCHECKED}")
    return value.lower()


def given_archive(corpus: Published, path: Path, sha256: str | None) -> Archive:
    """The archive of --archive; UsageError unless it is a file with the SHA-256 `sha256` (None: any)."""
    fix = f"give the corpus' zip ({corpus.archive.name})"
    if not path.is_file():
        raise usage_error("--archive", path, "is no regular file" if path.exists() else "no such file", fix)
    try:
        archive = _archive(corpus, path)
    except OSError as error:
        raise usage_error("--archive", path, f"cannot be read ({error.strerror})", fix) from None
    if sha256 not in (None, archive.sha256):
        rule = f"has {archive.num_bytes:,} bytes with SHA-256 {archive.sha256}, expected {sha256}"
        if sha256 == corpus.archive.sha256:
            rule += f" ({corpus.archive.num_bytes:,} bytes)"
        fix = f"get it again; another archive of the same structure needs --archive-sha256 HASH (or {UNCHECKED})"
        raise usage_error("--archive", path, rule, fix)
    return archive


def fetched_archive(
    corpus: Published,
    folder: Path,
    sha256: str | None,
    mirrors: Sequence[str],
    progress: Progress,
    notify: Notify,
) -> Archive:
    """The archive in `folder`, downloaded if it is not there: from `mirrors` in their order, if any, else from where it
    was published. Errors: those of `download`; UsageError: no whole archive is there."""
    known = sha256 == corpus.archive.sha256
    remote = Remote(
        name=corpus.archive.name,
        urls=tuple(mirror_url(mirror, corpus.archive.name) for mirror in mirrors) or corpus.archive.urls,
        num_bytes=corpus.archive.num_bytes if known else None,
        sha256=sha256,
    )
    path = download(remote, folder, progress=progress, notify=notify)
    if not zipfile.is_zipfile(path):  # without a hash and, from some servers, a size, its end is all that tells
        aside = path.with_name(f"{path.name}.rejected")
        os.replace(path, aside)
        rule = f"is no whole zip archive; it was put aside as {aside.name}"
        raise usage_error("archive", path, rule, "run the command again to download it anew")
    return _archive(corpus, path)


def preparation(corpus: Published, archive: Archive, prefix: Path, newline: Newline, *, overwrite: bool) -> Preparation:
    """How to prepare a corpus from its archive; UsageError if a member is missing or cannot be read."""
    parts = [Corpus(corpus.name, (ArchiveMember.of(archive.path, member),)) for member in corpus.members]
    whole, valid, test = parts if len(parts) > 1 else (parts[0], None, None)
    return Preparation(
        corpus=whole,
        valid=valid,
        test=test,
        prefix=prefix,
        tokenizer=corpus.learner(newline=newline),
        raw_bytes=corpus.raw_bytes,
        existing="overwrite" if overwrite else "refuse",
        source={
            "corpus": corpus.name,
            "archive": archive.path.name,
            "bytes": archive.num_bytes,
            "sha256": archive.sha256,
            "published": archive.published,
        },
        check=functools.partial(_check, corpus, archive, newline),
    )


def _archive(corpus: Published, path: Path) -> Archive:
    found = sha256_of(path)
    return Archive(path=path, num_bytes=path.stat().st_size, sha256=found, published=found == corpus.archive.sha256)


def _check(corpus: Published, archive: Archive, newline: Newline, made: Manifest) -> tuple[str, ...]:
    """Notes on how far the prepared corpus is the known one; UsageError if the published text gives other counts."""
    facts = [("symbols", corpus.vocabulary[newline], made.tokenizer.vocab_size)]
    for field, values in corpus.counts.items():
        facts += [
            (f"{split} {field}", value, getattr(made.splits[split], field))
            for split, value in zip(SPLITS, values, strict=True)
        ]
    differences = ", ".join(f"{found:,} {what} instead of {known:,}" for what, known, found in facts if found != known)
    texts = tuple(record.sha256 for record in made.inputs)
    if archive.published or texts == corpus.member_sha256:
        if differences:
            rule = f"gives {differences}"
            raise usage_error("archive", archive.path, rule, "please report this: the archive is the published one")
        return () if archive.published else ("another archive than the published one, with the same text",)
    note = f"the archive (SHA-256 {archive.sha256}) is not the published one, as --archive-sha256 allows"
    return (f"{note}: {differences}" if differences else note,)
