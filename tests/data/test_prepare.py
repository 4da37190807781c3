"""Preparation: exact tokens, counts, entropies and hashes; whole or not at all under errors, kills and neighbours."""

import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data import prepare as prepare_module
from megatron_allattn.data.corpora import files_corpus
from megatron_allattn.data.indexed import IndexedReader
from megatron_allattn.data.manifest import Manifest, read_manifest
from megatron_allattn.data.prepare import Preparation, prepare, unigram_entropy
from megatron_allattn.data.splits import split_boundaries
from megatron_allattn.data.tokenizers import CharTokenizer, WordLearner

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = sorted(["P.json"] + [f"P_{split}.{kind}" for split in ("train", "valid", "test") for kind in ("bin", "idx")])


def job(folder: Path, *contents: bytes, **settings: Any) -> Preparation:
    """A preparation of files 0.txt, 1.txt, … with these contents, into folder/out/P."""
    paths = [folder / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    values = {"tokenizer": "byte", "prefix": folder / "out" / "P", **settings}
    return Preparation(corpus=files_corpus(paths), **values)


def outputs(folder: Path) -> list[str]:
    out = folder / "out"
    return sorted(path.name for path in out.iterdir()) if out.exists() else []


def test_bytes_by_hand(tmp_path: Path) -> None:
    made = prepare(job(tmp_path, b"aaaabbcc", b"dd", split="5,3,2"))
    assert outputs(tmp_path) == OUTPUTS
    readers = {split: IndexedReader(tmp_path / "out" / f"P_{split}") for split in ("train", "valid", "test")}
    text = {
        split: [[sequence.tobytes() for sequence in document] for document in reader.documents()]
        for split, reader in readers.items()
    }
    # 10 tokens, boundaries at 5 and 8: the first cuts document 0, the second falls between the documents
    assert text == {"train": [[b"aaaab"]], "valid": [[b"bcc"]], "test": [[b"dd"]]}
    # whole: 4 a, 2 b, 2 c, 2 d of 10 tokens
    assert made.unigram_entropy_bits == pytest.approx(0.4 * math.log2(2.5) + 3 * 0.2 * math.log2(5), rel=1e-15)
    entropies = [made.splits[split].unigram_entropy_bits for split in ("train", "valid", "test")]
    assert entropies[0] == pytest.approx(0.8 * math.log2(1.25) + 0.2 * math.log2(5), rel=1e-15)
    assert entropies[1] == pytest.approx(math.log2(3) - 2 / 3, rel=1e-15)
    assert entropies[2] == 0


def test_manifest_says_what_was_made(tmp_path: Path) -> None:
    texts = ["héé\n".encode(), b"\xef\xbb\xbfabc\r\n"]
    made = prepare(job(tmp_path, *texts, tokenizer="char", split="1,1,0"))
    content = json.loads((tmp_path / "out" / "P.json").read_text())
    assert content == made.to_json()
    assert (content["format"], content["version"]) == ("megatron_allattn prepared data", 2)
    assert content["tokenizer"] == {"type": "char", "characters": ["\n", "\r", "a", "b", "c", "h", "é"]}
    assert (content["vocabulary_size"], content["dtype"], content["split"]) == (7, "uint8", "1,1,0")
    assert (content["tokens"], content["bytes"], content["documents"]) == (9, 11, 2)
    assert content["splits"]["train"] == {
        "tokens": 4,
        "documents": 1,
        "unigram_entropy_bits": 1.5,
        "bytes": 6,
        "characters": 4,
        "words": 1,
        "lines": 1,
        "unknown_words": 0,
    }
    empty = dict.fromkeys(content["splits"]["train"], 0)
    assert content["splits"]["test"] == {**empty, "unigram_entropy_bits": None}
    assert content["notes"] == ["1 line end is \\r\\n: the \\r stays in its line"]
    for number, text in enumerate(texts):
        assert content["inputs"][number] == {
            "name": str(tmp_path / f"{number}.txt"),
            "bytes": len(text),
            "sha256": hashlib.sha256(text).hexdigest(),
            "tokens": [4, 5][number],
            "byte_order_mark": number == 1,
            "crlf_lines": number,
        }
    for name, record in content["files"].items():
        written = (tmp_path / "out" / f"P_{name}").read_bytes()
        assert (record["bytes"], record["sha256"]) == (len(written), hashlib.sha256(written).hexdigest())
    assert (tmp_path / "out" / "P_train.bin").read_bytes() == bytes([5, 6, 6, 0])
    assert (tmp_path / "out" / "P_valid.bin").read_bytes() == bytes([2, 3, 4, 1, 0])


def test_same_bytes_at_any_chunk_size(tmp_path: Path) -> None:
    text = "naïve €uro 😀 text\r\n".encode() * 13
    digests = set()
    for chunk_bytes in (1, 2, 3, 7, 64, 10_000):
        prepare(job(tmp_path, text, text[:39], tokenizer="char", chunk_bytes=chunk_bytes, existing="overwrite"))
        files = [(tmp_path / "out" / name).read_bytes() for name in OUTPUTS]
        digests.add(hashlib.sha256(b"".join(files)).hexdigest())
    assert len(digests) == 1


def test_splits_hold_the_text_in_order(tmp_path: Path) -> None:
    texts = [bytes([97 + number]) * (number * 37 + 1) for number in range(9)]
    made = prepare(job(tmp_path, *texts, split="60.5,20,19.5", chunk_bytes=10))
    whole = b"".join(texts)
    parts = [(tmp_path / "out" / f"P_{split}.bin").read_bytes() for split in ("train", "valid", "test")]
    assert b"".join(parts) == whole
    assert len(parts[0]) == int(len(whole) * 0.605)
    lengths = [IndexedReader(tmp_path / "out" / f"P_{split}").num_tokens for split in ("train", "valid", "test")]
    assert lengths == [made.splits[split].tokens for split in ("train", "valid", "test")] == list(map(len, parts))
    assert sum(record.documents for record in made.splits.values()) == 9 + 2  # two documents are cut


def test_raw_bytes_take_everything(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf\0\xff\r\n\xc0" * 4
    made = prepare(job(tmp_path, content, raw_bytes=True, split="1,0,0"))
    assert (tmp_path / "out" / "P_train.bin").read_bytes() == content
    assert not made.inputs[0].byte_order_mark


def test_given_vocabulary_is_used_as_it_is(tmp_path: Path) -> None:
    vocabulary = CharTokenizer(["z", "b", "a"])
    made = prepare(job(tmp_path, b"abab", tokenizer=vocabulary, split="1,0,0"))
    assert (tmp_path / "out" / "P_train.bin").read_bytes() == bytes([2, 1, 2, 1])
    assert made.tokenizer.fingerprint == vocabulary.fingerprint


def test_entropy_of_counts() -> None:
    assert unigram_entropy(np.array([7, 0, 7, 7, 7])) == 2.0
    assert unigram_entropy(np.array([0, 5])) == 0.0
    assert unigram_entropy(np.full(256, 10**15)) == pytest.approx(8.0, rel=1e-15)


@pytest.mark.parametrize(
    ("split", "num_tokens", "expected"),
    [
        ("90,5,5", 1000, [0, 900, 950, 1000]),
        ("90, 5 ,5", 1000, [0, 900, 950, 1000]),
        ("1,1,1", 10, [0, 3, 6, 10]),
        ("0.1,0.2,0.7", 10, [0, 1, 3, 10]),
        ("1,0,1", 10, [0, 5, 5, 10]),
        ("100,0,0", 1, [0, 1, 1, 1]),
        ("0,0,3", 7, [0, 0, 0, 7]),
        ("1,1,1", 3 * 10**18 + 1, [0, 10**18, 2 * 10**18, 3 * 10**18 + 1]),
    ],
)
def test_split_boundaries(split: str, num_tokens: int, expected: list[int]) -> None:
    assert split_boundaries(split, num_tokens) == expected


@pytest.mark.parametrize(
    "split",
    [
        "-1,1,0",
        "90,abc5,5",
        "0,0,0",
        "1,1",
        "1",
        "",
        "1,1,1,1",
        "nan,1,1",
        "inf,1,1",
        "1e3,1,1",
        "1/2,1,1",
        "1,,1",
        "٣,1,1",
    ],
)
def test_bad_splits_are_named(tmp_path: Path, split: str) -> None:
    with pytest.raises(UsageError, match=r"--split") as refusal:
        prepare(job(tmp_path, b"some text", split=split))
    assert (split or "''") in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_split_without_tokens_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--split 98,1,1: leaves none of 50 tokens to valid"):
        prepare(job(tmp_path, b"x" * 50, split="98,1,1"))
    assert not (tmp_path / "out").exists()


BAD_TEXT: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "NUL": (b"ab\n\0", {}, "line 2, byte offset 3 is a NUL byte"),
    "UTF-8": (b"ab\n\xff", {"tokenizer": "char"}, "line 2, byte offset 3 .*0xff"),
    "only a mark": (b"\xef\xbb\xbf", {}, "holds no text"),
    "unknown character": (
        b"\xef\xbb\xbfabxb",
        {"tokenizer": CharTokenizer(["a", "b"]), "chunk_bytes": 2},
        r"'x' \(U\+0078.*offset 5 ",
    ),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text_is_named_and_nothing_written(tmp_path: Path, name: str) -> None:
    content, settings, words = BAD_TEXT[name]
    with pytest.raises(UsageError, match=rf"1\.txt.*{words}"):
        prepare(job(tmp_path, b"abba", content, split="1,0,0", **settings))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.txt", "1.txt"]


@pytest.mark.parametrize("tokenizer", ["byte", "char", WordLearner()])
def test_what_is_no_text_is_told_before_a_split_that_it_is_too_short_for(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"0\.txt: line 1, byte offset 2 is a NUL byte"):
        prepare(job(tmp_path, b"ab\0c", tokenizer=tokenizer))
    with pytest.raises(UsageError, match="--split 90,5,5: leaves n"):
        prepare(job(tmp_path, b"ab c", tokenizer=tokenizer))
    with pytest.raises(UsageError, match="--split 90,5: has 2 parts"):
        prepare(job(tmp_path, b"ab\0c", tokenizer=tokenizer, split="90,5"))
    with pytest.raises(UsageError, match="--split 90,5,5: leaves none of 4 tokens"):
        prepare(job(tmp_path, b"ab\0c", raw_bytes=True))


def test_file_that_changes_is_refused(tmp_path: Path) -> None:
    def change(done: int) -> None:
        (tmp_path / "0.txt").write_bytes(b"bbbb")

    with pytest.raises(UsageError, match=r"0\.txt: changed while it was read"):
        prepare(job(tmp_path, b"aaaa", split="1,0,0"), change)
    assert not (tmp_path / "out").exists()


def test_existing_output_is_kept_unless_told(tmp_path: Path) -> None:
    prepare(job(tmp_path, b"first", split="1,0,0"))
    with pytest.raises(UsageError, match=r"P\.json exists already.*--overwrite"):
        prepare(job(tmp_path, b"other", split="1,0,0"))
    assert (tmp_path / "out" / "P_train.bin").read_bytes() == b"first"
    prepare(job(tmp_path, b"other", split="1,0,0", existing="overwrite"))
    assert (tmp_path / "out" / "P_train.bin").read_bytes() == b"other"
    assert outputs(tmp_path) == OUTPUTS
    made = prepare(job(tmp_path, b"third", split="1,0,0", existing="reuse"))
    assert made.inputs[0].sha256 == hashlib.sha256(b"other").hexdigest()


def test_foreign_file_and_input_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "P_train.bin").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"P_train\.bin exists already"):
        prepare(job(tmp_path, b"text", split="1,0,0", prefix=tmp_path / "P"))
    corpus = files_corpus([tmp_path / "P_train.bin"])
    with pytest.raises(UsageError, match=r"would overwrite the input .*P_train\.bin"):
        prepare(Preparation(corpus=corpus, prefix=tmp_path / "P", tokenizer="byte", existing="overwrite"))
    assert (tmp_path / "P_train.bin").read_bytes() == b"mine"


def test_check_sees_the_manifest_before_anything_is_there(tmp_path: Path) -> None:
    seen: list[Manifest] = []

    def check(made: Manifest) -> tuple[str, ...]:
        seen.append(made)
        assert outputs(tmp_path) == [".P.preparing"]
        if len(seen) == 1:
            raise UsageError("not what was expected")
        return ("as expected",)

    work = job(tmp_path, b"text", split="1,0,0", source={"from": "here"}, check=check)
    with pytest.raises(UsageError, match="not what was expected"):
        prepare(work)
    assert not (tmp_path / "out").exists()
    assert prepare(work).notes == ("as expected",)
    content = json.loads((tmp_path / "out" / "P.json").read_text())
    assert (content["notes"], content["source"], seen[1].tokens) == (["as expected"], {"from": "here"}, 4)


def test_output_in_bad_places(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a folder; add a name"):
        prepare(job(tmp_path, b"text", prefix=tmp_path))
    with pytest.raises(UsageError, match=r"0\.txt.*(File exists|Not a directory)"):
        prepare(job(tmp_path, b"text", prefix=tmp_path / "0.txt" / "P"))
    assert [path.name for path in tmp_path.iterdir()] == ["0.txt"]


def test_full_disk_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 9})
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UsageError, match=r"needs 10 bytes, 9 are free"):
        prepare(job(tmp_path, b"x" * 10, split="1,0,0"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("failing", range(14))
def test_failure_while_files_are_replaced_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    prepare(job(tmp_path, b"first" * 20))
    old = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert len(old) == 7
    calls = []
    replace = os.replace

    def fail_once(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == failing + 1:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(OSError, match="No space"):
        prepare(job(tmp_path, b"other" * 20, existing="overwrite"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == old


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    prepare(job(tmp_path, b"first" * 20))
    (tmp_path / "out" / "P_valid.idx").unlink()
    (tmp_path / "out" / "P_valid.idx").mkdir()
    with pytest.raises(UsageError, match=r"P_valid\.idx is a folder"):
        prepare(job(tmp_path, b"other" * 20, existing="overwrite"))
    assert outputs(tmp_path) == OUTPUTS


@pytest.mark.parametrize("failing", range(7))
def test_failure_while_files_get_their_names_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    calls = []
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if target.parent.name == "out":
            calls.append(target.name)
            if len(calls) > failing:
                raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        prepare(job(tmp_path, b"x" * 99))
    assert len(calls) == failing + 1
    assert (calls[-1] == "P.json") == (failing == 6)  # the manifest comes last
    assert not (tmp_path / "out").exists()


KILL_CHILD = """
import os, signal, sys
from pathlib import Path
from megatron_allattn.data.corpora import files_corpus
from megatron_allattn.data.prepare import Preparation, prepare
folder, moment = Path(sys.argv[1]), sys.argv[2]
work, names = 0, 0
def progress(done):
    global work
    work += done
    if moment == "reading" and work >= 150_000 or moment == "writing" and work >= 450_000:
        os.kill(os.getpid(), signal.SIGKILL)
replace = os.replace
def counted(source, target):
    global names
    replace(source, target)
    names += Path(target).parent.name == "out"
    if moment.isdigit() and names == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = counted
corpus = files_corpus([folder / "text.txt"])
prepare(Preparation(corpus=corpus, prefix=folder / "out" / "P", tokenizer="byte", chunk_bytes=50_000), progress)
"""


@pytest.mark.parametrize("moment", ["reading", "writing", "1", "6"])
def test_kill_leaves_no_manifest_and_the_next_one_clears_up(tmp_path: Path, moment: str) -> None:
    (tmp_path / "text.txt").write_bytes(b"0123456789" * 30_000)
    command = [sys.executable, "-c", KILL_CHILD, str(tmp_path), moment]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = outputs(tmp_path)
    assert ".P.preparing" in left
    assert "P.json" not in left
    if not moment.isdigit():
        assert left == [".P.preparing"]
    else:
        assert len(left) == 1 + int(moment)
    corpus = files_corpus([tmp_path / "text.txt"])
    made = prepare(Preparation(corpus=corpus, prefix=tmp_path / "out" / "P", tokenizer="byte", existing="reuse"))
    assert outputs(tmp_path) == OUTPUTS
    assert made.tokens == 300_000


def test_second_preparation_at_the_same_time_is_refused(tmp_path: Path) -> None:
    other = job(tmp_path, b"text" * 9)
    refusals = []

    def meanwhile(done: int) -> None:
        with pytest.raises(UsageError, match="another process is preparing") as refusal:
            prepare(other)
        refusals.append(str(refusal.value))

    prepare(other, meanwhile)
    assert len(refusals) == 4  # a piece when the text is checked, then one of each split
    assert outputs(tmp_path) == OUTPUTS


def test_memory_is_bounded_and_progress_complete(tmp_path: Path) -> None:
    size = 50_000_000
    line = "The quick brown fox – jumps over the lazy dog.\n".encode()
    (tmp_path / "large.txt").write_bytes(line * (size // len(line)))
    corpus = files_corpus([tmp_path / "large.txt"])
    large = Preparation(corpus=corpus, prefix=tmp_path / "P", tokenizer="char", chunk_bytes=2**18)
    done: list[int] = []
    tracemalloc.start()
    try:
        made = prepare(large, done.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made.tokens == (size // len(line)) * len(line.decode())
    assert sum(done) == large.total_work() == 3 * (tmp_path / "large.txt").stat().st_size
    assert peak < 16_000_000


def test_a_clean_up_that_fails_hides_neither_an_error_nor_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def check(made: Manifest) -> tuple[str, ...]:
        monkeypatch.setattr(Path, "rmdir", refuse)
        monkeypatch.setattr(Path, "glob", refuse)
        if not made.tokens % 2:
            raise UsageError("the first error")
        return ()

    with pytest.raises(UsageError, match="the first error"):
        prepare(job(tmp_path, b"text", split="1,0,0", check=check))
    monkeypatch.undo()
    assert prepare(job(tmp_path, b"texts", split="1,0,0", check=check)).tokens == 5
    monkeypatch.undo()
    assert read_manifest(tmp_path / "out" / "P") is not None
