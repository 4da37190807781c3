"""A local HTTP server of files that misbehaves on request: it cuts connections, stalls, refuses, forgets ranges."""

import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


@dataclass
class Served:
    """A file and how its server treats it: the ETag and date it names, whether it knows ranges and If-Range, and
    whether it says the length (else the end of the connection is the end of the file)."""

    content: bytes
    etag: str | None = '"v1"'
    date: str | None = None
    ranges: bool = True
    conditions: bool = True
    length: bool = True


@dataclass(frozen=True)
class Step:
    """What one answer does instead of the right thing: a status, an end or a halt after some bytes of the body, or a
    range nobody asked for."""

    status: int | None = None
    cut: int | None = None
    stall: int | None = None
    location: str | None = None
    start: int | None = None


@dataclass
class Seen:
    """A request: its target, the headers that matter, and what it got."""

    target: str
    range: str | None
    if_range: str | None
    user_agent: str
    status: int = 0
    sent: int = 0


@dataclass
class FileServer:
    """Serves `files` (path → file) on a free port while in `with`; each answer takes a step of `plan`."""

    files: dict[str, Served] = field(default_factory=dict)
    plan: list[Step] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Self:
        self.ending = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"files": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ending.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def sent(self) -> list[int]:
        """Bytes of every answer's body."""
        return [request.sent for request in self.seen]


class _Handler(BaseHTTPRequestHandler):
    files: FileServer

    def do_GET(self) -> None:
        server = self.files
        headers = self.headers
        seen = Seen(self.path, headers["Range"], headers["If-Range"], headers["User-Agent"])
        server.seen.append(seen)
        step = server.plan.pop(0) if server.plan else Step()
        served = server.files.get(urlsplit(self.path).path)
        seen.status = step.status or (200 if served else 404)
        if served is None or step.status:
            self.send_response(seen.status)
            if step.location:
                self.send_header("Location", step.location)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = self._start(served) if step.start is None else step.start
        if start >= len(served.content) > 0:
            seen.status = 416
        elif start:
            seen.status = 206
        self.send_response(seen.status)
        body = b"" if seen.status == 416 else served.content[start:]
        if seen.status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(served.content) - 1}/{len(served.content)}")
        if served.etag:
            self.send_header("ETag", served.etag)
        if served.date:
            self.send_header("Last-Modified", served.date)
        if served.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        stop = next((count for count in (step.cut, step.stall) if count is not None), len(body))
        seen.sent = len(body[:stop])
        with suppress(ConnectionError):  # the other side has heard enough
            self.wfile.write(body[:stop])
        if step.stall is not None:
            server.ending.wait(30)

    def _start(self, served: Served) -> int:
        """First byte to send: 0 unless a range is asked for, known, and meant for this version."""
        match = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        condition = self.headers["If-Range"]
        fits = condition is None or not served.conditions or condition in (served.etag, served.date)
        return int(match[1]) if match and served.ranges and fits else 0

    def log_message(self, format: str, *args: object) -> None:
        pass
