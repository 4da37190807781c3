"""Megatron token files: the bytes Megatron-LM writes, and every kind of damage is named with file and numbers."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data import indexed
from megatron_allattn.data.indexed import IndexedReader, IndexedWriter, dtype_for_vocabulary

MEGATRON = Path(__file__).parent / "megatron_dataset"
CASES = ["uint8_text_document", "uint16_text_document", "int32_text_document"]


def two_documents(folder: Path) -> Path:
    """uint16 documents [[1, 2, 3], [4]] and [[5, 60000]]: 12 bytes of tokens, 3 sequences, 3 marks."""
    prefix = folder / "two"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_sequence(np.array([1, 2, 3]))
        writer.add_sequence(np.array([4]))
        writer.end_document()
        writer.add_sequence(np.array([5, 60000]))
        writer.end_document()
    return prefix


@pytest.mark.parametrize("name", CASES)
def test_reads_what_megatron_wrote(name: str) -> None:
    case = json.loads((MEGATRON / f"{name}.json").read_text())
    reader = IndexedReader(MEGATRON / name)
    assert [[sequence.tolist() for sequence in document] for document in reader.documents()] == case["documents"]
    assert reader.dtype == np.dtype(case["dtype"])
    assert reader.sequence_lengths.tolist() == case["sequence_lengths"]
    assert reader.document_indices.tolist() == case["document_indices"]
    flat = [token for document in case["documents"] for sequence in document for token in sequence]
    assert reader.tokens.tolist() == flat
    assert reader.num_tokens == len(flat)


@pytest.mark.parametrize("name", CASES)
def test_writes_the_bytes_megatron_writes(name: str, tmp_path: Path) -> None:
    case = json.loads((MEGATRON / f"{name}.json").read_text())
    with IndexedWriter(tmp_path / "again", case["dtype"]) as writer:
        for document in case["documents"]:
            for sequence in document:
                writer.add_sequence(np.array(sequence))
            writer.end_document()
    for suffix, expected in case["sha256"].items():
        assert hashlib.sha256((tmp_path / f"again{suffix}").read_bytes()).hexdigest() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.bin", "again.idx"]


def test_layout_by_hand(tmp_path: Path) -> None:
    prefix = two_documents(tmp_path)
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 60000)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 3)
    assert Path(f"{prefix}.idx").read_bytes() == header + struct.pack("<3i3q3q", 3, 1, 2, 0, 6, 8, 0, 2, 3)


def test_pieces_make_the_same_file_as_whole_sequences(tmp_path: Path) -> None:
    two_documents(tmp_path)
    with IndexedWriter(tmp_path / "pieces", np.uint16) as writer:
        for piece in ([1], [2, 3]):
            writer.append(np.array(piece))
        writer.end_sequence()
        writer.append(np.array([4], np.uint16))
        writer.end_document()
        writer.append(np.array([5, 60000]))
        writer.append(np.array([], np.int64))
        writer.end_document()
    for kind in ("bin", "idx"):
        assert (tmp_path / f"pieces.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()


def test_too_long_sequences_go_on_in_further_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "LONGEST_SEQUENCE", 5)
    with IndexedWriter(tmp_path / "long", np.uint8) as writer:
        writer.append(np.arange(3))
        writer.append(np.arange(3, 12))
        writer.end_document()
    reader = IndexedReader(tmp_path / "long")
    assert reader.sequence_lengths.tolist() == [5, 5, 2]
    assert reader.document_indices.tolist() == [0, 3]
    assert reader.tokens.tolist() == list(range(12))


def test_no_documents(tmp_path: Path) -> None:
    IndexedWriter(tmp_path / "none", np.uint8).close()
    reader = IndexedReader(tmp_path / "none")
    assert (reader.num_tokens, reader.tokens.shape, list(reader.documents())) == (0, (0,), [])
    assert (tmp_path / "none.idx").stat().st_size == 34 + 8


def test_final_names_appear_only_at_the_end(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "p", np.uint8)
    writer.add_sequence(np.arange(10))
    writer.end_document()
    assert not (tmp_path / "p.bin").exists()
    assert not (tmp_path / "p.idx").exists()
    writer.close()
    assert (tmp_path / "p.bin").read_bytes() == bytes(range(10))


@pytest.mark.parametrize("fault", ["exception", "document not ended", "token too large", "negative token"])
def test_failure_leaves_nothing(tmp_path: Path, fault: str) -> None:
    def write() -> None:
        with IndexedWriter(tmp_path / "p", np.uint8) as writer:
            writer.add_sequence(np.arange(10))
            if fault == "exception":
                raise ValueError("exception")
            writer.append(np.array({"token too large": [256], "negative token": [-1]}.get(fault, [1])))

    with pytest.raises(ValueError, match=r"exception|not ended|do not fit into uint8"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_types_without_a_code_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="uint32"):
        IndexedWriter(tmp_path / "p", np.uint32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65499, "uint16"), (65500, "int32"), (250000, "int32")],
)
def test_type_by_vocabulary(vocab_size: int, dtype: str) -> None:
    assert dtype_for_vocabulary(vocab_size).name == dtype


# Index of two_documents: 34 bytes of header, lengths at 34, pointers at 46, marks at 70, 94 bytes in all.
DAMAGE = {
    "empty index": ("idx", lambda old: b"", "two.idx", ["0 bytes", "34"]),
    "text index": (
        "idx",
        lambda old: b"To be, or not to be, that is the question",
        "two.idx",
        ["To be, or", "MMIDIDX"],
    ),
    "short text index": ("idx", lambda old: b"To be", "two.idx", ["To be", "MMIDIDX"]),
    "old format": ("idx", lambda old: b"TNTIDX\0\0" + old[8:], "two.idx", ["TNTIDX", "MMIDIDX"]),
    "half a header": ("idx", lambda old: old[:17], "two.idx", ["17 bytes", "34"]),
    "half an index": ("idx", lambda old: old[:47], "two.idx", ["47 bytes", "94"]),
    "longer index": ("idx", lambda old: old + b"\0\0\0", "two.idx", ["97 bytes", "94", "multimodal"]),
    "version 2": ("idx", lambda old: old[:9] + b"\2" + old[10:], "two.idx", ["version 2", "expected 1"]),
    "type code 9": ("idx", lambda old: old[:17] + b"\x09" + old[18:], "two.idx", ["code 9", "1, 2, 3"]),
    "float tokens": ("idx", lambda old: old[:17] + b"\x07" + old[18:], "two.idx", ["float32", "integer"]),
    "a huge count": ("idx", lambda old: old[:18] + b"\xff" * 8 + old[26:], "two.idx", ["94 bytes"]),
    "negative length": (
        "idx",
        lambda old: old[:38] + struct.pack("<i", -1) + old[42:],
        "two.idx",
        ["sequence 1", "-1"],
    ),
    "a gap": ("idx", lambda old: old[:62] + struct.pack("<q", 10) + old[70:], "two.idx", ["sequence 2", "10", "8"]),
    "marks fall": ("idx", lambda old: old[:78] + struct.pack("<q", 4) + old[86:], "two.idx", ["marks", "3"]),
    "last mark short": ("idx", lambda old: old[:86] + struct.pack("<q", 2) + old[94:], "two.idx", ["marks", "3"]),
    "one token short": ("bin", lambda old: old[:-2], "two.bin", ["10 bytes", "12", "6 tokens", "uint16"]),
    "one byte more": ("bin", lambda old: old + b"x", "two.bin", ["13 bytes", "12"]),
    "empty tokens": ("bin", lambda old: b"", "two.bin", ["0 bytes", "12"]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    kind, damage, file, words = DAMAGE[name]
    prefix = two_documents(tmp_path)
    path = Path(f"{prefix}.{kind}")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError) as refusal:
        IndexedReader(prefix)
    message = str(refusal.value)
    assert "\n" not in message
    for word in [file, *words]:
        assert word in message, message


@pytest.mark.parametrize("kind", ["bin", "idx"])
def test_missing_file_or_folder_is_named(tmp_path: Path, kind: str) -> None:
    prefix = two_documents(tmp_path)
    path = Path(f"{prefix}.{kind}")
    path.unlink()
    with pytest.raises(UsageError, match=rf"two\.{kind}: does not exist"):
        IndexedReader(prefix)
    path.mkdir()
    with pytest.raises(UsageError, match=rf"two\.{kind}: is a folder"):
        IndexedReader(prefix)
