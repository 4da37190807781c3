"""tools/prepare_data.py with the paper's corpora, from a local server: what comes out, what is kept, what is said."""

import hashlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_allattn.data import download
from tests.support.corpora import ARCHIVES, ENWIK8, zipped
from tests.support.file_server import FileServer, Served, Step

TOOL = Path(__file__).resolve().parents[2] / "tools" / "prepare_data.py"
OUTPUTS = {"P.json"} | {f"P_{split}.{kind}" for split in ("train", "valid", "test") for kind in ("bin", "idx")}
CORPORA = ("enwik8", "text8", "wikitext-103")
FILES = {"enwik8": "enwik8.zip", "text8": "text8.zip", "wikitext-103": "wikitext-103-v1.zip"}


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer({f"/data/{FILES[name]}": Served(ARCHIVES[name]) for name in CORPORA}) as running:
        yield running


@pytest.fixture
def tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the tool in `tmp_path`, in this process; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    main = runpy.run_path(str(TOOL))["main"]

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return run


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("P*")}


@pytest.mark.parametrize("name", CORPORA)
def test_from_a_mirror_and_from_an_archive(
    tmp_path: Path, server: FileServer, tool: Callable[..., tuple[int, str, str]], name: str
) -> None:
    digest = hashlib.sha256(ARCHIVES[name]).hexdigest()
    other = ("--archive-sha256", digest, "--output-prefix", "P")
    code, output, error = tool(name, "--mirror", f"{server.url}/no/", f"{server.url}/data/", *other)
    assert (code, error) == (0, f"{server.url}/no/{FILES[name]}: HTTP status 404 Not Found\n")
    assert f"note: the archive (SHA-256 {digest}) is not the published one" in output
    assert output.endswith("train on it: python pretrain.py --data-path P\n")
    first = outputs(tmp_path)
    assert set(first) == OUTPUTS
    kept = tmp_path / "cache" / "megatron_allattn" / "downloads" / FILES[name]
    assert kept.read_bytes() == ARCHIVES[name]

    server.files.clear()
    code, output, error = tool(name, "--archive", kept, *other, "--overwrite")
    assert (code, error) == (0, "")
    assert outputs(tmp_path) == first
    manifest = json.loads(first["P.json"])
    assert (manifest["source"]["sha256"], manifest["source"]["published"]) == (digest, False)


def test_newline_rule(tmp_path: Path, server: FileServer, tool: Callable[..., tuple[int, str, str]]) -> None:
    sizes = {}
    for rule in ("eos", "symbol", "drop"):
        flags = ("--newline", rule, "--archive-sha256", "none", "--output-prefix", "P", "--overwrite")
        assert tool("enwik8", "--mirror", f"{server.url}/data", *flags)[0] == 0
        content = json.loads((tmp_path / "P.json").read_text())
        sizes[rule] = (content["vocabulary_size"], content["splits"]["train"]["tokens"])
        assert content["tokenizer"].get("newline", "symbol") == rule
    assert sizes == {"eos": (10, 37), "symbol": (10, 36), "drop": (9, 30)}
    assert len(server.seen) == 1  # the archive was kept


def test_download_only(tmp_path: Path, server: FileServer, tool: Callable[..., tuple[int, str, str]]) -> None:
    flags = ("--archive-sha256", "none", "--download-dir", "zips", "--download-only")
    code, output, error = tool("text8", "--mirror", f"{server.url}/data/text8.zip", *flags)
    assert (code, output, error) == (0, "zips/text8.zip\n", "")
    assert [path.name for path in tmp_path.rglob("*")] == ["zips", "text8.zip"]


def test_a_download_without_an_end_is_put_aside(
    tmp_path: Path, server: FileServer, tool: Callable[..., tuple[int, str, str]]
) -> None:
    """Without a hash, and a size that not all servers send, only the archive's own end tells that it is whole."""
    server.files["/data/cut.zip"] = Served(ARCHIVES["text8"][:-30], length=False)
    flags = ("--archive-sha256", "none", "--download-dir", "zips", "--download-only")
    code, output, error = tool("text8", "--mirror", f"{server.url}/data/cut.zip", *flags)
    assert (code, output) == (2, "")
    assert "is no whole zip archive; it was put aside as text8.zip.rejected" in error
    assert tool("text8", "--mirror", f"{server.url}/data/text8.zip", *flags)[0] == 0


def test_published_hash_is_asked_for(
    tmp_path: Path, server: FileServer, tool: Callable[..., tuple[int, str, str]]
) -> None:
    size = len(ARCHIVES["enwik8"])
    code, output, error = tool("enwik8", "--mirror", f"{server.url}/data", "--output-prefix", "P")
    assert (code, output) == (1, "")
    assert f"its file has {size} bytes, expected 36,445,475" in error.splitlines()[-1]
    assert error.splitlines()[-1].startswith("error: enwik8.zip could not be downloaded: ")
    (tmp_path / "enwik8.zip").write_bytes(ARCHIVES["enwik8"])
    code, output, error = tool("enwik8", "--archive", "enwik8.zip", "--output-prefix", "P")
    assert (code, output, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"error: --archive enwik8.zip: has {size} bytes with SHA-256 ")
    code, output, error = tool(
        "enwik8", "--archive-sha256", "ab" * 32, "--mirror", f"{server.url}/data", "--output-prefix", "P"
    )
    assert code == 1
    assert f"expected {'ab' * 32}; the file was put aside as" in error.splitlines()[-1]
    assert outputs(tmp_path) == {}


def test_server_in_trouble(tmp_path: Path, server: FileServer, tool: Callable[..., tuple[int, str, str]]) -> None:
    server.plan = [Step(status=500)] * 4
    flags = ("--archive-sha256", "none", "--output-prefix", "P")
    code, output, error = tool("text8", "--mirror", f"{server.url}/data", *flags)
    assert (code, output, len(server.seen)) == (1, "", 4)
    assert "HTTP status 500 Internal Server Error (4 times); name other addresses with --mirror" in error
    assert outputs(tmp_path) == {}


def test_damaged_archive_leaves_nothing(tmp_path: Path, tool: Callable[..., tuple[int, str, str]]) -> None:
    stored = bytearray(zipped({"enwik8": ENWIK8}, zipfile.ZIP_STORED))
    stored[stored.index(ENWIK8) + 20] ^= 1
    (tmp_path / "enwik8.zip").write_bytes(stored)
    flags = ("--archive", "enwik8.zip", "--archive-sha256", "none", "--output-prefix", "out/P")
    code, output, error = tool("enwik8", *flags)
    assert (code, output, error.count("\n")) == (2, "", 1)
    assert "member enwik8 of archive enwik8.zip: is damaged or cut short (Bad CRC-32" in error
    (tmp_path / "enwik8.zip").write_bytes(ARCHIVES["enwik8"][:-30])
    assert "is damaged or cut short" in tool("enwik8", *flags)[2]
    assert [path.name for path in tmp_path.iterdir()] == ["enwik8.zip"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("enwik8", "--output-prefix: is missing"),
        ("enwik8 --input a --output-prefix P", "--input: has no effect with enwik8"),
        ("enwik8 --split 1,1,1 --output-prefix P", "--split: has no effect with enwik8"),
        ("byte --archive a.zip --input a --output-prefix P", "--archive: has no effect with byte, only with enwik8"),
        ("text8 --archive a.zip --mirror http://h --output-prefix P", "--mirror: has no effect with --archive"),
        ("text8 --archive a.zip --download-dir d --output-prefix P", "--download-dir: has no effect with --archive"),
        ("text8 --download-only --output-prefix P", "--output-prefix: has no effect with --download-only"),
        ("text8 --download-only --newline drop", "--newline: has no effect with --download-only"),
        ("text8 --archive-sha256 12 --output-prefix P", "--archive-sha256 12: is not a SHA-256"),
        ("text8 --mirror ftp://h/text8.zip --output-prefix P", "--mirror ftp://h/text8.zip: is not an http or https"),
        ("text8 --archive no.zip --output-prefix P", "--archive no.zip: no such file"),
        ("text8 --archive . --output-prefix P", "--archive .: is no regular file"),
        ("text8 --archive fifo --output-prefix P", "--archive fifo: is no regular file"),
        ("text8 --archive empty --output-prefix P", "--archive empty: has 0 bytes"),
        ("text8 --archive empty --archive-sha256 none --output-prefix P", "archive empty: is damaged or cut short"),
        ("text8 --newline line --output-prefix P", "--newline"),
    ],
)
def test_wrong_usage(tmp_path: Path, tool: Callable[..., tuple[int, str, str]], arguments: str, words: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    code, output, error = tool(*arguments.split())
    assert (code, output, error[:7], error.count("\n")) == (2, "", "error: ", 1)
    assert words in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "fifo"]


def test_killed_download_goes_on(tmp_path: Path, server: FileServer, tool: Callable[..., tuple[int, str, str]]) -> None:
    whole = ARCHIVES["wikitext-103"]
    server.plan = [Step(stall=len(whole) // 2)]
    arguments = ["wikitext-103", "--mirror", f"{server.url}/data", "--archive-sha256", "none", "--output-prefix", "P"]
    process = subprocess.Popen([sys.executable, str(TOOL), *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    part = tmp_path / "cache" / "megatron_allattn" / "downloads" / "wikitext-103-v1.zip.part"
    deadline = time.monotonic() + 60
    while not part.exists() or part.stat().st_size < len(whole) // 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    code, _, error = tool(*arguments)
    assert (code, error) == (0, f"wikitext-103-v1.zip: going on from byte {len(whole) // 2}\n")
    assert sum(server.sent) == len(whole)
    assert set(outputs(tmp_path)) == OUTPUTS
