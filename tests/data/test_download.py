"""Downloads against a local server: bytes asked for once, whole files only, and every failure told in one line."""

import errno
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data import download as download_module
from megatron_allattn.data import partial
from megatron_allattn.data.download import DownloadError, Patience, Remote, download, mirror_url
from tests.support.file_server import FileServer, Served, Step

ROOT = Path(__file__).resolve().parents[2]
CONTENT = bytes(range(256)) * 4000  # 1,024,000 bytes
OTHER = bytes(reversed(CONTENT))
HASH, OTHER_HASH = hashlib.sha256(CONTENT).hexdigest(), hashlib.sha256(OTHER).hexdigest()
QUICK = Patience(timeout=5, attempts=3, pause=0.001)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer({"/x.zip": Served(CONTENT)}) as running:
        yield running


class Fetch:
    """Downloads x.zip from a server into a folder and keeps what was said."""

    def __init__(self, server: FileServer, folder: Path) -> None:
        self.server, self.folder, self.lines, self.counts = server, folder / "d", [], []

    def __call__(self, *paths: str, **expected: object) -> bytes:
        values = {"num_bytes": len(CONTENT), "sha256": HASH, "patience": QUICK, **expected}
        patience = values.pop("patience")
        urls = tuple(path if "://" in path else self.server.url + path for path in paths or ("/x.zip",))
        remote = Remote(name="x.zip", urls=urls, **values)
        path = download(
            remote,
            self.folder,
            patience=patience,
            notify=self.lines.append,
            progress=lambda done, total: self.counts.append((done, total)),
        )
        assert path == self.folder / "x.zip"
        return path.read_bytes()

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def broken_off(count: int) -> list[Step]:
    """`count` bytes, then failures until QUICK gives up."""
    return [Step(cut=count), Step(status=503), Step(status=503)]


@pytest.fixture
def fetch(server: FileServer, tmp_path: Path) -> Fetch:
    return Fetch(server, tmp_path)


def test_whole_file_once(fetch: Fetch, server: FileServer) -> None:
    assert fetch() == CONTENT
    assert fetch.left == ["x.zip"]
    assert fetch.counts[-1] == (len(CONTENT), len(CONTENT))
    assert fetch.lines == []
    assert server.seen[0].range is None
    assert server.seen[0].user_agent.startswith("megatron-allattn/")  # some servers refuse urllib's own
    assert fetch() == CONTENT
    assert len(server.seen) == 1
    assert fetch.lines == [f"{fetch.folder / 'x.zip'} is there already"]


def test_interrupted_connection_goes_on_at_once(fetch: Fetch, server: FileServer) -> None:
    server.plan = [Step(cut=300_000), Step(cut=400_000)]
    assert fetch() == CONTENT
    assert [(seen.range, seen.if_range, seen.status) for seen in server.seen] == [
        (None, None, 200),
        ("bytes=300000-", '"v1"', 206),
        ("bytes=700000-", '"v1"', 206),
    ]
    assert sum(server.sent) == len(CONTENT)  # no byte twice
    assert fetch.left == ["x.zip"]
    assert "the connection ended after 300,000 of 1,024,000 bytes" in fetch.lines[0]


def test_next_call_goes_on(fetch: Fetch, server: FileServer) -> None:
    server.plan = broken_off(600_000)
    with pytest.raises(DownloadError, match=r"HTTP status 503 .*\(3 times\).*x\.zip\.part keeps what came"):
        fetch()
    assert fetch.left == ["x.zip.part", "x.zip.part.json"]
    server.seen.clear()
    assert fetch() == CONTENT
    assert server.sent == [len(CONTENT) - 600_000]
    assert fetch.left == ["x.zip"]


def test_date_serves_where_there_is_no_strong_etag(fetch: Fetch, server: FileServer) -> None:
    server.files["/x.zip"].etag, server.files["/x.zip"].date = 'W/"weak"', "Sat, 01 Apr 2006 00:00:00 GMT"
    server.plan = [Step(cut=1000)]
    assert fetch() == CONTENT
    assert server.seen[1].if_range == "Sat, 01 Apr 2006 00:00:00 GMT"
    assert server.sent == [1000, len(CONTENT) - 1000]


@pytest.mark.parametrize("etag", ['"v1"', None])
def test_server_without_ranges_starts_again(fetch: Fetch, server: FileServer, etag: str | None) -> None:
    server.files["/x.zip"] = Served(CONTENT, etag=etag, ranges=False)
    server.plan = [Step(cut=900_000)]
    assert fetch() == CONTENT
    assert server.sent == [900_000, len(CONTENT)]
    assert any("from its start again" in line for line in fetch.lines)


@pytest.mark.parametrize("conditions", [True, False])
@pytest.mark.parametrize("sha256", [OTHER_HASH, None])
def test_file_that_changes_in_between(fetch: Fetch, server: FileServer, conditions: bool, sha256: str | None) -> None:
    server.plan = broken_off(500_000)
    with pytest.raises(DownloadError):
        fetch(sha256=sha256)
    server.files["/x.zip"] = Served(OTHER, etag='"v2"', conditions=conditions)
    assert fetch(sha256=sha256) == OTHER
    assert server.sent[-1] == len(OTHER)


def test_file_that_changes_without_a_word_is_found_by_its_hash(fetch: Fetch, server: FileServer) -> None:
    server.files["/x.zip"].etag = None
    server.plan = broken_off(500_000)
    with pytest.raises(DownloadError):
        fetch(sha256=OTHER_HASH)
    server.files["/x.zip"] = Served(OTHER, etag=None)
    assert fetch(sha256=OTHER_HASH) == OTHER
    assert server.sent[-2:] == [len(OTHER) - 500_000, len(OTHER)]
    assert "its pieces do not make the published file" in fetch.lines[-1]


def test_size_that_changes_is_seen_without_a_hash(fetch: Fetch, server: FileServer) -> None:
    server.files["/x.zip"].etag = None
    server.plan = broken_off(500_000)
    with pytest.raises(DownloadError):
        fetch(num_bytes=None, sha256=None)
    server.files["/x.zip"] = Served(OTHER[:-1], etag=None)
    assert fetch(num_bytes=None, sha256=None) == OTHER[:-1]


def test_range_nobody_asked_for_is_not_taken(fetch: Fetch, server: FileServer) -> None:
    server.plan = [Step(cut=500_000), Step(start=400_000)]
    assert fetch(sha256=None) == CONTENT
    assert server.seen[-1].range is None


def test_tries_that_advance_are_no_failures(fetch: Fetch, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.plan = [Step(cut=100_000)] * 10
    with pytest.raises(DownloadError, match=r"the connection ended after 300,000 .* \(3 times\)"):
        fetch()
    monkeypatch.setattr(download_module, "ADVANCE_BYTES", 100_000)
    assert fetch() == CONTENT


def test_wrong_hash_is_put_aside(fetch: Fetch, server: FileServer) -> None:
    server.files["/x.zip"].content = OTHER
    with pytest.raises(DownloadError) as failure:
        fetch()
    message = str(failure.value)
    assert f"SHA-256 is {OTHER_HASH}, expected {HASH}" in message
    assert f"put aside as {fetch.folder / 'x.zip.rejected'}" in message
    assert message.count("\n") == 0
    assert fetch.left == ["x.zip.rejected"]
    assert (fetch.folder / "x.zip.rejected").read_bytes() == OTHER


def test_mirrors_in_their_order(fetch: Fetch, server: FileServer) -> None:
    server.files |= {"/bad.zip": Served(OTHER), "/short.zip": Served(CONTENT[:-1])}
    assert fetch("/none.zip", "/bad.zip", "/short.zip", "/x.zip") == CONTENT
    assert [seen.target for seen in server.seen] == ["/none.zip", "/bad.zip", "/short.zip", "/x.zip"]
    assert "404" in fetch.lines[0]
    assert "SHA-256" in fetch.lines[1]
    assert "its file has 1,023,999 bytes, expected 1,024,000" in fetch.lines[2]


def test_another_address_goes_on_only_if_a_hash_proves_it(fetch: Fetch, server: FileServer, tmp_path: Path) -> None:
    server.files["/y.zip"] = Served(CONTENT, etag='"other"')
    server.plan = broken_off(500_000)
    assert fetch("/x.zip", "/y.zip") == CONTENT
    assert (server.seen[-1].range, server.seen[-1].if_range) == ("bytes=500000-", None)
    server.plan = broken_off(500_000)
    assert Fetch(server, tmp_path / "2")("/x.zip", "/y.zip", sha256=None) == CONTENT
    assert server.seen[-1].range is None


def test_error_page_of_a_mirror_does_not_cost_what_came(fetch: Fetch, server: FileServer) -> None:
    server.files["/page.zip"] = Served(b"<html>log in</html>")
    server.plan = broken_off(500_000)
    assert fetch("/x.zip", "/page.zip", "/x.zip") == CONTENT
    assert server.sent[-1] == len(CONTENT) - 500_000


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (403, 1), (500, 3), (429, 3)])
def test_status_decides_on_further_tries(fetch: Fetch, server: FileServer, status: int, tries: int) -> None:
    server.plan = [Step(status=status)] * tries
    with pytest.raises(
        DownloadError, match=rf"x\.zip could not be downloaded: .*HTTP status {status} .*--mirror.*--archive"
    ):
        fetch()
    assert len(server.seen) == tries
    assert fetch.left == []


def test_redirects_are_followed_with_the_range(fetch: Fetch, server: FileServer) -> None:
    server.plan = [Step(cut=5000), Step(status=302, location="/x.zip")]
    assert fetch("/x.zip") == CONTENT
    assert server.seen[-1].range == "bytes=5000-"
    server.plan = [Step(status=301)]  # Amazon's storage for a bucket that moved: no address given
    (fetch.folder / "x.zip").unlink()
    with pytest.raises(DownloadError, match="301"):
        fetch()


def test_silence_is_a_time_out(fetch: Fetch, server: FileServer) -> None:
    server.plan = [Step(stall=700_000), Step(stall=0)]
    with pytest.raises(DownloadError, match=r"nothing came for 0\.2 seconds \(2 times\)"):
        fetch(patience=Patience(timeout=0.2, attempts=2, pause=0.001))
    assert (fetch.folder / "x.zip.part").stat().st_size == 700_000
    assert fetch() == CONTENT
    assert server.seen[-1].range == "bytes=700000-"


def test_no_server_there(fetch: Fetch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(DownloadError, match=r"Connection refused \(3 times\)"):
            fetch(f"http://127.0.0.1:{free.getsockname()[1]}/x.zip")
    assert fetch.left == []


def test_unknown_host_is_told_at_once(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object, **named: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(DownloadError, match=r"corpora\.invalid/x\.zip: Name or service not known;"):
        fetch("http://corpora.invalid/x.zip")


def test_without_a_stated_length(fetch: Fetch, server: FileServer) -> None:
    server.files["/x.zip"].length = False
    server.plan = [Step(cut=100_000)]
    assert fetch() == CONTENT  # its size is known from elsewhere
    server.files["/x.zip"].content = CONTENT + b"more"
    (fetch.folder / "x.zip").unlink()
    with pytest.raises(DownloadError, match="sends more than 1,024,000 bytes"):
        fetch()
    assert fetch.left == []
    assert fetch(num_bytes=None, sha256=None) == CONTENT + b"more"


def test_proxy_of_the_environment(fetch: Fetch, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    assert fetch("http://corpora.invalid/x.zip") == CONTENT
    assert server.seen[0].target == "http://corpora.invalid/x.zip"


@pytest.mark.parametrize("notes", [None, "", "[]", '{"url": 1}'])
def test_bytes_of_unknown_origin_are_not_used(fetch: Fetch, server: FileServer, notes: str | None) -> None:
    fetch.folder.mkdir()
    (fetch.folder / "x.zip.part").write_bytes(b"?" * 1000)
    if notes is not None:
        (fetch.folder / "x.zip.part.json").write_text(notes)
    assert fetch(sha256=None) == CONTENT
    assert server.seen[0].range is None


@pytest.mark.parametrize("content", [CONTENT, OTHER])
def test_part_that_is_whole_is_checked_without_a_request(fetch: Fetch, server: FileServer, content: bytes) -> None:
    server.plan = broken_off(1000)
    with pytest.raises(DownloadError):
        fetch()
    server.seen.clear()
    (fetch.folder / "x.zip.part").write_bytes(content)  # killed between the last byte and the new name
    assert fetch() == CONTENT
    assert server.sent == ([] if content == CONTENT else [len(CONTENT)])


def test_part_longer_than_the_file_starts_again(fetch: Fetch, server: FileServer) -> None:
    server.plan = broken_off(1000)
    with pytest.raises(DownloadError):
        fetch()
    (fetch.folder / "x.zip.part").write_bytes(CONTENT + b"more")
    assert fetch() == CONTENT
    assert server.seen[-2].status == 416


def test_wrong_file_that_is_there_already_is_left(fetch: Fetch, server: FileServer) -> None:
    fetch.folder.mkdir()
    (fetch.folder / "x.zip").write_bytes(OTHER)
    with pytest.raises(
        UsageError, match=rf"--download-dir .*x\.zip in it has SHA-256 {OTHER_HASH}, expected {HASH}; it was left"
    ):
        fetch()
    assert (fetch.folder / "x.zip").read_bytes() == OTHER
    assert server.seen == []


def test_unusable_folders(fetch: Fetch, tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"a file")
    with pytest.raises(UsageError, match=r"--download-dir .*/d: cannot be made \((File exists|Not a directory)\)"):
        fetch()
    (tmp_path / "d").unlink()
    (tmp_path / "d" / "x.zip").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"x\.zip in it is not a file"):
        fetch()
    (tmp_path / "d" / "x.zip").rmdir()
    os.mkfifo(tmp_path / "d" / "x.zip.part")
    with pytest.raises(UsageError, match=r"x\.zip\.part in it is not a regular file"):
        fetch()


def test_full_disk_is_known_before(fetch: Fetch, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 23_000})
    monkeypatch.setattr(partial.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match=r"x\.zip\.part: no space: it needs 1,024,000 bytes more, 23,000 are free"):
        fetch()
    assert fetch.left == []


LIMITED = """
import resource, signal, sys
from pathlib import Path
from megatron_allattn.data.download import DownloadError, Remote, download
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
try:
    download(Remote(name="x.zip", urls=(sys.argv[1],)), Path(sys.argv[2]))
except DownloadError as error:
    sys.exit(str(error))
"""


def child(script: str, fetch: Fetch) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", script, f"{fetch.server.url}/x.zip", str(fetch.folder)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_full_disk_on_the_way(fetch: Fetch, server: FileServer) -> None:
    error = child(LIMITED, fetch).communicate(timeout=60)[1]
    assert "x.zip.part: no space: it needs 624,000 bytes more" in error
    assert error.count("\n") == 1
    assert fetch() == CONTENT  # with room again it goes on
    assert server.seen[-1].range == "bytes=400000-"


# a shell starts its background jobs with SIGINT ignored, and children inherit that: here it must count
HEEDING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from megatron_allattn.data.download import Remote, download
download(Remote(name="x.zip", urls=(sys.argv[1],)), Path(sys.argv[2]), notify=lambda line: print(line, file=sys.stderr))
"""


def wait_for_bytes(path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("count", [0, 512_000])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_in_the_middle_goes_on(fetch: Fetch, server: FileServer, number: signal.Signals, count: int) -> None:
    server.plan = [Step(stall=count)]
    process = child(HEEDING, fetch)
    wait_for_bytes(fetch.folder / "x.zip.part.json", 1)
    wait_for_bytes(fetch.folder / "x.zip.part", count)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    assert ("keeps what came, the next try goes on from there" in error) == (number == signal.SIGINT and count > 0)
    assert fetch() == CONTENT
    assert server.sent == [count, len(CONTENT) - count]
    assert fetch.left == ["x.zip"]


@pytest.mark.parametrize(("count", "number"), [(100_000, signal.SIGKILL), (0, signal.SIGINT)])
def test_others_wait_for_the_one_that_fetches(
    fetch: Fetch, server: FileServer, count: int, number: signal.Signals
) -> None:
    server.plan = [Step(stall=count)]
    first = child(HEEDING, fetch)
    wait_for_bytes(fetch.folder / "x.zip.part.json", 1)
    wait_for_bytes(fetch.folder / "x.zip.part", count)
    results, others = [], [Fetch(server, fetch.folder.parent) for _ in range(4)]
    threads = [threading.Thread(target=lambda other=other: results.append(other())) for other in others]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not all(other.lines for other in others):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    first.send_signal(number)  # now one of the waiting goes on with its part, if it leaves one
    first.communicate(timeout=60)
    for thread in threads:
        thread.join(60)
    assert results == [CONTENT] * 4
    assert server.sent == [count, len(CONTENT) - count]
    assert all("waiting for the process" in other.lines[0] for other in others)
    assert fetch.left == ["x.zip"]


def test_file_that_another_brings_between_look_and_lock(
    fetch: Fetch, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bring(*arguments: object) -> None:
        (fetch.folder / "x.zip").write_bytes(CONTENT)

    monkeypatch.setattr(partial, "_lock", bring)
    assert fetch() == CONTENT
    assert server.seen == []
    assert fetch.left == ["x.zip"]


@pytest.mark.parametrize(("number", "words"), [(errno.EACCES, "Permission denied"), (errno.EROFS, "Read-only")])
def test_folder_without_the_right_to_write(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*arguments: object) -> int:  # a stand-in, because root may write anywhere
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(partial.os, "open", refuse)
    with pytest.raises(UsageError, match=rf"--download-dir .*: x\.zip\.part in it cannot be written \({words}"):
        fetch()


@pytest.mark.parametrize(
    ("mirror", "url"),
    [
        ("http://h/a/x.zip", "http://h/a/x.zip"),
        ("http://h/a/renamed.zip", "http://h/a/renamed.zip"),
        ("https://h:8080/a/", "https://h:8080/a/x.zip"),
        ("https://h/a", "https://h/a/x.zip"),
        ("http://h", "http://h/x.zip"),
        ("http://h/get?id=7", "http://h/get?id=7"),
        ("http://h/x.zip?key=1", "http://h/x.zip?key=1"),
    ],
)
def test_mirrors_are_files_or_folders(mirror: str, url: str) -> None:
    assert mirror_url(mirror, "x.zip") == url


@pytest.mark.parametrize(
    "mirror",
    [
        "ftp://h/x.zip",
        "file:///etc/passwd",
        "/data/x.zip",
        "h/x.zip",
        "http://",
        "",
        "http://[::1",
        "http://h:x/",
        "http://u:p@h/",
    ],
)
def test_mirrors_of_other_kinds_are_refused(mirror: str) -> None:
    with pytest.raises(UsageError, match=r"--mirror .*is not an http or https address"):
        mirror_url(mirror, "x.zip")


def test_a_redirect_loop_is_told_in_one_line(fetch: Fetch, server: FileServer) -> None:
    server.plan = [Step(status=302, location="/x.zip")] * 12
    with pytest.raises(DownloadError, match=r"HTTP status 302 .* infinite loop"):
        fetch()
    assert fetch.lines and all("\n" not in line for line in fetch.lines)
