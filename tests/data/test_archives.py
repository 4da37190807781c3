"""Members of zip archives: the bytes that went in, or one line that says what is wrong; never other bytes."""

import struct
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data.archives import ArchiveMember, MemberStream
from tests.support.corpora import zipped

TEXT = b"one line and another\n" * 40
KINDS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]


def read(path: Path, member: str = "wiki/train", chunk: int = 7) -> bytes:
    pieces = []
    with ArchiveMember.of(path, member).open() as stream:
        while piece := stream.read(chunk):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_members_are_read_as_they_went_in(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(zipped({"wiki/valid": b"", "wiki/train": TEXT, "../outside": b"evil"}, kind))
    assert read(path) == TEXT
    assert read(path, chunk=2**20) == TEXT
    assert read(path, "wiki/valid") == b""
    assert read(path, "../outside") == b"evil"  # a name is only a name: nothing is written anywhere
    document = ArchiveMember.of(path, "wiki/train")
    assert (document.name, document.path, document.num_bytes) == ("a.zip:wiki/train", path, len(TEXT))
    with document.open(len(TEXT) - 8) as stream:
        assert (stream.read(0), stream.read(3), stream.read(99), stream.read(99)) == (b"", b"ano", b"ther\n", b"")
    with document.open(len(TEXT) + 8) as stream:
        assert stream.read(1) == b""
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_and_no_cut_gives_other_bytes(tmp_path: Path, kind: int) -> None:
    text = TEXT[:60]
    path, whole, outcomes = tmp_path / "a.zip", zipped({"wiki/valid": b"v", "wiki/train": text}, kind), Counter()
    flipped = [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(len(whole))
    ]
    for content in [*flipped, *(whole[:length] for length in range(1, len(whole), 5))]:
        path.write_bytes(content)
        try:
            assert read(path, chunk=1000) == text
            outcomes["unharmed"] += 1  # a date, a version, another member
        except UsageError as error:
            assert "a.zip: " in str(error)
            outcomes["refused"] += 1
    assert min(outcomes["refused"], outcomes["unharmed"]) > 50


def test_flipped_byte_is_a_wrong_checksum(tmp_path: Path) -> None:
    content = bytearray(zipped({"wiki/train": TEXT}, zipfile.ZIP_STORED))
    content[content.index(TEXT) + 100] ^= 1
    (tmp_path / "a.zip").write_bytes(content)
    words = r"member wiki/train of archive .*a\.zip: is damaged or cut short \(Bad CRC-32.*\); get the archive again"
    with pytest.raises(UsageError, match=words):
        read(tmp_path / "a.zip")


@pytest.mark.parametrize("content", [b"", b"no zip", zipped({"wiki/train": TEXT})[:-30], b"<html>log in</html>"])
def test_no_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UsageError, match=r"archive .*a\.zip: is damaged or cut short \(File is not a zip file\)"):
        read(tmp_path / "a.zip")


def test_missing_and_repeated_members(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(zipped({"wiki/train.tokens": TEXT}))
    with pytest.raises(UsageError, match=r"member wiki/train of archive .*: is missing, it holds wiki/train\.tokens;"):
        read(path)
    path.write_bytes(zipped({}))
    with pytest.raises(UsageError, match="is missing, it holds nothing"):
        read(path)
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("wiki/train", b"one")
        archive.writestr("wiki/train", b"two")
    with pytest.raises(UsageError, match="is in it twice"):
        read(path)


def central(content: bytes, offset: int, value: bytes) -> bytes:
    """The archive with bytes of its only member's record in the central directory replaced."""
    place = content.index(b"PK\x01\x02") + offset
    return content[:place] + value + content[place + len(value) :]


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (
            24,
            struct.pack("<I", 2**32 - 2),
            r"states 4,294,967,294 bytes out of \d+, more than its compression can give",
        ),
        (24, struct.pack("<I", len(TEXT) + 1), "has 840 bytes, 841 are stated"),
        (24, struct.pack("<I", len(TEXT) - 1), "Bad CRC-32"),
        (16, struct.pack("<I", 1), "Bad CRC-32"),
        (8, struct.pack("<H", 1), "is encrypted"),
        (10, struct.pack("<H", 14), r"compressed by method 14, expected deflate \(8\) or none \(0\)"),
        (20, struct.pack("<I", 5), "more than its compression can give|is damaged or cut short"),
        (42, struct.pack("<I", 10**6), "is damaged or cut short"),
    ],
)
def test_records_that_lie(tmp_path: Path, offset: int, value: bytes, words: str) -> None:
    (tmp_path / "a.zip").write_bytes(central(zipped({"wiki/train": TEXT}), offset, value))
    with pytest.raises(UsageError, match=rf"member wiki/train of archive .*a\.zip: .*({words})"):
        read(tmp_path / "a.zip")


def test_streams_close_their_archive(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped({"wiki/train": TEXT}))
    with MemberStream(tmp_path / "a.zip", "wiki/train") as stream:
        assert (stream.num_bytes, stream.read(3)) == (840, b"one")
        descriptor = stream._archive.fp
    assert stream.closed
    assert descriptor.closed
