"""Downloads over HTTP(S) that may end at any moment and go on where they were.

Bytes arrive in FILE.part (data/partial.py). The server is asked for the rest alone (Range), and only on condition that
its file is still the same: by If-Range where it names a version (ETag or date), and by the size. Whoever sends
the whole file instead is heard from its start. Only a file with the right SHA-256 gets its name; one that was put
together from pieces and is wrong is fetched once more in one piece.

Addresses are tried in their order, each a few times. Proxies come from the environment, as urllib takes them.
"""

import http.client
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from megatron_allattn import __version__
from megatron_allattn.config.disk import sha256_of
from megatron_allattn.config.errors import one_line, usage_error
from megatron_allattn.data.partial import DownloadError, Origin, Part, locked_part, part_path

CHUNK_BYTES = 2**18
ADVANCE_BYTES = 2**20  # a try that brought so much is no failed one
PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
RANGE_NOT_SATISFIABLE = 416
HEADERS = {"User-Agent": f"megatron-allattn/{__version__}"}  # some servers refuse urllib's own name
WAY_OUT = "name other addresses with --mirror, or bring the file here and name it with --archive"
KEPT = "keeps what came, the next try goes on from there"

Progress = Callable[[int, int | None], None]
Notify = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file on the web: its name here, its addresses in the order to try, and what it must be (None: not known)."""

    name: str
    urls: tuple[str, ...]
    num_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Patience:
    """timeout: seconds without a byte · attempts: tries of one address in a row that bring nothing · pause: seconds
    before the second of them, doubled before each further one."""

    timeout: float = 30.0
    attempts: int = 4
    pause: float = 1.0


class _Passing(Exception):
    """A failure that another try may not meet."""


class _Final(Exception):
    """This address does not give the file."""


def mirror_url(mirror: str, name: str) -> str:
    """The address of file `name` that a value of --mirror means: itself, or `name` in it if it names no archive.

    An address with a query, or whose path ends like the file (".zip"), is taken as it is; any other is a folder.
    """
    try:
        parts = urlsplit(mirror)
        plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.username
    except ValueError:
        plain = False
    if not plain:
        rule = "is not an http or https address without a user name"
        raise usage_error("--mirror", mirror, rule, f"write it like https://host/data/{name}")
    if parts.query or parts.path.endswith(Path(name).suffix):
        return mirror
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def download(
    remote: Remote,
    folder: Path,
    *,
    progress: Progress = lambda done, total: None,
    notify: Notify = lambda line: None,
    patience: Patience = Patience(),
) -> Path:
    """The file `remote.name` in `folder`, with the right SHA-256; fetched if it is not there.

    progress: gets the bytes that are there, and the size (None: not known) · notify: gets lines for the user.
    Processes that want the same file wait for the one that fetches it. What is there of an unfinished one stays for the
    next call. UsageError: the folder, or a file in it, is of no use. DownloadError: no address gives the file, or the
    disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise usage_error("--download-dir", folder, f"cannot be made ({error.strerror})", "choose another") from None
    target, problems = folder / remote.name, []
    for url in remote.urls:
        with locked_part(target, notify) as part:
            if part is None:
                return _present(target, remote, notify)
            try:
                return _Transfer(remote, url, part, progress, notify, patience).run()
            except _Final as error:
                problems.append(f"{url}: {error}")
                notify(problems[-1])
            except (KeyboardInterrupt, SystemExit):
                if part.size:
                    notify(f"{part.path} {KEPT}")
                raise
    if part_path(target).exists():
        problems.append(f"{part_path(target)} {KEPT}")
    raise DownloadError(f"{remote.name} could not be downloaded: {'; '.join(problems)}; {WAY_OUT}")


def _present(target: Path, remote: Remote, notify: Notify) -> Path:
    if not target.is_file():
        raise usage_error(
            "--download-dir", target.parent, f"{target.name} in it is not a file", "choose another folder"
        )
    found = sha256_of(target)
    if remote.sha256 not in (None, found):
        rule = f"{target.name} in it has SHA-256 {found}, expected {remote.sha256}; it was left as it is"
        raise usage_error("--download-dir", target.parent, rule, "delete it, or choose another folder")
    notify(f"{target} is there already")
    return target


@dataclass(frozen=True)
class _Transfer:
    """One address' try at the part."""

    remote: Remote
    url: str
    part: Part
    progress: Progress
    notify: Notify
    patience: Patience

    def run(self) -> Path:
        """The whole file, checked and named; goes on with what is there."""
        resumed = self.part.origin is not None
        self._complete()
        if resumed and self._wrong_hash():
            self.notify(f"{self.remote.name}: its pieces do not make the published file; fetching it in one piece")
            self._forget()
            self._complete()
        if found := self._wrong_hash():
            rule = f"SHA-256 is {found}, expected {self.remote.sha256}"
            raise _Final(f"{rule}; the file was put aside as {self.part.reject()}")
        self.part.finish()
        return self.part.target

    def _wrong_hash(self) -> str | None:
        """The part's SHA-256, unless it is the expected one."""
        if self.remote.sha256 is None:
            return None
        found = self.part.sha256
        return None if found == self.remote.sha256 else found

    def _forget(self) -> None:
        self.part.begin(Origin(self.url, None, None))

    def _complete(self) -> None:
        """Bring the part to its end, by as many requests as it takes."""
        failures = 0
        while True:
            before = self.part.size
            try:
                self._request()
                return
            except _Passing as error:
                failures = 1 if self.part.size >= before + ADVANCE_BYTES else failures + 1
                if failures >= self.patience.attempts:
                    raise _Final(f"{error} ({failures} times)") from None
                self.notify(f"{self.url}: {error}; trying again")
            time.sleep(self.patience.pause * 2 ** (failures - 1))

    def _request(self) -> None:
        """One request: for the rest, or for the whole file."""
        part, origin, timeout = self.part, self.part.origin, self.patience.timeout
        if origin is not None and part.size == (origin.num_bytes or self.remote.num_bytes):
            return  # the last one ended before it could be checked
        if origin is not None and origin.url != self.url and self.remote.sha256 is None:
            origin = None  # two addresses may have different files, and no hash would tell
        request = urllib.request.Request(self.url, headers=HEADERS | self._range(origin))
        try:
            with urllib.request.build_opener().open(request, timeout=timeout) as response:
                total = self._begin(response, origin)
                while chunk := response.read1(CHUNK_BYTES):
                    part.append(chunk, total)
                    self.progress(part.size, total)
                    if total is not None and part.size > total:
                        self._forget()
                        raise _Final(f"sends more than {total:,} bytes")
        except (OSError, http.client.HTTPException) as error:
            if origin and isinstance(error, urllib.error.HTTPError) and error.code == RANGE_NOT_SATISFIABLE:
                if origin.url != self.url:
                    raise _Final(f"its file ends before the {part.size:,} bytes that are here") from None
                self._forget()
            raise _failure(error, timeout) from None
        if total is not None and part.size < total:
            raise _Passing(f"the connection ended after {part.size:,} of {total:,} bytes")

    def _range(self, origin: Origin | None) -> dict[str, str]:
        """Headers that ask for what is missing, if the server's file is still the one of `origin`."""
        if origin is None:
            return {}
        condition = {"If-Range": origin.version} if origin.version and origin.url == self.url else {}
        return {"Range": f"bytes={self.part.size}-", **condition}

    def _begin(self, response: http.client.HTTPResponse, origin: Origin | None) -> int | None:
        """Make the part fit the answer that begins; returns the whole file's size (None: not known)."""
        etag, date = response.headers.get("ETag", ""), response.headers.get("Last-Modified")
        version = etag if etag.startswith('"') else date  # a weak one (W/"…") does not vouch for bytes
        resumed = origin if response.status == http.HTTPStatus.PARTIAL_CONTENT else None
        if resumed is None and response.status != http.HTTPStatus.OK:
            raise _Final(one_line(f"HTTP status {response.status} {response.reason}"))
        start, total = _content_range(response) if resumed else (0, response.length)
        expected, name = self.remote.num_bytes, self.remote.name
        if total is not None and expected is not None and total != expected:
            raise _Final(f"its file has {total:,} bytes, expected {expected:,}")
        if resumed is not None:
            changed = resumed.url == self.url and None not in (version, resumed.version) and version != resumed.version
            if changed or start != self.part.size or total not in (None, resumed.num_bytes or total):
                self._forget()
                raise _Passing("its file is another one by now, starting from the start")
            self.notify(f"{name}: going on from byte {start:,}")
            total = resumed.num_bytes if total is None else total
        else:
            if origin is not None:
                self.notify(f"{name}: from its start again; the server cannot resume, or has another file by now")
            self.part.begin(Origin(self.url, version, total))
        total = expected if total is None else total
        if total is not None:
            self.part.check_space(total)
        return total


def _content_range(response: http.client.HTTPResponse) -> tuple[int | None, int | None]:
    """First byte and whole size that a 206 answer states."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
    return (int(match[1]), None if match[2] == "*" else int(match[2])) if match else (None, None)


def _failure(error: Exception, timeout: float) -> _Passing | _Final:
    """What an error of the network means."""
    if isinstance(error, urllib.error.HTTPError):
        kind = _Passing if error.code in (*PASSING_STATUS, RANGE_NOT_SATISFIABLE) else _Final
        return kind(one_line(f"HTTP status {error.code} {error.reason}"))  # of a redirect loop urllib makes three lines
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return _Passing(f"nothing came for {timeout:g} seconds")
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return (_Final if isinstance(reason, socket.gaierror | ssl.SSLCertVerificationError) else _Passing)(text)
