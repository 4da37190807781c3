"""Prepared data as files: P_{train,valid,test}.{bin,idx}, and P.json, the manifest that says what they are.

The manifest is written last, so data is complete exactly if it is there. Files are named in it without the prefix
("train.bin" is P_train.bin), so that prepared data can be renamed or moved together.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.json_files import MAX_TOKENIZER_BYTES, parse_json, read_bytes
from megatron_allattn.data.interface import sha256_of_json
from megatron_allattn.data.splits import SPLITS
from megatron_allattn.data.tokenizers import Tokenizer, tokenizer_from_json

FORMAT = "megatron_allattn prepared data"
VERSION = 2
EDGE_BYTES = 65536
HASH_CHUNK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class SplitRecord:
    """One split. The entropy is in bits per token (None without tokens).

    bytes, characters, words (by white space), lines: of the original text, before any tokenizer's rules, so that bits
    per byte and perplexity per word can be given for any tokenizer · unknown_words: how many tokens are an <unk> that
    stands for something else of the text: words, or with sentencepiece pieces.
    """

    tokens: int
    documents: int
    unigram_entropy_bits: float | None
    bytes: int
    characters: int
    words: int
    lines: int
    unknown_words: int


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A written file: size, SHA-256 of all of it, and SHA-256 of its first and last 64 KiB, which is cheap to check."""

    bytes: int
    sha256: str
    edges_sha256: str


@dataclass(frozen=True, kw_only=True)
class InputRecord:
    """An input file: size and SHA-256 of the file as it is, its tokens, and whether a byte-order mark was dropped.

    crlf_lines: line ends that are \\r\\n.
    """

    name: str
    bytes: int
    sha256: str
    tokens: int
    byte_order_mark: bool
    crlf_lines: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What P.json says. Counts are of the whole corpus; `bytes` is its text, without byte-order marks.

    source: where the text comes from, if that is known · split: the weights, or "by files" · notes: sentences about
    what a reader should know of the text and of what became of it.
    """

    tokenizer: Tokenizer
    dtype: str
    corpus: str
    source: Mapping[str, Any] | None
    split: str
    tokens: int
    bytes: int
    documents: int
    skipped_documents: int
    unigram_entropy_bits: float
    notes: tuple[str, ...]
    splits: Mapping[str, SplitRecord]
    files: Mapping[str, FileRecord]
    inputs: tuple[InputRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """The object P.json holds: format, version and vocabulary size, the fields above, and the SHA-256 of that."""
        head = {"format": FORMAT, "version": VERSION, "vocabulary_size": self.tokenizer.vocab_size}
        own = {
            name: value for name, value in vars(self).items() if name not in ("tokenizer", "splits", "files", "inputs")
        }
        content = {
            **head,
            **own,
            "tokenizer": self.tokenizer.to_json(),
            "notes": list(self.notes),
            "splits": {name: asdict(record) for name, record in self.splits.items()},
            "files": {name: asdict(record) for name, record in self.files.items()},
            "inputs": [asdict(record) for record in self.inputs],
        }
        return {**content, "sha256": sha256_of_json(content)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], source: str) -> "Manifest":
        """Read what `to_json` made; `source` (the file) serves errors."""
        if content.get("version") != VERSION:
            rule = f"has version {content.get('version')}, expected {VERSION}"
            raise usage_error(
                "manifest", source, rule, "prepare the data again with this version's tools/prepare_data.py"
            )
        fields = {
            name: value for name, value in content.items() if name not in ("format", "version", "vocabulary_size")
        }
        again = "prepare the data again"
        try:
            stated = fields.pop("sha256")
            fields["tokenizer"] = tokenizer_from_json(fields["tokenizer"], source)
            fields["splits"] = {name: SplitRecord(**fields["splits"][name]) for name in SPLITS}
            fields["files"] = {name: FileRecord(**fields["files"][name]) for name in data_names()}
            fields["notes"] = tuple(fields["notes"])
            fields["inputs"] = tuple(InputRecord(**record) for record in fields["inputs"])
            made = cls(**fields)
        except (KeyError, TypeError) as error:
            raise usage_error("manifest", source, f"is damaged ({error})", again) from None
        if stated != sha256_of_json({name: value for name, value in content.items() if name != "sha256"}):
            raise usage_error("manifest", source, "is not what was written (another SHA-256)", again)
        return made

    def write(self, path: Path) -> None:
        """Write P.json, a field a line, and bring it to disk. The same corpus gives the same bytes."""
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self.to_json().items())
        with path.open("w", encoding="ascii") as file:
            file.write("{\n" + ",\n".join(lines) + "\n}\n")
            file.flush()
            os.fsync(file.fileno())


def read_manifest(prefix: Path) -> Manifest | None:
    """The manifest of prefix P; None if P.json is not there or is something else."""
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    text = read_bytes("manifest", path, "check its permissions, or prepare the data again", MAX_TOKENIZER_BYTES)
    try:
        content = parse_json("manifest", path, text, "prepare the data again")
    except UsageError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    return Manifest.from_json(content, str(path))


def vocabulary_size(data_path: str | None) -> int | None:
    """That of prepared data; None where no --data-path is named, or nothing is prepared there."""
    prepared = None if data_path is None else read_manifest(Path(data_path))
    return None if prepared is None else prepared.tokenizer.vocab_size


def manifest_path(prefix: Path) -> Path:
    """P.json."""
    return Path(f"{prefix}.json")


def split_prefix(prefix: Path, split: str) -> Path:
    """P_train, P_valid or P_test, a prefix of Megatron token files."""
    return Path(f"{prefix}_{split}")


def data_names() -> tuple[str, ...]:
    """Names in the manifest of the files beside it: "train.bin", "train.idx", …"""
    return tuple(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx"))


def data_paths(prefix: Path) -> dict[str, Path]:
    """The manifest's name → the file, without the manifest itself."""
    return {name: Path(f"{prefix}_{name}") for name in data_names()}


def describe_file(path: Path) -> FileRecord:
    """Size and hashes of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return FileRecord(bytes=path.stat().st_size, sha256=digest.hexdigest(), edges_sha256=_edges_sha256(path))


def check_file(path: Path, record: FileRecord) -> None:
    """Check, by size and by the first and last 64 KiB, that a file is the one that was recorded."""
    again = "prepare the data again, or copy all of its files together"
    try:
        size, edges = path.stat().st_size, _edges_sha256(path)
    except OSError as error:
        rule = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise usage_error("prepared data", path, rule, again) from None
    if size != record.bytes:
        raise usage_error("prepared data", path, f"has {size} bytes, its manifest says {record.bytes}", again)
    if edges != record.edges_sha256:
        raise usage_error("prepared data", path, "is not the file its manifest describes (another hash)", again)


def _edges_sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(EDGE_BYTES))
        file.seek(max(0, path.stat().st_size - EDGE_BYTES))
        digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()
