"""tools/prepare_data.py as users start it: what it prints, its exit codes, one-line errors, nothing left behind."""

import argparse
import base64
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_allattn.data.tokenizers import CharTokenizer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "prepare_data.py"
OUTPUTS = {"P.json"} | {f"P_{split}.{kind}" for split in ("train", "valid", "test") for kind in ("bin", "idx")}


def tool(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], int]:
    """The tool's main function, in this process: for what needs no process of its own."""
    return runpy.run_path(str(TOOL))["main"]


def refused(folder: Path, *arguments: str) -> str:
    before = sorted(folder.iterdir())
    done = tool(folder, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert sorted(folder.iterdir()) == before
    return done.stderr


def test_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab" * 8)
    (tmp_path / "b.txt").write_bytes(b"cd" * 8)
    done = tool(tmp_path, "byte", "--input", "a.txt", "b.txt", "--output-prefix", "P", "--split", "2,1,1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "P: 32 tokens (byte, vocabulary of 256) of 2 documents, text files"
    assert "unigram entropy 2.0000 bits per token" in done.stdout.splitlines()[-2]
    assert done.stdout.splitlines()[-1] == "train on it: python pretrain.py --data-path P"
    assert {path.name for path in tmp_path.iterdir()} == OUTPUTS | {"a.txt", "b.txt"}
    assert (tmp_path / "P_train.bin").read_bytes() == b"ab" * 8
    assert "P.json exists already" in refused(tmp_path, "byte", "--input", "a.txt", "--output-prefix", "P")
    assert (
        tool(tmp_path, "byte", "--input", "b.txt", "--output-prefix=P", "--split=2,1,1", "--overwrite").returncode == 0
    )
    assert (tmp_path / "P_train.bin").read_bytes() == b"cd" * 4
    spaced = tool(tmp_path, "byte", "--input", "b.txt", "--output-prefix", "a P", "--split=2,1,1")
    assert spaced.stdout.splitlines()[-1] == "train on it: python pretrain.py --data-path 'a P'"  # to be pasted


def test_characters_with_the_vocabulary_of_other_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("zéa")
    (tmp_path / "b.txt").write_text("aé")
    assert tool(tmp_path, "char", "--input", "a.txt", "--output-prefix", "A", "--split", "1,1,1").returncode == 0
    flags = ["--output-prefix", "P", "--split", "1,0,0", "--tokenizer-model"]
    assert tool(tmp_path, "char", "--input", "b.txt", *flags, "A.json").returncode == 0
    assert (tmp_path / "P_train.bin").read_bytes() == bytes([0, 2])
    (tmp_path / "vocab.json").write_text(json.dumps(CharTokenizer(["a", "z"]).to_json()))
    message = refused(tmp_path, "char", "--input", "b.txt", *flags, "vocab.json", "--overwrite")
    assert "b.txt: character 'é' (U+00E9 LATIN SMALL LETTER E WITH ACUTE) at byte offset 1" in message
    (tmp_path / "vocab.json").write_text('{"type": "byte", "vocab_size": 256}')
    assert "describes a byte tokenizer" in refused(tmp_path, "char", "--input", "b.txt", *flags, "vocab.json")


def test_standard_library(tmp_path: Path) -> None:
    done = tool(tmp_path, "stdlib", "--output-prefix", "P")
    assert (done.returncode, done.stderr) == (0, "")
    content = json.loads((tmp_path / "P.json").read_text())
    assert content["corpus"] == f"standard library of Python {'.'.join(map(str, sys.version_info[:3]))}"
    whole = b"".join((tmp_path / f"P_{split}.bin").read_bytes() for split in ("train", "valid", "test"))
    assert Path(argparse.__file__).read_bytes() in whole
    assert 4.0 < content["unigram_entropy_bits"] < 5.5


def test_raw_bytes_and_marks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab\r\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\0ab")
    done = tool(tmp_path, "byte", "--input", "a.txt", "--output-prefix", "P", "--split", "1,0,0")
    assert "dropped the byte-order mark at the start of 1 file" in done.stdout
    assert (tmp_path / "P_train.bin").read_bytes() == b"ab\r\n"
    message = refused(tmp_path, "byte", "--input", "b.bin", "--output-prefix", "Q", "--split", "1,0,0")
    assert "b.bin: line 1, byte offset 0 (byte 0xff) is not valid UTF-8" in message
    flags = ["--output-prefix", "Q", "--split", "1,0,0", "--raw-bytes"]
    assert tool(tmp_path, "byte", "--input", "b.bin", *flags).returncode == 0
    assert (tmp_path / "Q_train.bin").read_bytes() == b"\xff\0ab"


def test_words_and_pieces_of_files(
    tmp_path: Path,
    main: Callable[[list[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("a", "x y x <unk>\r\ny x\n" * 9), ("b", "x new\n"), ("c", "y\n")):
        (tmp_path / name).write_bytes(text.encode())
    files = ["--input", "a", "--valid-input", "b", "--test-input", "c"]
    assert main(["word", *files, "--output-prefix", "W"]) == 0
    report = capsys.readouterr().out.splitlines()
    assert report[0] == "W: 77 tokens (word, vocabulary of 4) of 3 documents, text files"
    assert report[1].startswith(
        "  train             72 tokens (text: bytes 153, characters 153, words 54, lines 18), unigram "
    )
    assert "  note: 9 line ends are \\r\\n: each is one line end" in report
    assert "  note: valid: 1 of 2 words are not in the vocabulary and became <unk>" in report
    flags = ["--vocab-size", "261", "--sentencepiece-sentences", "9", "--output-prefix", "S"]
    assert main(["sentencepiece", *files, *flags, "--sentencepiece-model-type", "bpe", "--newline", "drop"]) == 0
    assert json.loads((tmp_path / "S.json").read_text())["tokenizer"]["newline"] == "drop"
    # the vocabularies of one for the other
    assert (
        main(["word", "--input", "c", "--split", "1,0,0", "--output-prefix", "V", "--tokenizer-model", "W.json"]) == 0
    )
    assert (tmp_path / "V_train.bin").read_bytes() == bytes([1, 2])
    capsys.readouterr()
    again = ["--input", "c", "--split", "1,0,0", "--output-prefix", "X", "--tokenizer-model"]
    assert main(["word", *again, "W.json", "--newline", "drop"]) == 2
    assert "--newline drop: contradicts W.json, which says eos" in capsys.readouterr().err
    assert main(["word", *again, "S.json"]) == 2
    assert "S.json: describes a sentencepiece tokenizer, expected word" in capsys.readouterr().err
    (tmp_path / "S.model").write_bytes(
        base64.b64decode(json.loads((tmp_path / "S.json").read_text())["tokenizer"]["model"])
    )
    assert main(["sentencepiece", *again, "S.model", "--newline", "symbol"]) == 0
    assert json.loads((tmp_path / "X.json").read_text())["tokenizer"]["newline"] == "symbol"


def test_a_compact_vocabulary_serves_other_text(
    tmp_path: Path, main: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(b"b\xff\na")
    (tmp_path / "b").write_bytes(b"\xffa\n")
    text = ["--split", "1,0,0", "--raw-bytes", "--output-prefix"]
    assert main(["byte", "--input", "a", *text, "A", "--compact-vocabulary", "--newline", "eos"]) == 0
    assert main(["byte", "--input", "b", *text, "B", "--tokenizer-model", "A.json"]) == 0
    assert (tmp_path / "B_train.bin").read_bytes() == bytes([3, 1, 0])  # of \n, a, b, \xff


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("byte --input a.txt", "--output-prefix"),
        ("byte --output-prefix P", "--input"),
        ("byte --input none.txt --output-prefix P", "none.txt: no such file"),
        ("byte --input . --output-prefix P", "is a folder"),
        ("byte --input empty --output-prefix P", "empty: is empty"),
        ("byte --input a.txt --output-prefix d/", "--output-prefix d/: is a folder"),
        ("byte --input a.txt --output-prefix P --split -1,1,0", "--split -1,1,0: "),
        ("byte --input a.txt --output-prefix P --split 90,abc5,5", "--split 90,abc5,5: "),
        ("byte --input a.txt --output-prefix P --split 0,0,0", "--split 0,0,0: "),
        ("byte --input a.txt --output-prefix P --split 1,1", "--split 1,1: "),
        ("byte --input a.txt --output-prefix P --split 98,1,1", "leaves none of 5 tokens to valid"),
        ("byte --inptu a.txt --output-prefix P", "did you mean --input?"),
        ("byte --in a.txt --output-prefix P", "--in: is unknown"),
        (
            "byte --input a.txt --input a.txt --output-prefix P",
            "--input: is given twice; give it once, with all its values",
        ),
        ("byte --input a.txt --output-prefix P --tokenizer-model v.json", "v.json: cannot be read"),
        (
            "byte --input a.txt --output-prefix P --tokenizer-model v.json --compact-vocabulary",
            "--compact-vocabulary: has no effect with --tokenizer-model",
        ),
        ("byte --input a.txt --output-prefix P --min-frequency 2", "has no effect with byte, only with word"),
        ("char --input a.txt --output-prefix P --compact-vocabulary", "has no effect with char, only with byte"),
        ("word --input a.txt --output-prefix P --vocab-size 9", "has no effect with word, only with sentencepiece"),
        ("word --input a.txt --output-prefix P --min-frequency -2", "--min-frequency -2: must be at least 1"),
        ("word --input a.txt --output-prefix P --newline no", "--newline"),
        ("word --input a.txt --output-prefix P --split 1,1,1", "leaves no line to"),
        ("word --input a.txt --output-prefix P --valid-input", "--valid-input"),
        ("word --input a.txt --output-prefix P --valid-input empty", "--valid-input empty: is empty"),
        ("char --input a.txt --output-prefix P --test-input pipe", "--test-input pipe: is not a regular file"),
        ("char --input a.txt --output-prefix P --test-input a.txt --split 1,1,1", "has no effect with --test-input"),
        ("stdlib --valid-input a.txt --output-prefix P", "has no effect with stdlib"),
        ("stdlib --newline eos --output-prefix P", "has no effect with stdlib"),
        ("sentencepiece --input a.txt --output-prefix P", "--vocab-size: is missing"),
        (
            "sentencepiece --input a.txt --output-prefix P --vocab-size 9 --tokenizer-model m",
            "--vocab-size: has no effect with --tokenizer-model",
        ),
        (
            "sentencepiece --input a.txt --output-prefix P --vocab-size 300 --pad-id 0 --eos-id 1",
            "--pad-id 0: is the id of --unk-id too; move one",
        ),
        (
            "sentencepiece --input a.txt --output-prefix P --vocab-size 32000 --split 1,0,0",
            "--vocab-size 32000: the training text allows at most",
        ),
        ("sentencepiece --input a.txt --output-prefix P --tokenizer-model none.model", "none.model: cannot be read"),
        ("sentencepiece --input a.txt --output-prefix P --tokenizer-model a.txt", "a.txt: is not JSON"),
        ("char --input a.txt --output-prefix P --raw-bytes", "has no effect with char, only with byte"),
        ("char --input a.txt --output-prefix P --tokenizer-model v.json", "v.json: cannot be read"),
        ("stdlib --input a.txt --output-prefix P", "has no effect with stdlib"),
        ("words --input a.txt --output-prefix P", "words"),
        ("", "kind"),
        ("byte --input a.txt --output-prefix P -x", "-x"),
    ],
)
def test_wrong_usage(
    tmp_path: Path,
    arguments: str,
    words: str,
    main: Callable[[list[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    output, error = capsys.readouterr()
    assert (output, error[:7], error.count("\n")) == ("", "error: ", 1)
    assert words in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "empty", "pipe"]


def test_help(tmp_path: Path) -> None:
    done = tool(tmp_path, "--help")
    assert done.returncode == 0
    for word in ("byte", "char", "stdlib", "--raw-bytes", "P_{train,valid,test}", "a boundary may cut a document"):
        assert word in done.stdout


def test_full_device_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 200_000)
    script = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); sys.argv = sys.argv[1:];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", script, str(TOOL), "byte", "--input", "a.txt", "--output-prefix", "out/P"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "error: out/P: File too large; nothing was written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ended_by_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(600_000_000)  # a hole: takes no space
    command = [sys.executable, str(TOOL), "byte", "--raw-bytes", "--input", "large", "--output-prefix", "out/P"]
    # A shell starts its background jobs with SIGINT ignored, and children inherit that: here it must count.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/.P.preparing/.P_train.bin.*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == code, error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_report_that_cannot_be_printed_does_not_undo_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab" * 8)
    command = [sys.executable, str(TOOL), "byte", "--input", "a.txt", "--output-prefix", "P", "--split", "2,1,1"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "nothing was written" not in done.stderr
    assert done.stderr.startswith("P: the data is complete, only this report could not be printed\n")
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == OUTPUTS | {"a.txt"}


def test_a_split_without_a_file_is_reported(
    tmp_path: Path, main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"a b\n" * 8)
    given = ["--input", str(tmp_path / "a.txt"), "--test-input", str(tmp_path / "a.txt")]
    assert main(["word", *given, "--output-prefix", str(tmp_path / "P")]) == 0
    note = "the valid split is empty, since there is no --valid-input"
    assert f"  note: {note}\n" in capsys.readouterr().out
    assert note in json.loads((tmp_path / "P.json").read_text())["notes"]
