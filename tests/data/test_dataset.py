"""Opening data: what is there is what was prepared, flags agree with it, and mistakes are told with the way out."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_allattn.config.data import DataConfig
from megatron_allattn.config.errors import UsageError
from megatron_allattn.data import dataset as dataset_module
from megatron_allattn.data.corpora import files_corpus
from megatron_allattn.data.dataset import Dataset, open_dataset
from megatron_allattn.data.indexed import IndexedReader, IndexedWriter
from megatron_allattn.data.prepare import Preparation, prepare, unigram_entropy
from megatron_allattn.data.tokenizers import CharTokenizer

MEGATRON = Path(__file__).parent / "megatron_dataset"
TEXT = b"abcdefghij" * 10


def prepared(folder: Path, text: bytes = TEXT, name: str = "P", **settings: Any) -> Path:
    (folder / "text.txt").write_bytes(text)
    values = {"tokenizer": "byte", "split": "8,1,1", "existing": "overwrite", **settings}
    prepare(Preparation(corpus=files_corpus([folder / "text.txt"]), prefix=folder / name, **values))
    return folder / name


def bare(folder: Path, tokens: list[int], name: str = "bare", dtype: str = "uint16") -> Path:
    with IndexedWriter(folder / name, dtype) as writer:
        writer.add_sequence(np.array(tokens))
        writer.end_document()
    return folder / name


def opened(path: Path | str, *explicit: str, **settings: Any) -> Dataset:
    return open_dataset(DataConfig(data_path=str(path), **settings), frozenset(explicit))


def refusal(path: Path | str, *explicit: str, **settings: Any) -> str:
    with pytest.raises(UsageError) as error:
        opened(path, *explicit, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_prepared_data(tmp_path: Path) -> None:
    data = opened(prepared(tmp_path))
    assert (data.train.tobytes(), data.valid.tobytes(), data.test.tobytes()) == (TEXT[:80], TEXT[80:90], TEXT[90:])
    assert data.tokenizer.name == "byte"
    assert data.unigram_entropy == pytest.approx(np.log2(10), rel=1e-15)
    assert data.description == f"{tmp_path}/P: 80 train, 10 valid, 10 test tokens, byte vocabulary of 256"


@pytest.mark.parametrize("suffix", [".json", "_train.bin"])
def test_prepared_data_by_a_file_of_it(tmp_path: Path, suffix: str) -> None:
    prefix = prepared(tmp_path)
    if suffix == ".json":
        assert opened(f"{prefix}{suffix}").train.tobytes() == TEXT[:80]
    else:
        message = refusal(f"{prefix}{suffix}")
        assert f"--data-path {prefix}_train: is only the train split" in message
        assert f"use --data-path {prefix} " in message
        assert opened(f"{prefix}{suffix}", tokenizer_type="byte", split="1,0,0").train.tobytes() == TEXT[:80]


def test_bare_megatron_file_is_split(tmp_path: Path) -> None:
    case = json.loads((MEGATRON / "uint16_text_document.json").read_text())
    flat = [token for document in case["documents"] for sequence in document for token in sequence]
    path = MEGATRON / "uint16_text_document"
    for given in (path, f"{path}.bin", f"{path}.idx"):
        data = opened(given, "--split", tokenizer_type="null", vocab_size=60000, split="50,30,20")
        size = len(flat)
        assert data.train.tolist() == flat[: size // 2]
        assert data.valid.tolist() == flat[size // 2 : size * 8 // 10]
        assert data.test.tolist() == flat[size * 8 // 10 :]
        assert data.tokenizer.vocab_size == 60000
        assert data.unigram_entropy == unigram_entropy(np.bincount(flat))


def test_bare_file_scanned_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    prefix = bare(tmp_path, tokens)
    whole = opened(prefix, tokenizer_type="null", vocab_size=10, split="8,1,1")
    monkeypatch.setattr(dataset_module, "SCAN_TOKENS", 3)
    pieces = opened(prefix, tokenizer_type="null", vocab_size=10, split="8,1,1")
    assert (pieces.fingerprint, pieces.unigram_entropy) == (whole.fingerprint, whole.unigram_entropy)
    message = refusal(prefix, tokenizer_type="null", vocab_size=9, split="8,1,1")
    assert "bare.bin: token 5 is 9, outside the null vocabulary of 9" in message
    signed = bare(tmp_path, [1, 2, -3], "signed", "int32")
    assert "token 2 is -3" in refusal(signed, tokenizer_type="null", vocab_size=9, split="1,1,1")


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    prefix = prepared(tmp_path)
    first = opened(prefix).fingerprint
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in tmp_path.glob("P*"):
        shutil.copy(path, moved / path.name.replace("P", "Q"))
    assert opened(moved / "Q").fingerprint == first
    others = [
        opened(prepared(tmp_path, TEXT[:-1] + b"x")).fingerprint,
        opened(prepared(tmp_path, split="8,2,0")).fingerprint,
        opened(prepared(tmp_path, tokenizer="char")).fingerprint,
    ]
    numbers = bare(tmp_path, list(TEXT))
    for split in ("8,1,1", "8,2,0"):
        for vocab_size in (256, 300):
            others.append(opened(numbers, tokenizer_type="null", vocab_size=vocab_size, split=split).fingerprint)
    assert len({first, *others}) == 8


def test_flags_may_repeat_but_not_contradict_the_manifest(tmp_path: Path) -> None:
    prefix = prepared(tmp_path, tokenizer="char")
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps(CharTokenizer(list("abcdefghij")).to_json()))
    assert opened(prefix, tokenizer_type="char", tokenizer_model=vocabulary).tokenizer.vocab_size == 10
    message = refusal(prefix, tokenizer_type="byte")
    assert message.startswith("--tokenizer-type byte: ")
    assert f"{prefix}.json says char" in message
    message = refusal(prefix, tokenizer_type="null", vocab_size=10)
    assert "--tokenizer-type null" in message
    vocabulary.write_text(json.dumps(CharTokenizer(list("jihgfedcba")).to_json()))
    message = refusal(prefix, tokenizer_type="char", tokenizer_model=vocabulary)
    assert "--tokenizer-model" in message
    assert "another char vocabulary of 10" in message
    message = refusal(prefix, "--split", split="80,10,10")
    assert message.startswith("--split 80,10,10: has no effect")
    assert "split 8,1,1" in message


@dataclasses.dataclass(frozen=True)
class Flags:
    """What DataConfig refuses by itself, given here all the same."""

    data_path: str | None
    split: str = "8,1,1"
    tokenizer_type: str | None = None
    tokenizer_model: Path | None = None
    vocab_size: int | None = None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "does not say how it was tokenized; add --tokenizer-type byte, char, word, sentencepiece or null"),
        ({"tokenizer_type": "null"}, "add --vocab-size"),
        ({"tokenizer_type": "char"}, "add --tokenizer-model"),
        ({"tokenizer_type": "word"}, "add --tokenizer-model with the vocabulary's JSON"),
        ({"tokenizer_type": "sentencepiece"}, "add --tokenizer-model with the FILE.model"),
        ({"tokenizer_type": "bpe"}, "--tokenizer-type bpe: is unknown; choose byte, char, word, sentencepiece or null"),
        ({"tokenizer_type": "byte", "vocab_size": 300}, "--vocab-size 300: the byte tokenizer has 256 ids"),
        ({"tokenizer_type": "byte", "tokenizer_model": Path("v.json")}, "--tokenizer-model v.json: has no effect"),
        ({"tokenizer_type": "byte", "split": "98,1,1"}, "--split 98,1,1: leaves none of 10 tokens to valid"),
        ({"tokenizer_type": "byte", "split": "-1,1,0"}, "--split -1,1,0"),
    ],
)
def test_bare_file_needs_fitting_flags(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    prefix = bare(tmp_path, list(range(10)))
    with pytest.raises(UsageError) as error:
        open_dataset(Flags(str(prefix), **settings))
    assert words in str(error.value)


def test_bare_file_of_characters(tmp_path: Path) -> None:
    prefix = bare(tmp_path, [0, 1, 1, 0])
    other = prepared(tmp_path, b"ab" * 10, "Q", tokenizer="char")
    data = opened(prefix, tokenizer_type="char", tokenizer_model=Path(f"{other}.json"), split="2,1,1")
    assert data.tokenizer.decode(data.train) == "ab"
    byte = prepared(tmp_path, b"ab" * 10, "R")
    with pytest.raises(UsageError, match=r"R\.json: describes a byte tokenizer, --tokenizer-type is char"):
        opened(prefix, tokenizer_type="char", tokenizer_model=Path(f"{byte}.json"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "one token short": ("P_valid.bin", truncate, "P_valid.bin: has 9 bytes, its manifest says 10"),
    "another byte": ("P_train.bin", flip, "P_train.bin: is not the file its manifest describes"),
    "another index": ("P_test.idx", flip, "P_test.idx: is not the file its manifest describes"),
    "missing file": ("P_test.bin", Path.unlink, "P_test.bin: is missing"),
    "version 1": (
        "P.json",
        lambda path: swap(path, '"version": 2', '"version": 1'),
        "P.json: has version 1, expected 2; prepare the data again",
    ),
    "a key less": (
        "P.json",
        lambda path: swap(path, '"dtype"', '"type"'),
        "P.json: is damaged",
    ),
    "half a manifest": ("P.json", truncate, "P.json is not a manifest of tools/prepare_data.py"),
    "no manifest": ("P.json", Path.unlink, "P_train.bin is there without its manifest"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_prepared_data_is_named(tmp_path: Path, name: str) -> None:
    file, damage, words = DAMAGE[name]
    prefix = prepared(tmp_path)
    path = tmp_path / file
    if name == "half a manifest":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        damage(path)
    assert words in refusal(prefix)


def test_files_of_other_data_are_noticed(tmp_path: Path) -> None:
    prefix = prepared(tmp_path)
    prepared(tmp_path, TEXT[::-1], "Q")
    shutil.copy(tmp_path / "Q_train.bin", tmp_path / "P_train.bin")
    assert "P_train.bin: is not the file" in refusal(prefix)
    shutil.copy(tmp_path / "P_valid.bin", tmp_path / "P_train.bin")
    assert "P_train.bin: has 10 bytes, its manifest says 80" in refusal(prefix)


def test_wrong_counts_in_a_manifest_are_noticed(tmp_path: Path) -> None:
    prefix = prepared(tmp_path)
    path = tmp_path / "P.json"
    written = path.read_text()
    for before, after in (
        ('"tokens": 80,', '"tokens": 81,'),
        ('"words": ', '"words": 1'),
        ('"type": "byte"', '"type": "null"'),
    ):
        assert before in written
        path.write_text(written.replace(before, after))
        assert f"manifest {path}: is not what was written (another SHA-256); prepare the data again" in refusal(prefix)
    content = json.loads(written)
    path.write_text(json.dumps(dict(reversed(content.items()))))  # formatted by another program: the same content
    assert len(opened(prefix).train) == 80
    del content["sha256"]
    path.write_text(json.dumps(content))
    assert f"manifest {path}: is damaged ('sha256')" in refusal(prefix)


def test_nothing_there(tmp_path: Path) -> None:
    prepared(tmp_path, name="shakespeare")
    bare(tmp_path, [1, 2, 3], "numbers")
    message = refusal(tmp_path / "shakespear")
    assert f"neither {tmp_path}/shakespear.json nor {tmp_path}/shakespear.bin exists" in message
    assert f"did you mean {tmp_path}/shakespeare?" in message
    assert f"tools/prepare_data.py byte --input FILE --output-prefix {tmp_path}/shakespear" in message
    assert f"did you mean {tmp_path}/numbers?" in refusal(tmp_path / "number.bin")
    assert "did you mean" not in refusal(tmp_path / "unlike")
    message = refusal(tmp_path)
    assert "is a folder" in message
    assert f"{tmp_path}/numbers, {tmp_path}/shakespeare" in message
    assert "shakespeare_train" not in message
    message = refusal(tmp_path / "text.txt")
    assert f"prepare_data.py byte --input {tmp_path}/text.txt --output-prefix {tmp_path}/text" in message
    assert f"the folder {tmp_path}/none does not exist" in refusal(tmp_path / "none" / "P")


def test_the_hint_names_the_kind_that_the_recipe_needs(tmp_path: Path) -> None:
    for prefix in (tmp_path / "P", tmp_path / "none" / "P"):
        with pytest.raises(UsageError, match=rf"prepare_data.py wikitext-103 --output-prefix {prefix}$"):
            open_dataset(DataConfig(data_path=str(prefix)), prepare="wikitext-103")


def test_half_of_a_bare_file(tmp_path: Path) -> None:
    prefix = bare(tmp_path, [1, 2, 3])
    Path(f"{prefix}.idx").unlink()
    assert "bare.idx: does not exist" in refusal(prefix, tokenizer_type="byte")
    prefix = bare(tmp_path, [1, 2, 3])
    Path(f"{prefix}.bin").unlink()
    assert "bare.bin: does not exist" in refusal(f"{prefix}.bin", tokenizer_type="byte")


def test_prepared_and_bare_under_one_name(tmp_path: Path) -> None:
    prefix = prepared(tmp_path)
    bare(tmp_path, [1, 2, 3], "P")
    assert "both prepared data" in refusal(prefix)


def test_a_foreign_json_beside_a_bare_file_is_ignored(tmp_path: Path) -> None:
    prefix = bare(tmp_path, [1, 2, 3])
    Path(f"{prefix}.json").write_text("[not json")
    assert opened(prefix, tokenizer_type="byte", split="1,1,1").test.tolist() == [3]


def test_split_of_weight_zero_is_empty(tmp_path: Path) -> None:
    data = opened(prepared(tmp_path, split="1,0,0"))
    assert (len(data.train), len(data.valid), len(data.test)) == (100, 0, 0)
    assert IndexedReader(tmp_path / "P_valid").document_indices.tolist() == [0]
