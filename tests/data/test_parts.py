"""Splits of text: exact bytes and characters, or whole lines nearest to the weights."""

import itertools
import random
from pathlib import Path

import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data import parts as parts_module
from megatron_allattn.data.corpora import files_corpus
from megatron_allattn.data.parts import Source, sources_of_files, sources_of_text
from megatron_allattn.data.splits import split_boundaries

MARK = b"\xef\xbb\xbf"


def write(folder: Path, *contents: bytes) -> list[Path]:
    paths = [folder / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def texts(sources: list[Source]) -> list[bytes]:
    """The text of each split; parts follow on each other in every file."""
    found = [b"", b"", b""]
    for source in sources:
        content = source.document.path.read_bytes()
        assert all(first.end == second.start for first, second in itertools.pairwise(source.parts))
        assert source.parts[-1].end == len(content)
        for part in source.parts:
            found[part.split] += content[part.start : part.end]
    return found


def cut(folder: Path, split: str, unit: str, *contents: bytes, raw_bytes: bool = False) -> list[bytes]:
    corpus = files_corpus(write(folder, *contents))
    return texts(sources_of_text(corpus.documents, split, unit, raw_bytes=raw_bytes))


def nearest_lines(files: list[bytes], split: str) -> list[bytes]:
    """By trying every start of a line."""
    whole = b"".join(files)
    starts = set(itertools.accumulate(map(len, files), initial=0))
    starts |= {place + 1 for place, byte in enumerate(whole) if byte == ord("\n")}
    cuts = [min(sorted(starts), key=lambda start: abs(start - cut)) for cut in split_boundaries(split, len(whole))]
    return [whole[low:high] for low, high in itertools.pairwise(cuts)]


@pytest.mark.parametrize("window", [1, 3, 1000])
def test_lines_nearest_to_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(parts_module, "SEARCH_BYTES", window)
    generator = random.Random(5)
    compared = 0
    for _ in range(80):
        files = [
            b"".join(b"ab"[: generator.randrange(3)] * generator.randrange(9) + b"\n" for _ in range(9))
            + b"x" * generator.randrange(6)
            for _ in range(generator.randrange(1, 4))
        ]
        split = generator.choice(["90,5,5", "1,1,1", "1,0,1", "5,1,0", "0,1,2"])
        try:
            found = cut(tmp_path, split, "line", *files)
        except UsageError as refusal:
            assert "leaves no line to" in str(refusal)
            continue
        assert found == nearest_lines(files, split)
        compared += 1
    assert compared > 40


def test_lines_by_hand(tmp_path: Path) -> None:
    # 20 bytes, cuts wanted at 10 and 15; lines start at 0, 8, 12, 17: 10 is as near to 8 as to 12, the first wins
    assert cut(tmp_path, "2,1,1", "line", b"1234567\n901\n3456\n89\n") == [b"1234567\n", b"901\n3456\n", b"89\n"]
    # a carriage return ends no line, a file's start begins one
    assert cut(tmp_path, "1,1,0", "line", b"a\rb\rc\r", b"d\r\n") == [b"a\rb\rc\r", b"d\r\n", b""]
    assert cut(tmp_path, "2,2,1", "line", MARK + b"a\n", MARK + b"b\n", b"c") == [b"a\n", b"b\n", b"c"]


def test_bytes_and_characters_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "aé€😀\n" * 9  # 45 characters, 99 bytes
    for window in (1, 2, 5, 1000):
        monkeypatch.setattr(parts_module, "SEARCH_BYTES", window)
        for split in ("1,1,1", "90,5,5", "0,1,1", "3,0,0"):
            cuts = split_boundaries(split, len(text))
            expected = [text[low:high].encode() for low, high in itertools.pairwise(cuts)]
            assert cut(tmp_path, split, "char", MARK + text[:17].encode(), text[17:].encode()) == expected
    cuts = split_boundaries("90,5,5", 99)
    expected = [text.encode()[low:high] for low, high in itertools.pairwise(cuts)]
    assert cut(tmp_path, "90,5,5", "byte", text[:17].encode(), text[17:].encode()) == expected
    assert cut(tmp_path, "5,2,1", "byte", MARK + b"abcde", raw_bytes=True) == [MARK + b"ab", b"cd", b"e"]
    assert cut(tmp_path, "80,10,10", "byte", b"x" * 100) == [b"x" * 80, b"x" * 10, b"x" * 10]


def test_files_of_splits(tmp_path: Path) -> None:
    documents = [files_corpus([path]).documents for path in write(tmp_path, b"train", MARK + b"valid")]
    assert texts(sources_of_files([*documents, ()], raw_bytes=False)) == [b"train", b"valid", b""]
    (tmp_path / "mark").write_bytes(MARK)
    empty = files_corpus([tmp_path / "mark"], flag="--valid-input").documents
    with pytest.raises(UsageError, match=r"--valid-input .*mark: holds no text"):
        sources_of_files([documents[0], empty, ()], raw_bytes=False)


def test_a_split_without_a_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--split 90,5,5: leaves no line to valid: .* or --valid-input"):
        cut(tmp_path, "90,5,5", "line", b"one long line\nand another\n")
    with pytest.raises(UsageError, match=r"leaves no line to train"):
        cut(tmp_path, "1,9,9", "line", b"x" * 99)
