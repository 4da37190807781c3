"""From --data-path to token arrays: prepared data P.json, a bare Megatron file P.{bin,idx}, or the default corpus.

Prepared data says itself what its tokenizer is and comes split; a flag that says otherwise is an error. A bare file is
split here by --split into contiguous ranges of tokens, its tokenizer comes from flags, and one pass over it (in chunks)
checks that every id is in the vocabulary. Nothing depends on the rank that opens.
"""

import dataclasses
import difflib
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.recipes.recipe import BYTES
from megatron_allattn.data import manifest
from megatron_allattn.data.indexed import IndexedReader, Tokens, bin_path, idx_path
from megatron_allattn.data.manifest import Manifest, SplitRecord
from megatron_allattn.data.prepare import default_corpus, unigram_entropy
from megatron_allattn.data.splits import SPLITS, split_boundaries
from megatron_allattn.data.tokenizers import ByteTokenizer, NullTokenizer, Tokenizer, tokenizer_from_file

SCAN_TOKENS = 2**20
VOCABULARIES = {  # kinds of --tokenizer-type that need --tokenizer-model, and what that is
    "char": "the vocabulary's JSON",
    "word": "the vocabulary's JSON",
    "sentencepiece": "the FILE.model",
}
KINDS = ("byte", *VOCABULARIES, "null")


class DataSettings(Protocol):
    """The part of the configuration that is read here (config.DataConfig has it)."""

    @property
    def data_path(self) -> str | None: ...
    @property
    def split(self) -> str: ...
    @property
    def tokenizer_type(self) -> str | None: ...
    @property
    def tokenizer_model(self) -> Path | None: ...
    @property
    def vocab_size(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Tokens to train and evaluate on.

    train, valid, test: token ids [n], read-only memory maps; a split of weight 0 has none · unigram_entropy: bits per
    token of the whole corpus · description: one line · fingerprint: SHA-256 (hex) over tokenizer, tokens and split, the
    same on every rank that reads the same data · splits: what the manifest says of each split, such as the bytes and
    words of its original text; None for a bare file, which does not tell.
    """

    train: Tokens
    valid: Tokens
    test: Tokens
    tokenizer: Tokenizer
    unigram_entropy: float
    description: str
    fingerprint: str
    splits: Mapping[str, SplitRecord] | None = None


def open_dataset(
    data: DataSettings,
    explicit: frozenset[str] = frozenset(),
    *,
    prepare: str = BYTES,
    build_default: Callable[[], Path] = default_corpus,
) -> Dataset:
    """Open what --data-path names, or the standard library's sources, built on first use.

    explicit: flags that the user gave, such as "--split" · prepare: arguments of tools/prepare_data.py for such data,
    as a hint where there is none · build_default: gives the prefix to use without --data-path.
    UsageError: nothing there, damaged files, a flag that contradicts the data or has no effect, an id outside the
    vocabulary.
    """
    if data.data_path is None:
        return _open_default(data, explicit, build_default)
    prefix = _find_prefix(data.data_path, prepare)
    prepared = manifest.read_manifest(prefix)
    if prepared is None:
        return _open_bare(prefix, data)
    if idx_path(prefix).exists():
        rule = f"both prepared data ({prefix}.json) and a bare token file ({prefix}.idx) are there"
        raise usage_error("--data-path", prefix, rule, "rename one of them")
    return _open_prepared(prefix, prepared, data, explicit)


def _open_default(data: DataSettings, explicit: frozenset[str], build_default: Callable[[], Path]) -> Dataset:
    prefix = None
    try:
        prefix = build_default()
        prepared = manifest.read_manifest(prefix)
        assert prepared is not None, f"{prefix} was built and has no manifest"
        for name, path in manifest.data_paths(prefix).items():
            manifest.check_file(path, prepared.files[name])
    except UsageError as error:
        delete = f"delete {prefix}*, " if prefix else ""
        raise UsageError(f"{error} (default corpus: {delete}set XDG_CACHE_HOME or give --data-path)") from None
    return _open_prepared(prefix, prepared, data, explicit)


def _open_prepared(prefix: Path, prepared: Manifest, data: DataSettings, explicit: frozenset[str]) -> Dataset:
    if "--split" in explicit:
        rule = f"has no effect: {prefix} was split {prepared.split} when it was prepared"
        raise usage_error("--split", data.split, rule, "leave it out, or prepare the data again with it")
    _check_flags(prefix, prepared.tokenizer, data)
    arrays = []
    for split in SPLITS:
        for kind in ("bin", "idx"):
            name = f"{split}.{kind}"
            manifest.check_file(manifest.data_paths(prefix)[name], prepared.files[name])
        reader = IndexedReader(manifest.split_prefix(prefix, split))
        expected = (prepared.splits[split].tokens, prepared.dtype)
        if (reader.num_tokens, reader.dtype.name) != expected:
            found = f"{reader.num_tokens} tokens of {reader.dtype.name}"
            rule = f"has {found}, its manifest says {expected[0]} of {expected[1]}"
            raise usage_error("prepared data", bin_path(reader.prefix), rule, "prepare the data again")
        arrays.append(reader.tokens)
    hashes = [prepared.files[f"{split}.bin"].sha256 for split in SPLITS]
    dataset = _dataset(prefix, arrays, prepared.tokenizer, prepared.unigram_entropy_bits, hashes)
    return dataclasses.replace(dataset, splits=prepared.splits)


def _open_bare(prefix: Path, data: DataSettings) -> Dataset:
    reader = IndexedReader(prefix)
    tokenizer = _tokenizer_from_flags(prefix, data)
    boundaries = split_boundaries(data.split, reader.num_tokens)
    entropy, digest = _scan(reader, tokenizer)
    arrays = [reader.tokens[start:end] for start, end in itertools.pairwise(boundaries)]
    return _dataset(prefix, arrays, tokenizer, entropy, [digest, *map(str, boundaries)])


def _dataset(prefix: Path, arrays: list[Tokens], tokenizer: Tokenizer, entropy: float, identity: list[str]) -> Dataset:
    sizes = ", ".join(f"{len(tokens):,} {split}" for split, tokens in zip(SPLITS, arrays, strict=True))
    return Dataset(
        train=arrays[0],
        valid=arrays[1],
        test=arrays[2],
        tokenizer=tokenizer,
        unigram_entropy=entropy,
        description=f"{prefix}: {sizes} tokens, {tokenizer.name} vocabulary of {tokenizer.vocab_size}",
        fingerprint=hashlib.sha256(json.dumps([tokenizer.fingerprint, *identity]).encode()).hexdigest(),
    )


def _check_flags(prefix: Path, tokenizer: Tokenizer, data: DataSettings) -> None:
    """Flags may repeat what the data says of its tokenizer, not contradict it."""
    fix = "leave the flag out"
    says = f"{prefix}.json says"
    if data.tokenizer_type not in (None, tokenizer.name):
        raise usage_error("--tokenizer-type", data.tokenizer_type, f"{says} {tokenizer.name}", fix)
    if data.vocab_size not in (None, tokenizer.vocab_size):
        raise usage_error("--vocab-size", data.vocab_size, f"{says} {tokenizer.vocab_size}", fix)
    if data.tokenizer_model is not None:
        other = tokenizer_from_file(data.tokenizer_model, tokenizer.newline)
        if other.fingerprint != tokenizer.fingerprint:
            rule = f"is a {other.name} vocabulary of {other.vocab_size}, {says} another {tokenizer.name} vocabulary"
            raise usage_error("--tokenizer-model", data.tokenizer_model, f"{rule} of {tokenizer.vocab_size}", fix)


def _tokenizer_from_flags(prefix: Path, data: DataSettings) -> Tokenizer:
    kind, bare = data.tokenizer_type, f"{prefix}.idx is a bare token file"
    if kind is None:
        whole = next((s for s in SPLITS if prefix.name.endswith(f"_{s}")), None)
        owner = Path(str(prefix).removesuffix(f"_{whole}"))
        if whole and manifest.read_manifest(owner):
            rule = f"is only the {whole} split of prepared data"
            raise usage_error("--data-path", prefix, rule, f"use --data-path {owner} (or add --tokenizer-type)")
        rule = "is a bare token file, which does not say how it was tokenized"
        raise usage_error("--data-path", prefix, rule, f"add --tokenizer-type {_either(KINDS)}")
    if kind not in KINDS:
        raise usage_error("--tokenizer-type", kind, "is unknown", f"choose {_either(KINDS)}")
    if kind in VOCABULARIES:
        return _given_vocabulary(kind, bare, data)
    if data.tokenizer_model is not None:
        rule = f"has no effect with --tokenizer-type {kind}"
        raise usage_error("--tokenizer-model", data.tokenizer_model, rule, "leave it out")
    if kind == "null":
        if data.vocab_size is None:
            raise usage_error("--tokenizer-type", kind, bare, "add --vocab-size with the number of ids")
        return NullTokenizer(data.vocab_size)
    return _checked_size(ByteTokenizer(), data)


def _given_vocabulary(kind: str, bare: str, data: DataSettings) -> Tokenizer:
    """The tokenizer of --tokenizer-model, which must be of this kind."""
    if data.tokenizer_model is None:
        raise usage_error("--tokenizer-type", kind, bare, f"add --tokenizer-model with {VOCABULARIES[kind]}")
    tokenizer = tokenizer_from_file(data.tokenizer_model)
    if tokenizer.name != kind:
        rule = f"describes a {tokenizer.name} tokenizer, --tokenizer-type is {kind}"
        raise usage_error("--tokenizer-model", data.tokenizer_model, rule, f"give {VOCABULARIES[kind]}")
    return _checked_size(tokenizer, data)


def _checked_size(tokenizer: Tokenizer, data: DataSettings) -> Tokenizer:
    if data.vocab_size not in (None, tokenizer.vocab_size):
        rule = f"the {tokenizer.name} tokenizer has {tokenizer.vocab_size} ids"
        raise usage_error("--vocab-size", data.vocab_size, rule, "leave it out")
    return tokenizer


def _either(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _scan(reader: IndexedReader, tokenizer: Tokenizer) -> tuple[float, str]:
    """Unigram entropy in bits per token and SHA-256 of the .bin, in one pass that checks every id."""
    counts, digest = np.zeros(tokenizer.vocab_size, np.int64), hashlib.sha256()
    for start in range(0, reader.num_tokens, SCAN_TOKENS):
        tokens = reader.tokens[start : start + SCAN_TOKENS]
        bad = (tokens < 0) | (tokens >= tokenizer.vocab_size)
        if bad.any():
            where = int(np.argmax(bad))
            vocabulary = f"the {tokenizer.name} vocabulary of {tokenizer.vocab_size}"
            rule = f"token {start + where} is {tokens[where]}, outside {vocabulary}"
            fix = "give the --tokenizer-type and --vocab-size it was made with"
            raise usage_error("token file", bin_path(reader.prefix), rule, fix)
        counts += np.bincount(tokens, minlength=tokenizer.vocab_size)
        digest.update(tokens.tobytes())
    return unigram_entropy(counts), digest.hexdigest()


def _find_prefix(data_path: str, prepare: str) -> Path:
    """The prefix that --data-path means: as it is, or without the .bin, .idx or .json of one of its files."""
    given = Path(data_path)
    candidates = [given, given.with_suffix("")] if given.suffix in (".bin", ".idx", ".json") else [given]
    for prefix in candidates:
        if data_path and (manifest.read_manifest(prefix) or bin_path(prefix).exists() or idx_path(prefix).exists()):
            return prefix
    raise _nothing_there(candidates[-1], given, prepare)


def _nothing_there(prefix: Path, given: Path, arguments: str) -> UsageError:
    """Say what is there instead: a folder, a text file, an unfinished preparation, or something with a similar name."""
    prepare = f"prepare it: python tools/prepare_data.py {arguments} --output-prefix"
    if given.is_dir():
        names = sorted(_prefixes_in(given))
        hint = f"give a prefix in it: {', '.join(str(given / name) for name in names[:3])}" if names else f"{prepare} P"
        return usage_error("--data-path", given, "is a folder, not the prefix of token files", hint)
    if manifest.manifest_path(prefix).is_file():
        rule = f"{prefix}.json is not a manifest of tools/prepare_data.py, and {prefix}.bin does not exist"
        return usage_error("--data-path", given, rule, f"{prepare} {prefix}")
    leftover = [path for path in manifest.data_paths(prefix).values() if path.exists()]
    if leftover:
        rule = f"{leftover[0]} is there without its manifest {prefix}.json, so its preparation did not finish"
        return usage_error("--data-path", given, rule, "prepare the data again with --overwrite")
    if given.is_file():
        fix = prepare.replace("FILE", str(given))
        return usage_error(
            "--data-path", given, "is a file, but not one of prepared data", f"{fix} {given.with_suffix('')}"
        )
    if not prefix.parent.is_dir():
        return usage_error("--data-path", given, f"the folder {prefix.parent} does not exist", f"{prepare} {given}")
    near = difflib.get_close_matches(prefix.name, sorted(_prefixes_in(prefix.parent)), n=1)
    fix = f"did you mean {prefix.parent / near[0]}? Or {prepare}" if near else prepare
    return usage_error("--data-path", given, f"neither {prefix}.json nor {prefix}.bin exists", f"{fix} {prefix}")


def _prefixes_in(folder: Path) -> set[str]:
    """Names of prefixes in a folder that can be opened: prepared data, and token files that are not part of it."""
    prepared = {path.stem for path in folder.glob("*.json") if manifest.read_manifest(path.with_suffix(""))}
    parts = {manifest.split_prefix(Path(name), split).name for name in prepared for split in SPLITS}
    return prepared | ({path.stem for path in folder.glob("*.idx")} - parts)
